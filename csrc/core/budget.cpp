// How many device bytes there are beside the ring, and what of them goes back to others.
#include "core/residency.h"

#include <pthread.h>

#include <algorithm>
#include <ctime>
#include <utility>

namespace offload {
namespace {

// Memory that others take between two looks at what is free should not have to be asked back.
constexpr std::size_t kSmallestStep = std::size_t{64} << 20;
constexpr int kQuietPasses = 16;
// To ask a driver what is free takes from microseconds to a large part of a millisecond, by machine: it gets this part of the time.
constexpr int kLookedForAPartIn = 200;
// Of which a single slow look, as behind a lock, takes no more.
constexpr std::chrono::milliseconds kLongestInterval{250};
constexpr std::chrono::nanoseconds kSoon = std::chrono::milliseconds(10);

} // namespace

// Looks at how much memory is free, when that is due: nothing of it under the mutex.
void Residency::look(Device& dev) {
  bool automatic = false;
  {
    Lock lock(mutex_);
    const bool grown = dev.queue.budgetedBytes() >= dev.lookAt;
    if (!dev.lookDue && !grown) return;
    const auto now = std::chrono::steady_clock::now();
    if (!budgetBytes_ && !grown && now - dev.lastLook < dev.lookInterval) return;
    dev.lastLook = now;
    dev.lookDue = false;
    automatic = !budgetBytes_;
  }
  const auto began = std::chrono::steady_clock::now();
  const auto [free, total] = automatic ? link_.memoryInfo(dev.index) : MemoryInfo{};
  const auto taken = std::chrono::steady_clock::now() - began;
  Slots retired;
  {
    Lock lock(mutex_);
    if (options_.lookInterval.count() > 0) {
      const auto seldom = std::min<std::chrono::nanoseconds>(kLookedForAPartIn * taken, kLongestInterval);
      dev.lookInterval = std::max<std::chrono::nanoseconds>(options_.lookInterval, seldom);
    }
    if (automatic == budgetBytes_.has_value()) { // it has been set meanwhile
      dev.lookDue = true;
      dev.lastLook = {};
      return;
    }
    const std::size_t held = dev.queue.budgetedBytes();
    const auto share = static_cast<std::size_t>(options_.headroomShare * static_cast<double>(total));
    const std::size_t headroom = std::max(std::min(options_.headroomBytes, share), dev.quiet < kQuietPasses ? dev.demand : 0);
    if (budgetBytes_) {
      dev.budget = *budgetBytes_ - std::min(*budgetBytes_, dev.held ? dev.held->bytes() : 0);
    } else {
      dev.budget = free > headroom ? held + (free - headroom) : held - std::min(held, headroom - free);
    }
    dev.lookAt = budgetBytes_ ? SIZE_MAX : held + std::max(kSmallestStep, (dev.budget - std::min(held, dev.budget)) / 4);
    planAgain(dev);
    dev.queue.shrink(dev.budget, retired);
    spill(lock, dev);
    dev.queue.makeRoom(0, dev.ring, retired);
  }
  release(retired);
}

// Under the mutex, as is planAgain(). The ring stays as large as a fetch of the pass has made it, so that the next one is copied ahead.
void Residency::endPass(Device& dev) {
  dev.ring = std::min(dev.ring, ring(std::exchange(dev.largest, 0)));
  dev.lookDue = true;
  if (dev.quiet < kQuietPasses) ++dev.quiet;
  keepRoom(dev);
  planAgain(dev);
}

// A budget that wavers is no reason to drop what stays and to fetch what does not.
void Residency::planAgain(Device& dev) {
  const std::size_t weights = dev.budget - roomForResults(dev);
  const bool wavers = weights >= dev.planned && weights - dev.planned <= dev.planned / 8;
  if (wavers && !dev.schedule.isStale()) return;
  dev.planned = weights;
  if (!dev.schedule.plan(weights)) return;
  dev.queue.sort([&dev](const Slot& slot) { return dev.schedule.keeps(*slot.block, slot.extent, true); });
}

void Residency::setBudget(std::optional<std::size_t> bytes) {
  const auto audited = audit("setBudget");
  {
    Lock lock(mutex_);
    budgetBytes_ = bytes;
    for (auto& dev : devices_) {
      dev->queue.setWriteBuffer(writeBuffer());
      dev->lookDue = true;
      dev->lastLook = {};
    }
  }
  for (auto& dev : devices_) look(*dev);
}

std::size_t Residency::budget(int index) {
  Device& dev = device(index);
  bool known = false;
  {
    Lock lock(mutex_);
    known = dev.lastLook != std::chrono::steady_clock::time_point();
  }
  if (!known) look(dev);
  Lock lock(mutex_);
  return dev.budget;
}

// For who may not wait long, as he holds a lock himself; std::mutex has no such call.
Residency::Lock Residency::lockSoon() const noexcept {
  timespec until{};
  (void)clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += kSoon.count();
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  if (pthread_mutex_timedlock(mutex_.native_handle(), &until) != 0) return {};
  return {mutex_, std::adopt_lock};
}

std::size_t Residency::relieve(int index, std::size_t free, std::size_t usual, std::size_t most, std::size_t kept) noexcept {
  const auto audited = audit("relieve");
  Lock lock = lockSoon();
  if (!lock.owns_lock() || closed_) return 0;
  Device& dev = device(index);
  // What grows step by step, as a first forward pass does, asks several times in one pass.
  const int quiet = std::exchange(dev.quiet, 0);
  dev.generous = quiet > 0 ? quiet >= kQuietPasses : dev.generous;
  dev.demand = dev.generous ? 0 : std::min(usual, kept);
  const std::size_t demand = dev.generous ? most : usual;
  return free < demand ? giveBack(lock, dev, demand - free) : 0;
}

std::size_t Residency::relieveOf(int index, std::size_t bytes) noexcept {
  const auto audited = audit("relieveOf");
  Lock lock = lockSoon();
  if (!lock.owns_lock() || closed_) return 0;
  Device& dev = device(index);
  dev.lookDue = true;
  dev.lastLook = {};
  dev.lookAt = 0;
  return giveBack(lock, dev, bytes);
}

std::size_t Residency::giveBack(Lock& lock, Device& dev, std::size_t wanted) noexcept {
  SlotQueue& queue = dev.queue;
  Slots retired;
  // Of somebody else's memory the deleter may want the GIL, which is not to be taken under the allocator's lock.
  const auto given = [&retired] {
    std::size_t bytes = 0;
    for (const auto& slot : retired) bytes += slot->buffer.owner ? 0 : slot->buffer.bytes;
    return bytes;
  };
  queue.shrink(queue.budgetedBytes() - std::min(queue.stats.stayingBytes, wanted), retired);
  for (std::size_t known = SIZE_MAX; given() < wanted && retired.size() != known;) {
    known = retired.size();
    queue.makeRoom(0, queue.passingBytes() - std::min(queue.passingBytes(), wanted - given()), retired);
  }
  for (auto& slot : retired) {
    if (slot->buffer.owner) releaseLater(slot);
  }
  const std::size_t bytes = given();
  std::erase_if(retired, [](const auto& slot) { return slot->buffer.owner != nullptr; });
  lock.unlock();
  release(retired);
  return bytes;
}

} // namespace offload
