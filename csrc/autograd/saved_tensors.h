// Tensors that autograd saves, kept in host memory until backward asks for them.
#pragma once

#include "autograd/saved_storage.h"
#include "autograd/step_meter.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace offload {

struct SavedTensorsOptions {
  /// Storages of fewer bytes stay where they are.
  std::size_t minBytes = 0;
  /// While no more bytes are on the device, none are sent; the last ones stay, which backward asks for first.
  std::size_t keepBytes = 0;
  /// How much of the bytes that would be sent is; in the first step, if as much as the link hides is to be learned from the steps.
  double share = 1;
  bool learnsShare = false;
  /// Device bytes that may stay of what would be sent, if it weren't for the share; what is saved beyond is sent.
  std::size_t maxGpuBytes = SIZE_MAX;
  /// Host bytes that may be held at once; what is saved beyond stays where it is, which is said once.
  std::size_t maxHostBytes = SIZE_MAX;
  /// Device bytes on their way to the host, beyond which the stream waits, and of what is fetched ahead; the ring bounds them too.
  std::size_t inFlightBytes = SIZE_MAX;
  /// Whether the host memory is page-locked.
  bool pinMemory = true;
  /// Whether copies overlap with what is computed, and are made ahead.
  bool useStreams = true;
  /// Whether results of operations go to the host. What is fetched of an offload tensor is never kept either way.
  bool activations = true;
};

/// What autograd keeps instead of a tensor, which it must not hold itself: the tensor may hold the graph.
class SavedTensor {
 public:
  /// Without a storage it is kept as it is.
  SavedTensor(std::shared_ptr<SavedStorage> storage, const at::Tensor& tensor);
  /// Throws PyTorch's own error where the tensor has been written to since it was saved.
  at::Tensor unpack() const;

 private:
  friend class SavedTensors;
  [[noreturn]] void refuseChanged() const;

  const std::shared_ptr<SavedStorage> storage_;
  const at::Tensor kept_; // all of it, or its sizes, strides and dtype without memory
  const c10::VariableVersion version_;
  const std::uint32_t savedVersion_;
};

/// Packs and unpacks what autograd saves; one for all that is saved in one region of a program, whatever thread does.
///
/// Note [Saved tensors]
/// A tensor that is saved is noted down and, with it, its storage. Once nobody else holds the storage any more, which is looked at
/// whenever something else is saved, it becomes a result (Residency::adopt) that goes home at once: no copy on the device, no wait
/// on any stream, and the memory is given back to PyTorch after the copy, in stream order, through the ring as all that passes. So
/// what somebody still holds, a parameter above all, never travels, as that would free nothing; a storage that several nodes save,
/// or through several views, travels once, and so comes back; and when backward turns round, what was saved last is still there.
///
/// How much goes is all, what exceeds a number of bytes, or a share, as that which the link hides (StepMeter) or by which no more than
/// so many bytes stay. A share is spread evenly over a step: neither the link nor the ring takes more at once.
///
/// Backward asks in the opposite order, but for what one node saved. With each storage that it is given, those saved before it are
/// fetched ahead, within a part of the ring. Who asks in another order gets right bytes, later.
///
/// A fetched weight that is saved is a reference to its source, and is fetched again: its bytes are on the host already.
///
/// With hooks PyTorch doesn't check whether what was saved was written to since. So that is done here, by the same counter.
class SavedTensors : public std::enable_shared_from_this<SavedTensors> {
 public:
  explicit SavedTensors(SavedTensorsOptions options) : options_(options) {
    if (options.learnsShare || options.share < 1) {
      meter_.emplace(options.share, options.learnsShare);
    }
  }

  const SavedTensorsOptions& options() const {
    return options_;
  }
  /// Whether pack() would note the tensor down for the host, now or later.
  bool mayGoHome(const at::Tensor& tensor) const;
  /// `home` says whether a result may go to the host.
  std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor, bool home = true);
  at::Tensor unpack(const SavedTensor& saved);
  /// To be called when nothing more is saved for now, of what a compiled function has saved all at once above all: it is looked at
  /// once more, and the last of it, as much as the ring has room for at once and one storage at least, stays.
  void left();
  /// What has been learned of how much may go.
  std::optional<StepMeter::Plan> plan() const {
    return meter_ ? meter_->plan() : std::nullopt;
  }

 private:
  friend class SavedStorage;

  std::shared_ptr<SavedStorage> storageOf(const at::Tensor& tensor, bool home);
  std::shared_ptr<SavedStorage> noteDown(const at::Tensor& tensor);
  static void sendHomeWhatMayGo(c10::Device target, std::size_t look, std::size_t lastBytes = 0);
  void sendWhatExceeds();
  std::size_t roomToStay();
  void letStay(SavedStorage& saved);
  void doWithout(const std::string& why);
  void forget(SavedStorage& saved) noexcept;
  StepMeter* meter() {
    return meter_ ? &*meter_ : nullptr;
  }

  const SavedTensorsOptions options_;
  std::optional<StepMeter> meter_;
  std::atomic<std::size_t> hostBytes_{0};
  std::atomic<bool> warned_{false};

  std::mutex mutex_; // never held across a call of the Link, nor while a SavedStorage goes
  std::deque<std::weak_ptr<SavedStorage>> alone_; // that nobody else holds, and that are not home; and some that are gone
  std::size_t aloneBytes_ = 0; // of those that are there
  std::size_t aloneCount_ = 0;
  std::size_t stayingBytes_ = 0; // of the device, which might have gone
  std::map<c10::DeviceIndex, std::size_t> noted_; // how many tensors of a device have been saved since the last left()
};

} // namespace offload
