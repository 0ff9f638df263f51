#include "autograd/step_meter.h"

#include "aten/context.h"
#include "aten/cuda_glue.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace offload {
namespace {

// To watch costs some microseconds for each tensor that goes or comes.
constexpr int kWatchedFirst = 16;
constexpr int kWatchedEvery = 8;

// All that the system has given; the device waits where it is page-locked.
std::size_t hostMemory() {
  return Context::get().arena().stats().reservedEver;
}

// The first step takes all of its host memory.
bool isWorthWatching(int step) {
  return step > 0 && (step <= kWatchedFirst || step % kWatchedEvery == 0);
}

TransferStats carriedBy(c10::Device device) {
  return Context::get().residency().transferStats(device.has_index() ? device.index() : 0);
}

// Of two moments with nothing in between.
constexpr double kOverhead = 4e-6;

double total(const std::vector<std::pair<Moment, Moment>>& waits) {
  double seconds = 0;
  for (const auto& [begin, end] : waits) seconds += std::max(0.0, end.secondsSince(begin) - kOverhead);
  return seconds;
}

} // namespace

// ---- a moment

Moment Moment::now(c10::Device device) {
  Moment result;
  const Context& context = Context::get();
  if (device.is_cpu()) {
    result.at_ = std::chrono::steady_clock::now();
  } else if (!context.link()->capturing(context.currentStream(device.index()))) {
    const cuda::BesideCaptures others;
    auto& event = result.at_.emplace<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT); // which has times
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return result;
}

bool Moment::passed() const {
  const cuda::BesideCaptures others;
  if (const auto* event = std::get_if<c10::Event>(&at_)) return event->query();
  return std::holds_alternative<Time>(at_);
}

double Moment::secondsSince(const Moment& earlier) const {
  const cuda::BesideCaptures others;
  if (const auto* event = std::get_if<c10::Event>(&at_)) return std::get<c10::Event>(earlier.at_).elapsedTime(*event) / 1e3;
  return std::chrono::duration<double>(std::get<Time>(at_) - std::get<Time>(earlier.at_)).count();
}

// ---- a wait

StepMeter::Wait::Wait(StepMeter* meter, c10::Device device, bool forward) : meter_(meter), device_(device), forward_(forward) {
  if (meter_ == nullptr) return;
  {
    const std::lock_guard lock(meter_->mutex_);
    if (!meter_->isWatched(device)) return;
  }
  begin_ = Moment::now(device);
}

StepMeter::Wait::~Wait() {
  if (meter_ == nullptr) return;
  try {
    const std::lock_guard lock(meter_->mutex_);
    if (!meter_->isWatched(device_)) return;
    auto& waits = forward_ ? meter_->now_->sends : meter_->now_->fetches;
    waits.emplace_back(std::move(begin_), Moment::now(device_));
  } catch (...) {
    // What happened meanwhile is thrown, or the next call will say it.
  }
}

// ---- steps

// Under the mutex, as all that follows but the public ones.
bool StepMeter::isWatched(c10::Device device) const {
  return now_ && now_->device == device;
}

void StepMeter::saving(c10::Device device, std::size_t mayStay) {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(inBackward_, false)) return;
  beginStep(device, mayStay);
}

void StepMeter::beginStep(c10::Device device, std::size_t mayStay) {
  if (now_) now_->seen.forced = share_.forced();
  if (now_ && now_->end.isSet() && !before_) before_ = std::move(now_);
  now_.reset();
  learn();
  share_.begin(learns_ ? Context::get().residency().ringBytes() / 2 : 0, mayStay);
  if (!isWorthWatching(steps_++) || !learns_) return;
  now_.emplace(device);
  now_->upBefore = carriedBy(device).bytesToHost;
  now_->memoryBefore = hostMemory();
  now_->begin = Moment::now(device);
}

void StepMeter::asking(c10::Device device) {
  const std::lock_guard lock(mutex_);
  inBackward_ = true;
  if (!isWatched(device) || now_->turn.isSet()) return;
  const TransferStats carried = carriedBy(device);
  now_->seen.up = carried.bytesToHost - now_->upBefore;
  now_->downBefore = carried.bytesToDevice;
  now_->turn = Moment::now(device);
}

void StepMeter::asked(c10::Device device) {
  const std::lock_guard lock(mutex_);
  if (!isWatched(device)) return;
  now_->seen.down = carriedBy(device).bytesToDevice - now_->downBefore;
  now_->memory = hostMemory();
  now_->end = Moment::now(device);
}

StepMeter::Next StepMeter::take(std::size_t bytes, std::size_t memory, std::size_t room) {
  const std::lock_guard lock(mutex_);
  const auto next = share_.take(bytes, memory, room);
  const bool late = next == HiddenShare::Next::Late;
  if (now_) (late ? now_->seen.late : now_->seen.candidates) += bytes;
  return {next == HiddenShare::Next::Goes, late ? std::optional(share_.left()) : std::nullopt};
}

void StepMeter::sent(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (now_) now_->seen.sent += bytes;
}

void StepMeter::learn() {
  if (!before_) return;
  const auto whole = [](const auto& wait) { return wait.first.passed() && wait.second.passed(); };
  const Step& step = *before_;
  if (!step.end.passed()) return; // some of it lies ahead; the next step will ask again
  if (step.memory == step.memoryBefore && step.begin.passed() && step.turn.passed() && std::ranges::all_of(step.sends, whole) &&
      std::ranges::all_of(step.fetches, whole)) {
    SavedStep seen = step.seen;
    seen.forward = step.turn.secondsSince(step.begin);
    seen.backward = step.end.secondsSince(step.turn);
    seen.forwardExposed = total(step.sends);
    seen.backwardExposed = total(step.fetches);
    share_.learn(seen);
    learned_ = seen;
  }
  before_.reset();
}

std::optional<StepMeter::Plan> StepMeter::plan() const {
  const std::lock_guard lock(mutex_);
  if (!learned_) return std::nullopt;
  return Plan{share_.share(), share_.demanded(), *learned_};
}

} // namespace offload
