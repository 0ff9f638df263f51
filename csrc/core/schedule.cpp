#include "core/schedule.h"

#include "core/block.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

// What is smaller costs more in calls than in bytes: it stays before anything else does.
constexpr std::size_t kSmall = std::size_t{1} << 20;
constexpr std::uint64_t kFetchesToBelieve = 16;
constexpr std::uint64_t kCyclesUnasked = 2;
// An order that does not repeat is not worth more memory than this.
constexpr std::size_t kLongestPass = std::size_t{1} << 16;

} // namespace

bool Schedule::record(Block& block, Extent extent) {
  if (++block.fetches < kFetchesToBelieve && block.born == Born::Device) return false;
  forecast_.follow(block, extent);
  if (!current_.order.empty() && current_.order.back() == Key{&block, extent}) return false; // once more is no pass
  block.scheduled = true;
  Entry* entry = &entryOf({&block, extent});
  const bool ended = entry->lastPass == number_ || current_.order.size() == kLongestPass;
  if (ended) {
    finishPass();
    entry = &entryOf({&block, extent});
  }
  entry->lastPass = number_;
  entry->askedAt = missed_;
  current_.order.push_back({&block, extent});
  current_.bytes += extent.bytes();
  return ended;
}

Schedule::Entry& Schedule::entryOf(const Key& key) {
  const auto [found, isNew] = entries_[key.block].try_emplace(key.extent);
  if (isNew) {
    ++count_;
    unplanned_.push_back(key);
  }
  return found->second;
}

const Schedule::Entry* Schedule::find(const Key& key) const {
  const auto ofBlock = entries_.find(key.block);
  if (ofBlock == entries_.end()) return nullptr;
  const auto found = ofBlock->second.find(key.extent);
  return found != ofBlock->second.end() ? &found->second : nullptr;
}

void Schedule::erase(const Key& key) {
  const auto ofBlock = entries_.find(key.block);
  count_ -= ofBlock->second.erase(key.extent);
  if (ofBlock->second.empty()) entries_.erase(ofBlock);
}

// Looks at what the pass was made of, and not at all that is planned: that may be a thousand extents, and the pass one of two.
void Schedule::finishPass() {
  dropUnasked();
  const bool news =
      std::any_of(current_.order.begin(), current_.order.end(), [this](const Key& key) { return !entryOf(key).planned; });
  if (news && current_.bytes >= planned_.bytes) {
    for (const Key& key : planned_.order) leavePlan(key);
    planned_ = std::move(current_);
    stale_ = true;
    for (const Key& key : planned_.order) entryOf(key).planned = true;
  }
  current_ = {};
  std::erase_if(unplanned_, [this](const Key& key) {
    const Entry* const entry = find(key);
    if (entry == nullptr || entry->planned) return true;
    if (entry->leftPlan == number_) return false;
    erase(key);
    return true;
  });
  ++number_;
}

void Schedule::dropUnasked() {
  if (missed_ < lookAt_) return;
  lookAt_ = missed_ + planned_.bytes;
  const std::uint64_t patience = kCyclesUnasked * planned_.bytes;
  std::erase_if(planned_.order, [&](const Key& key) {
    if (missed_ - entryOf(key).askedAt <= patience) return false;
    leavePlan(key);
    planned_.bytes -= key.extent.bytes();
    return true;
  });
}

void Schedule::leavePlan(const Key& key) {
  Entry& entry = entryOf(key);
  entry.leftPlan = number_;
  if (entry.planned) unplanned_.push_back(key);
  entry.planned = entry.stays = false;
  left_ = stale_ = true;
}

bool Schedule::plan(std::size_t budget) {
  stale_ = false;
  bool changed = std::exchange(left_, false);
  auto choose = [&](const Key& key, bool stays) {
    Entry& entry = entryOf(key);
    changed = changed || entry.stays != stays;
    entry.stays = stays;
    if (stays) kept_ += key.extent.bytes();
  };
  std::size_t left = budget;
  kept_ = 0;
  std::size_t large = 0;
  for (const Key& key : planned_.order) {
    const std::size_t bytes = key.extent.bytes();
    if (bytes > kSmall) {
      large += bytes;
    } else {
      const bool fits = bytes <= left;
      choose(key, fits);
      if (fits) left -= bytes;
    }
  }
  // As a line is drawn in pixels: every extent adds its share of the budget, and who brings the sum to a whole extent stays.
  const double share = large <= left ? 1.0 : static_cast<double>(left) / static_cast<double>(large);
  double due = 0;
  for (const Key& key : planned_.order) {
    const std::size_t bytes = key.extent.bytes();
    if (bytes <= kSmall) continue;
    due += share * static_cast<double>(bytes);
    const bool stays = share >= 1.0 || (due >= static_cast<double>(bytes) / 2 && bytes <= left);
    choose(key, stays);
    if (!stays) continue;
    due -= static_cast<double>(bytes);
    left -= bytes;
  }
  return guests_.fit(budget - std::min(budget, kept_), planned()) || changed;
}

bool Schedule::admit(const std::vector<Block*>& changed, std::size_t readBytes, std::size_t budget) {
  return guests_.admit({changed.begin(), changed.end()}, readBytes, budget - std::min(budget, kept_), planned());
}

// None where it has no part in the plan, nor had one at the end of the last pass.
std::optional<bool> Schedule::planned(const Key& key) const {
  const Entry* const entry = find(key);
  return entry != nullptr && (entry->planned || entry->leftPlan != 0) ? std::optional(entry->stays) : std::nullopt;
}

Guests::Plan Schedule::planned() const {
  return [this](const Block& block) { return planned({&block, {0, block.bytes}}); };
}

bool Schedule::keeps(const Block& block, Extent extent, bool room) const {
  if (const auto stays = planned({&block, extent})) return *stays;
  const auto guest = extent == Extent{0, block.bytes} ? guests_.stays(block) : std::nullopt;
  if (guest && (*guest || block.fetches == 0)) return *guest; // a weight that is not admitted stays where any other would
  return room && block.born != Born::Device;
}

void Schedule::forget(const Block& block) noexcept {
  guests_.forget(block);
  if (!block.scheduled) return;
  forecast_.forget(block);
  const auto entries = entries_.find(&block);
  if (entries == entries_.end()) return;
  const auto isOf = [&block](const Key& key) { return key.block == &block; };
  // Only where it is: a program may let go of thousands at its end.
  const auto leave = [&](Pass& pass) {
    std::erase_if(pass.order, [&](const Key& key) {
      if (isOf(key)) pass.bytes -= key.extent.bytes();
      return isOf(key);
    });
    stale_ = true;
  };
  const auto any = [&](auto where) {
    return std::ranges::any_of(entries->second, [&](const auto& item) { return where(item.second); });
  };
  if (any([](const Entry& entry) { return entry.planned; })) leave(planned_);
  if (any([this](const Entry& entry) { return entry.lastPass == number_; })) leave(current_);
  if (any([](const Entry& entry) { return !entry.planned; })) std::erase_if(unplanned_, isOf);
  count_ -= entries->second.size();
  entries_.erase(entries);
}

} // namespace offload
