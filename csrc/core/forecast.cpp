#include "core/forecast.h"

#include "core/block.h"

#include <algorithm>

namespace offload {
namespace {

constexpr std::size_t kMostKept = std::size_t{1} << 16;
constexpr std::size_t kMostCandidates = 8;
constexpr std::uint64_t kMostCompared = 16;
constexpr std::uint64_t kNear = 4; // layers that are left out, or come once more, without the order being another one
constexpr std::uint64_t kWayBack = 4; // fetches in opposite order that are no accident
constexpr std::size_t kMostBack = 512; // places of it that are known ahead

} // namespace

void Forecast::follow(Block& block, Extent extent) {
  if (history_.size() >= kMostKept) dropOldHalf();
  Entry& entry = entryOf(block, extent);
  const std::uint64_t next = expectedPlace(1);
  const bool foretold = holds(next) && at(next).entry == &entry;
  const std::uint64_t index = count();
  const std::uint64_t writes = entry.last != kNowhere ? block.version - entry.version : 0;
  history_.push_back({&entry, entry.last, writes, writes == 0 && holds(entry.last) ? at(entry.last).since : index});
  entry.last = index;
  entry.version = block.version;
  block.scheduled = true;
  foretold_ = stands_ = foretold;
  if (foretold) {
    ++run_;
    advance(index);
  } else if (comesLate(entry)) {
    foretold_ = true;
  } else {
    resume(index);
  }
  if (count() >= lateUntil_) late_.clear();
}

bool Forecast::comesLate(Entry& entry) {
  const auto found =
      std::find_if(late_.begin(), late_.end(), [&](std::uint64_t place) { return holds(place) && at(place).entry == &entry; });
  if (found == late_.end()) return false;
  late_.erase(found);
  entry.oneWay = false;
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

// Nowhere where it can't be told; it may be no part of the history any more.
std::uint64_t Forecast::expectedPlace(std::uint64_t distance) const {
  if (followed_.index == kNowhere) return kNowhere;
  if (!followed_.back) return followed_.index + distance;
  return distance <= wayBack_.size() ? wayBack_[distance - 1] : kNowhere;
}

Forecast::Expected Forecast::expected(std::uint64_t distance) const {
  const std::uint64_t place = expectedPlace(distance);
  if (!holds(place) || at(place).entry == nullptr) return {};
  const Entry& entry = *at(place).entry;
  std::uint64_t writes = 0; // that there will have been by then
  for (std::uint64_t index = place; !followed_.back && holds(index) && index > followed_.index; index = at(index).before) {
    index = at(index).since;
    if (!holds(index) || index <= followed_.index) break;
    writes += at(index).writes;
  }
  return {entry.block, entry.extent, writes > entry.block->version - entry.version};
}

Forecast::Entry& Forecast::entryOf(Block& block, Extent extent) {
  return entries_[&block].try_emplace(extent, Entry{&block, extent}).first->second;
}

// To what was expected, and has come.
void Forecast::advance(std::uint64_t index) {
  followed_.index = expectedPlace(1);
  if (!followed_.back) return;
  wayBack_.pop_front();
  if (wayBack_.size() < kMostBack / 2) lookBack();
  if (wayBack_.empty()) leaveWayBack(index);
}

// The latest occurrences of what has just been fetched, but for this one.
std::vector<std::uint64_t> Forecast::earlier(std::uint64_t index) const {
  std::vector<std::uint64_t> places;
  places.reserve(kMostCandidates);
  for (std::uint64_t place = at(index).before; place != kNowhere && holds(place); place = at(place).before) {
    places.push_back(place);
    if (places.size() == kMostCandidates) break;
  }
  return places;
}

std::uint64_t Forecast::commonPast(std::uint64_t place, std::uint64_t index) const {
  std::uint64_t common = 1;
  while (common < kMostCompared && place >= base_ + common && at(place - common).entry == at(index - common).entry) ++common;
  return common;
}

// How many of the latest fetches, the last first, are those from the occurrence before this one on; none where they are too few to mean
// anything, or more had to be passed over. `passed` gets the places where that was so.
Forecast::Past Forecast::wayBack(std::uint64_t index, std::vector<std::uint64_t>* passed) const {
  const std::uint64_t place = at(index).before;
  if (place == kNowhere || !holds(place)) return {};
  std::uint64_t common = 1;
  std::uint64_t skipped = 0;
  std::uint64_t up = place;
  std::uint64_t down = index - 1;
  for (; common < kMostCompared && down > up; --down) {
    if (at(down).entry == nullptr) continue;
    const std::uint64_t last = std::min(up + 1 + kNear, down - 1);
    std::uint64_t next = up + 1;
    while (next <= last && at(next).entry != at(down).entry) ++next;
    if (next > last) break;
    for (std::uint64_t between = up + 1; between < next; ++between) {
      if (passed != nullptr) passed->push_back(between);
      skipped += at(between).entry != nullptr && !at(between).entry->oneWay ? 1 : 0;
    }
    up = next;
    ++common;
  }
  const bool turned = skipped + (down > up ? down - up : 0) < common && common > 1;
  if (!turned && (common < kWayBack || skipped > common)) return {};
  return {place, common};
}

Forecast::Past Forecast::longestPast(std::uint64_t index) const {
  Past longest;
  for (const std::uint64_t place : earlier(index)) {
    const std::uint64_t common = commonPast(place, index);
    if (common > longest.common) longest = {place, common};
  }
  return longest;
}

// Goes on from an earlier occurrence of what has just been fetched, with the longest past in common, or one with a longer way back; of
// several pasts the one near the place that was followed, or the latest, or the one where the order goes on that was left by a detour. What is
// new has none: what was expected instead of it still comes next.
void Forecast::resume(std::uint64_t index) {
  const Past past = longestPast(index);
  const Past back = wayBack(index);
  std::uint64_t near = kNowhere;
  std::uint64_t left = kNowhere;
  const std::uint64_t expected = followed_.next();
  const auto distance = [expected](std::uint64_t place) { return place > expected ? place - expected : expected - place; };
  for (const std::uint64_t place : earlier(index)) {
    if (isNear(place, followed_) && (near == kNowhere || distance(place) < distance(near))) near = place;
    if (left == kNowhere && index <= leftAt_ + kMostCompared && isNear(place, left_)) left = place;
  }
  Place best{past.place, false};
  std::uint64_t common = past.common;
  const bool alike = common == 1 && near != kNowhere;
  if (back.common > common && (!alike || back.common > run_)) {
    best = {back.place, true};
    common = back.common;
  } else if (alike) {
    best = {near, followed_.back};
  }
  const std::uint64_t spoke = std::min(run_, kMostCompared) / 2;
  if (best.index == kNowhere || (best.back == followed_.back && isNear(best.index, followed_))) {
    run_ = spoke;
  } else if (common == 1 && left != kNowhere) {
    best = {left, left_.back};
    run_ = leftRun_;
    left_ = {};
  } else {
    left_ = followed_;
    leftAt_ = index;
    leftRun_ = spoke;
    run_ = 0;
  }
  if (best.index == kNowhere) return;
  run_ = std::max(run_, common - 1);
  goTo(best, index);
}

void Forecast::goTo(Place place, std::uint64_t index) {
  late_.clear();
  if (place.back == followed_.back && isNear(place.index, followed_)) {
    for (std::uint64_t distance = 1; true; ++distance) {
      const std::uint64_t passed = expectedPlace(distance);
      if (place.back ? passed == kNowhere || passed <= place.index : passed >= place.index) break;
      late_.push_back(passed);
    }
    lateUntil_ = index + 1 + kNear;
  }
  followed_ = place;
  wayBack_.clear();
  if (!place.back) return;
  std::vector<std::uint64_t> passed;
  if (wayBack(index, &passed).common == 0) passed.clear();
  for (const std::uint64_t each : passed) {
    if (at(each).entry != nullptr) at(each).entry->oneWay = true;
  }
  at(index).entry->oneWay = false;
  lookBack();
  if (wayBack_.empty()) leaveWayBack(index);
}

// Completes the places to come on the way back. What has been fetched since it was passed there is the other side of the step's beginning.
void Forecast::lookBack() {
  std::uint64_t place = wayBack_.empty() ? followed_.index : wayBack_.back();
  for (std::size_t count = 0; count < kMostBack && wayBack_.size() < kMostBack && place-- > base_; ++count) {
    const Entry* const entry = at(place).entry;
    if (entry == nullptr || entry->oneWay) continue;
    if (entry->last != place) break;
    wayBack_.push_back(place);
  }
}

// At its end, as where a step is over: what comes then is what came after the same fetches before.
void Forecast::leaveWayBack(std::uint64_t index) {
  const Past past = longestPast(index);
  followed_ = {past.place, false};
  run_ = past.common > 0 ? past.common - 1 : 0;
}

bool Forecast::isNear(std::uint64_t place, Place to) noexcept {
  return to.index != kNowhere && place + kNear >= to.next() && place <= to.next() + kNear;
}

void Forecast::dropOldHalf() {
  const std::size_t half = history_.size() / 2;
  history_.erase(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(half));
  base_ += half;
  if (followed_.index != kNowhere && followed_.index < base_) {
    followed_ = {};
    wayBack_.clear();
  }
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
