#include "core/guests.h"

#include "core/block.h"

#include <algorithm>
#include <utility>

namespace offload {

bool Guests::admit(const std::vector<const Block*>& changed, std::size_t readBytes, std::size_t room, const Plan& plan) {
  Group& group = join(changed);
  group.readBytes = readBytes;
  if (!group.stays && !group.dismissed) admit(group, room, plan);
  return group.stays;
}

bool Guests::fit(std::size_t room, const Plan& plan) {
  bool changed = false;
  bytes_ = 0;
  for (auto& [number, group] : groups_) {
    const bool before = std::exchange(group.stays, false);
    group.dismissed = false;
    if (before) admit(group, room, plan);
    changed = changed || group.stays != before;
  }
  return changed;
}

std::optional<bool> Guests::stays(const Block& block) const {
  const auto found = groupOf_.find(&block);
  if (found == groupOf_.end()) return std::nullopt;
  return groups_.at(found->second).stays;
}

void Guests::dismiss(const Block& block) {
  const auto found = groupOf_.find(&block);
  if (found == groupOf_.end()) return;
  Group& group = groups_.at(found->second);
  group.dismissed = true;
  if (std::exchange(group.stays, false)) bytes_ -= group.bytes;
}

void Guests::forget(const Block& block) {
  const auto found = groupOf_.find(&block);
  if (found == groupOf_.end()) return;
  const auto group = groups_.find(found->second);
  groupOf_.erase(found);
  std::erase(group->second.changed, &block);
  // The rest has to ask again.
  if (std::exchange(group->second.stays, false)) bytes_ -= group->second.bytes;
  if (group->second.changed.empty()) groups_.erase(group);
}

// The group of just these.
Guests::Group& Guests::join(const std::vector<const Block*>& changed) {
  const auto found = groupOf_.find(changed.front());
  if (found != groupOf_.end() && groups_.at(found->second).changed == changed) return groups_.at(found->second);
  for (const Block* block : changed) forget(*block);
  Group& group = groups_[++count_];
  group.changed = changed;
  for (const Block* block : changed) groupOf_[block] = count_;
  return group;
}

void Guests::admit(Group& group, std::size_t room, const Plan& plan) {
  group.bytes = group.readBytes;
  for (const Block* block : group.changed) {
    const auto kept = plan(*block);
    if (kept && !*kept) return;
    if (!kept) group.bytes += block->bytes;
  }
  group.stays = bytes_ + group.bytes <= room;
  if (group.stays) bytes_ += group.bytes;
}

} // namespace offload
