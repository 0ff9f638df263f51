// Keeps a Slot in place while something may use it.
#pragma once

#include "core/slot.h"
#include "core/stream_set.h"

namespace offload {

class Residency;

/// Move-only. The storage of a fetched tensor owns one, so a Slot lives exactly as long as autograd, a view or a user needs it.
/// Letting go neither waits nor blocks, and may happen on any thread.
class Pin {
 public:
  Pin() = default;
  Pin(Pin&& other) noexcept;
  Pin& operator=(Pin&& other) noexcept;
  ~Pin();

  /// Where the fetched extent begins on the device; null for an empty one.
  void* data() const noexcept {
    return data_;
  }
  /// Of a Pin that holds a Slot.
  int device() const noexcept {
    return slot_->device;
  }
  /// Names one more stream whose work, enqueued until the Pin goes, may use the memory.
  void alsoUsedOn(Stream stream);
  explicit operator bool() const noexcept {
    return slot_ != nullptr;
  }

 private:
  friend class Residency;
  Pin(Residency& residency, std::shared_ptr<Slot> slot, void* data, const StreamSet& streams);
  void letGo() noexcept;

  Residency* residency_ = nullptr;
  std::shared_ptr<Slot> slot_;
  void* data_ = nullptr;
  StreamSet streams_;
};

} // namespace offload
