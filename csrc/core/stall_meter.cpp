#include "core/stall_meter.h"

#include "core/error.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

namespace offload {
namespace {

// Two timers that follow each other on a stream are a few microseconds apart.
constexpr std::chrono::duration<double> kLeast = std::chrono::microseconds(10);
constexpr std::size_t kMany = 256;
constexpr std::size_t kMost = 8192; // a device takes no more work than a few thousand calls ahead

} // namespace

StallMeter::~StallMeter() {
  for (const Wait& wait : pending_) destroy(wait);
  for (const Wait& wait : idle_) destroy(wait);
}

void StallMeter::orderBefore(std::span<const Token> tokens, Stream stream) {
  if (std::ranges::all_of(tokens, [stream](const Token& token) { return token.isBefore(stream); })) return;
  const Wait wait = begin(stream);
  try {
    for (const Token& token : tokens) token.orderBefore(stream);
  } catch (...) {
    destroy(wait);
    throw;
  }
  end(wait, stream);
}

StallStats StallMeter::stats() noexcept {
  read();
  const std::lock_guard lock(mutex_);
  return stats_;
}

// Nothing where the stream can't be timed.
StallMeter::Wait StallMeter::begin(Stream stream) noexcept {
  bool many = false;
  Wait wait;
  {
    const std::lock_guard lock(mutex_);
    if (pending_.size() >= kMost) return {};
    many = pending_.size() >= std::max(readAt_, kMany);
    if (!idle_.empty()) {
      wait = idle_.back();
      idle_.pop_back();
    }
  }
  if (many) read();
  try {
    if (wait.before == nullptr) wait = {link_.createTimer(device_), nullptr};
    if (wait.before == nullptr) return {};
    if (wait.after == nullptr) wait.after = link_.createTimer(device_);
    link_.record(wait.before, stream);
    return wait;
  } catch (const Error&) {
    destroy(wait);
    return {};
  }
}

void StallMeter::end(Wait wait, Stream stream) noexcept {
  if (wait.before == nullptr) return;
  try {
    link_.record(wait.after, stream);
    const std::lock_guard lock(mutex_);
    pending_.push_back(wait);
  } catch (const Error&) {
    destroy(wait);
  }
}

void StallMeter::destroy(Wait wait) noexcept {
  for (Event timer : {wait.before, wait.after}) {
    if (timer != nullptr) link_.destroyEvent(timer);
  }
}

void StallMeter::read() noexcept {
  std::vector<Wait> waits;
  {
    const std::lock_guard lock(mutex_);
    waits.swap(pending_);
  }
  StallStats found;
  const auto isOver = [&](Wait& wait) { // or can't be read
    try {
      const std::optional<double> seconds = link_.elapsed(device_, wait.before, wait.after);
      if (!seconds) return false;
      if (const std::chrono::duration<double> time(*seconds); time >= kLeast) {
        ++found.count;
        found.time += time;
      }
    } catch (const Error&) {
      destroy(std::exchange(wait, {}));
    }
    return true;
  };
  std::size_t open = 0; // in front
  for (Wait& wait : waits) {
    if (!isOver(wait)) std::swap(waits[open++], wait);
  }
  const auto firstOver = waits.begin() + static_cast<std::ptrdiff_t>(open);
  const std::lock_guard lock(mutex_);
  stats_.count += found.count;
  stats_.time += found.time;
  pending_.insert(pending_.end(), waits.begin(), firstOver);
  readAt_ = 2 * pending_.size();
  std::copy_if(firstOver, waits.end(), std::back_inserter(idle_), [](const Wait& wait) { return wait.before != nullptr; });
}

} // namespace offload
