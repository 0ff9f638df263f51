#include "core/pin.h"

#include "core/residency.h"

namespace offload {

Pin::Pin(Residency& residency, std::shared_ptr<Slot> slot, void* data, const StreamSet& streams)
    : residency_(&residency), slot_(std::move(slot)), data_(data), streams_(streams) {}

Pin::Pin(Pin&& other) noexcept
    : residency_(other.residency_),
      slot_(std::move(other.slot_)),
      data_(std::exchange(other.data_, nullptr)),
      streams_(std::move(other.streams_)) {}

Pin& Pin::operator=(Pin&& other) noexcept {
  if (this != &other) {
    letGo();
    residency_ = other.residency_;
    slot_ = std::move(other.slot_);
    data_ = std::exchange(other.data_, nullptr);
    streams_ = std::move(other.streams_);
  }
  return *this;
}

Pin::~Pin() {
  letGo();
}

void Pin::alsoUsedOn(Stream stream) {
  if (slot_) streams_.add(stream);
}

void Pin::letGo() noexcept {
  if (auto slot = std::exchange(slot_, nullptr)) residency_->unpin(slot, streams_);
  data_ = nullptr;
}

} // namespace offload
