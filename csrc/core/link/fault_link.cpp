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
    throw Error(std::string("the simulated device was made to fail to ") + call + '.');
  }
}

Stream FaultLink::createStream(int device) {
  mayFail("create a stream");
  return link_.createStream(device);
}

Event FaultLink::createEvent(int device) {
  mayFail("create an event");
  return link_.createEvent(device);
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

void FaultLink::copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) {
  mayFail("copy to the device");
  link_.copyToDevice(device, host, bytes, stream);
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
  return !failsNow() && link_.registerHost(host, bytes);
}

void* FaultLink::allocate(std::size_t bytes, Stream stream) {
  if (failsNow()) {
    throw OutOfMemory(
        OutOfMemory::Where::Device, bytes,
        "the simulated device was made to refuse " + std::to_string(bytes) + " bytes of its memory.");
  }
  return link_.allocate(bytes, stream);
}

bool FaultLink::capturing(Stream stream) {
  mayFail("say whether a stream is being captured");
  return link_.capturing(stream);
}

} // namespace offload
