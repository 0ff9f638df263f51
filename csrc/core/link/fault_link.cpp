#include "core/link/fault_link.h"

#include <utility>

#include "core/error.h"

namespace offload {

void FaultLink::fail(std::uint64_t n, Failing failing) {
  const std::lock_guard lock(mutex_);
  countdown_ = n;
  failures_ = 0;
  failing_ = failing;
}

std::uint64_t FaultLink::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

LinkUse FaultLink::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

void FaultLink::count(std::int64_t LinkUse::*of, std::int64_t by) noexcept {
  const std::lock_guard lock(mutex_);
  use_.*of += by;
}

bool FaultLink::failsNow() {
  const std::lock_guard lock(mutex_);
  const bool lost = failing_ == Failing::FromThenOn && failures_ > 0;
  if (!lost && (countdown_ == 0 || --countdown_ > 0)) {
    return false;
  }
  ++failures_;
  return true;
}

void FaultLink::mayFail(const char* call) {
  if (failsNow()) {
    throw Error(std::string("offload: the device was made to fail to ") + call + '.');
  }
}

Stream FaultLink::createStream(int device) {
  mayFail("create a stream");
  const Stream stream = link_.createStream(device);
  count(&LinkUse::streams, 1);
  return stream;
}

void FaultLink::destroyStream(Stream stream) noexcept {
  link_.destroyStream(stream);
  count(&LinkUse::streams, -1);
}

Event FaultLink::createEvent(int device) {
  mayFail("create an event");
  const Event event = link_.createEvent(device);
  count(&LinkUse::events, 1);
  return event;
}

void FaultLink::destroyEvent(Event event) noexcept {
  link_.destroyEvent(event);
  count(&LinkUse::events, -1);
}

void FaultLink::record(Event event, Stream stream) {
  mayFail("record an event");
  link_.record(event, stream);
}

void FaultLink::wait(Stream stream, Event event) {
  mayFail("make a stream wait");
  link_.wait(stream, event);
}

bool FaultLink::query(Event event) {
  mayFail("query an event");
  return link_.query(event);
}

void FaultLink::synchronize(Event event) {
  mayFail("wait for an event");
  link_.synchronize(event);
}

Event FaultLink::createTimer(int device) {
  mayFail("create a timer");
  Event timer = link_.createTimer(device);
  if (timer != nullptr) count(&LinkUse::events, 1);
  return timer;
}

std::optional<double> FaultLink::elapsed(int device, Event from, Event to) {
  mayFail("read a timer");
  return link_.elapsed(device, from, to);
}

void FaultLink::copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) {
  mayFail("copy to the device");
  link_.copyToDevice(device, host, bytes, stream);
}

void FaultLink::copyAllToDevice(std::span<const Copy> copies, Stream stream) {
  mayFail("copy to the device at once");
  link_.copyAllToDevice(copies, stream);
}

void FaultLink::copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) {
  mayFail("copy to the host");
  link_.copyToHost(host, device, bytes, stream);
}

void FaultLink::fill(void* device, unsigned char value, std::size_t bytes, Stream stream) {
  mayFail("fill device memory");
  link_.fill(device, value, bytes, stream);
}

void FaultLink::launchHost(HostTask task, Stream stream) {
  mayFail("launch a host task");
  link_.launchHost(std::move(task), stream);
}

bool FaultLink::registerHost(void* host, std::size_t bytes) {
  if (failsNow() || !link_.registerHost(host, bytes)) return false;
  count(&LinkUse::lockedBytes, static_cast<std::int64_t>(bytes));
  return true;
}

void FaultLink::unregisterHost(void* host, std::size_t bytes) noexcept {
  link_.unregisterHost(host, bytes);
  count(&LinkUse::lockedBytes, -static_cast<std::int64_t>(bytes));
}

void* FaultLink::allocate(std::size_t bytes, Stream stream) {
  if (failsNow()) {
    throw OutOfMemory(
        OutOfMemory::Where::Device, bytes,
        "offload: the device was made to refuse " + std::to_string(bytes) + " bytes of its memory.");
  }
  void* const data = link_.allocate(bytes, stream);
  count(&LinkUse::buffers, 1);
  return data;
}

void FaultLink::free(void* device, Stream stream) noexcept {
  link_.free(device, stream);
  count(&LinkUse::buffers, -1);
}

std::uint64_t FaultLink::captureOf(Stream stream) {
  mayFail("say whether a stream is being captured");
  return link_.captureOf(stream);
}

} // namespace offload
