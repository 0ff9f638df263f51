#include "core/link/sim_schedule.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>

namespace offload {

SimSchedule::SimSchedule(std::uint64_t seed, SimBias bias, std::size_t maxPending)
    : random_(seed), bias_(bias), maxPending_(maxPending), queues_(1) {}

void SimSchedule::addStream() {
  queues_.emplace_back();
}

void SimSchedule::enqueue(Lock& lock, Operation operation) {
  queues_[operation.action->actor].operations.push_back(std::move(operation));
  ++pending_;
  while (pending_ > maxPending_ && step(lock)) {
  }
}

void SimSchedule::runNow(Lock& lock, Operation operation) {
  run(lock, operation);
}

void SimSchedule::runUntil(Lock& lock, const RecordingPtr& recording) {
  // One in `other` steps runs anything; 0 stands for none.
  std::uint64_t other = bias_ == SimBias::Eager ? 1 : 0;
  if (bias_ == SimBias::Seeded) {
    constexpr std::uint64_t choices[] = {0, 0, 4, 1};
    other = choices[random_.below(std::size(choices))];
  }
  while (!recording->happened) {
    const bool stray = other != 0 && random_.oneIn(other);
    Queue* queue = stray ? anyRunnable() : neededBy(recording.get());
    if (queue != nullptr) {
      runHead(lock, *queue);
    } else {
      progress_.wait(lock);
    }
  }
}

bool SimSchedule::step(Lock& lock) {
  Queue* queue = anyRunnable();
  if (queue != nullptr) {
    runHead(lock, *queue);
  }
  return queue != nullptr;
}

void SimSchedule::runAll(Lock& lock) {
  while (pending_ > 0) {
    if (!step(lock)) {
      progress_.wait(lock);
    }
  }
}

std::uint64_t SimSchedule::oldestPending() const {
  std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max();
  for (const Queue& queue : queues_) {
    if (!queue.operations.empty()) {
      oldest = std::min(oldest, queue.operations.front().action->sequence);
    }
  }
  return oldest;
}

bool SimSchedule::runnable(const Queue& queue) const {
  if (queue.busy || queue.operations.empty()) {
    return false;
  }
  const RecordingPtr& awaits = queue.operations.front().awaits;
  return awaits == nullptr || awaits->happened;
}

SimSchedule::Queue* SimSchedule::anyRunnable() {
  Queue* chosen = nullptr;
  std::uint64_t candidates = 0;
  for (Queue& queue : queues_) {
    if (runnable(queue) && random_.oneIn(++candidates)) {
      chosen = &queue;
    }
  }
  return chosen;
}

/// The queue whose head brings `recording` nearer; null while another thread runs it. Events that are waited for were recorded
/// before, so the search can't go in a circle.
SimSchedule::Queue* SimSchedule::neededBy(const Recording* recording) {
  while (true) {
    Queue& queue = queues_[recording->stream];
    if (queue.busy) {
      return nullptr;
    }
    assert(!queue.operations.empty());
    const Operation& head = queue.operations.front();
    if (head.awaits == nullptr || head.awaits->happened) {
      return &queue;
    }
    recording = head.awaits.get();
  }
}

void SimSchedule::runHead(Lock& lock, Queue& queue) {
  queue.busy = true;
  run(lock, queue.operations.front());
  queue.operations.pop_front();
  queue.busy = false;
  --pending_;
  progress_.notify_all();
}

void SimSchedule::run(Lock& lock, Operation& operation) {
  ++ran_;
  trace_ = (trace_ ^ (operation.action->sequence + (operation.action->actor << 48))) * 0x100000001b3U;
  if (!operation.effect) {
    return;
  }
  if (operation.usersCode) {
    lock.unlock();
    operation.effect();
    operation.effect = nullptr; // what it holds is the users' too
    lock.lock();
  } else {
    operation.effect();
  }
}

} // namespace offload
