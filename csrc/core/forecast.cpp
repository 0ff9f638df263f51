#include "core/forecast.h"

#include "core/block.h"

#include <algorithm>

namespace offload {
namespace {

constexpr std::size_t kMostKept = std::size_t{1} << 16;
constexpr int kMostCandidates = 8;
constexpr std::uint64_t kMostCompared = 16;
constexpr std::uint64_t kNear = 4; // layers that are left out, or come once more, without the order being another one

} // namespace

void Forecast::follow(Block& block, Extent extent) {
  if (history_.size() >= kMostKept) dropOldHalf();
  Entry& entry = entryOf(block, extent);
  const bool foretold = followed_ != kNowhere && holds(followed_ + 1) && at(followed_ + 1).entry == &entry;
  const std::uint64_t index = count();
  const std::uint64_t writes = entry.last != kNowhere ? block.version - entry.version : 0;
  history_.push_back({&entry, entry.last, writes, writes == 0 && holds(entry.last) ? at(entry.last).since : index});
  entry.last = index;
  entry.version = block.version;
  block.scheduled = true;
  foretold_ = stands_ = foretold;
  if (foretold) {
    ++followed_;
    ++run_;
  } else if (comesLate(entry)) {
    foretold_ = true;
  } else {
    resume(index);
  }
  if (count() >= lateUntil_) late_.clear();
}

bool Forecast::comesLate(const Entry& entry) {
  const auto found =
      std::find_if(late_.begin(), late_.end(), [&](std::uint64_t place) { return holds(place) && at(place).entry == &entry; });
  if (found == late_.end()) return false;
  late_.erase(found);
  return true;
}

std::vector<Forecast::Expected> Forecast::late() const {
  std::vector<Expected> found;
  for (const std::uint64_t place : late_) {
    const Entry* const entry = holds(place) ? at(place).entry : nullptr;
    if (entry != nullptr) found.push_back({entry->block, entry->extent, false});
  }
  return found;
}

Forecast::Expected Forecast::expected(std::uint64_t distance) const {
  if (followed_ == kNowhere || !holds(followed_ + distance)) return {};
  const Occurrence& occurrence = at(followed_ + distance);
  if (occurrence.entry == nullptr) return {};
  const Entry& entry = *occurrence.entry;
  std::uint64_t writes = 0; // that there will have been by then
  for (std::uint64_t index = followed_ + distance; holds(index) && index > followed_; index = at(index).before) {
    index = at(index).since;
    if (!holds(index) || index <= followed_) break;
    writes += at(index).writes;
  }
  return {entry.block, entry.extent, writes > entry.block->version - entry.version};
}

Forecast::Entry& Forecast::entryOf(Block& block, Extent extent) {
  return entries_[&block].try_emplace(extent, Entry{&block, extent}).first->second;
}

// Goes on from an earlier occurrence of what has just been fetched, with the longest past in common; of several the one near the place
// that was followed, or the latest, or the one where the order goes on that was left by a detour. What is new has none: what was
// expected instead of it still comes next.
void Forecast::resume(std::uint64_t index) {
  std::uint64_t best = kNowhere;
  std::uint64_t longest = 0;
  std::uint64_t near = kNowhere;
  std::uint64_t back = kNowhere;
  std::uint64_t candidate = at(index).before;
  const auto distance = [expected = followed_ + 1](std::uint64_t place) {
    return place > expected ? place - expected : expected - place;
  };
  for (int count = 0; count < kMostCandidates && candidate != kNowhere && holds(candidate); ++count) {
    std::uint64_t common = 1;
    while (common < kMostCompared && candidate >= base_ + common && at(candidate - common).entry == at(index - common).entry) {
      ++common;
    }
    if (common > longest) {
      longest = common;
      best = candidate;
    }
    if (isNear(candidate, followed_) && (near == kNowhere || distance(candidate) < distance(near))) near = candidate;
    if (back == kNowhere && index <= leftAt_ + kMostCompared && isNear(candidate, left_)) back = candidate;
    candidate = at(candidate).before;
  }
  if (longest == 1 && near != kNowhere) best = near;
  const std::uint64_t spoke = std::min(run_, kMostCompared) / 2;
  if (best == kNowhere || isNear(best, followed_)) {
    run_ = spoke;
  } else if (longest == 1 && back != kNowhere) {
    best = back;
    run_ = leftRun_;
    left_ = kNowhere;
  } else {
    left_ = followed_;
    leftAt_ = index;
    leftRun_ = spoke;
    run_ = 0;
  }
  if (best == kNowhere) return;
  run_ = std::max(run_, longest - 1);
  goTo(best, index);
}

void Forecast::goTo(std::uint64_t place, std::uint64_t index) {
  late_.clear();
  if (isNear(place, followed_)) {
    for (std::uint64_t passed = followed_ + 1; passed < place; ++passed) late_.push_back(passed);
    lateUntil_ = index + 1 + kNear;
  }
  followed_ = place;
}

bool Forecast::isNear(std::uint64_t place, std::uint64_t to) noexcept {
  return to != kNowhere && place + kNear > to && place <= to + 1 + kNear;
}

void Forecast::dropOldHalf() {
  const std::size_t half = history_.size() / 2;
  history_.erase(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(half));
  base_ += half;
  if (followed_ != kNowhere && followed_ < base_) followed_ = kNowhere;
  for (auto& [block, entries] : entries_) {
    std::erase_if(entries, [this](const auto& item) { return item.second.last < base_; });
  }
  std::erase_if(entries_, [](const auto& item) { return item.second.empty(); });
}

void Forecast::forget(const Block& block) noexcept {
  const auto found = entries_.find(&block);
  if (found == entries_.end()) return;
  for (const auto& [extent, entry] : found->second) {
    for (std::uint64_t index = entry.last; index != kNowhere && holds(index); index = at(index).before) {
      history_[index - base_].entry = nullptr;
    }
  }
  entries_.erase(found);
}

} // namespace offload
