#include "aten/events.h"

#include "aten/context.h"

#include <chrono>

namespace offload::events {
namespace {

using Clock = std::chrono::steady_clock;

struct TimedEvent {
  c10::DeviceIndex index = 0;
  Clock::time_point time; // where there is no paired event
  void* paired = nullptr; // CUDA's
};

const c10::impl::DeviceGuardImplInterface& cudaGuard() {
  return *c10::impl::getDeviceGuardImpl(c10::kCUDA);
}

c10::Stream currentStream(c10::DeviceIndex index) {
  return cudaGuard().getStream({c10::kCUDA, index});
}

// The event where it is one of CUDA's; null where the time is past already.
const TimedEvent* paired(void* event) {
  const auto* timed = static_cast<const TimedEvent*>(event);
  return timed != nullptr && timed->paired != nullptr ? timed : nullptr;
}

} // namespace

void record(void*& event, c10::DeviceIndex index, c10::EventFlag flag) {
  if (flag != c10::EventFlag::BACKEND_DEFAULT) return;
  const bool onCuda = Context::get().backend() == Backend::Cuda;
  if (event == nullptr) event = new TimedEvent;
  auto& timed = *static_cast<TimedEvent*>(event);
  if (timed.index != index && timed.paired != nullptr) {
    cudaGuard().destroyEvent(timed.paired, timed.index);
    timed.paired = nullptr;
  }
  timed.index = index;
  if (onCuda) {
    cudaGuard().record(&timed.paired, currentStream(index), index, flag);
  } else {
    timed.time = Clock::now();
  }
}

void block(void* event) {
  if (const TimedEvent* timed = paired(event)) cudaGuard().block(timed->paired, currentStream(timed->index));
}

bool query(void* event) {
  const TimedEvent* timed = paired(event);
  return timed == nullptr || cudaGuard().queryEvent(timed->paired);
}

void synchronize(void* event) {
  if (const TimedEvent* timed = paired(event)) cudaGuard().synchronizeEvent(timed->paired);
  if (const Context* context = Context::ifCreated()) context->drain(false);
}

double elapsed(void* from, void* to) {
  const auto& first = *static_cast<const TimedEvent*>(from);
  const auto& last = *static_cast<const TimedEvent*>(to);
  if (first.paired != nullptr) return cudaGuard().elapsedTime(first.paired, last.paired, first.index);
  return std::chrono::duration<double, std::milli>(last.time - first.time).count();
}

void destroy(void* event) noexcept {
  auto* timed = static_cast<TimedEvent*>(event);
  if (timed != nullptr && timed->paired != nullptr) cudaGuard().destroyEvent(timed->paired, timed->index);
  delete timed;
}

} // namespace offload::events
