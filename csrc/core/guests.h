// What stays beside the plan of a Schedule because it is changed in the cache.
//
// Note [Guests]
// An optimizer's step in the cache needs a weight, its gradient and what is kept for it at once, and none of them is worth its room
// without the others: they are admitted together, in the order in which they ask, while the plan leaves room for all their bytes. What
// the plan keeps itself takes none of that. Weights, which each step of a training fetches several times, so come before state, which
// it asks for once. Who is admitted stays until a new plan wants the room, and then the latest go first: from step to step the same
// weights are changed in the cache. Who asks no more and is alive keeps his room until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

namespace offload {

struct Block;

/// Of one device, for its Schedule. All Blocks are whole.
class Guests {
 public:
  /// Of what the plan has, whether it keeps it.
  using Plan = std::function<std::optional<bool>(const Block&)>;

  /// Whether what is changed together stays, by a plan that leaves `room` bytes; `readBytes` are there beside it while it is changed.
  bool admit(const std::vector<const Block*>& changed, std::size_t readBytes, std::size_t room, const Plan& plan);

  /// Shows those out that another plan leaves no room for; true if that is another choice than before.
  bool fit(std::size_t room, const Plan& plan);

  /// Whether a Block that has asked is admitted.
  std::optional<bool> stays(const Block& block) const;

  /// Not before another plan is what is changed together with this Block admitted again.
  void dismiss(const Block& block);
  void forget(const Block& block);

 private:
  struct Group {
    std::vector<const Block*> changed;
    std::size_t readBytes = 0;
    std::size_t bytes = 0; // as of when it was admitted last
    bool stays = false;
    bool dismissed = false;
  };
  Group& join(const std::vector<const Block*>& changed);
  void admit(Group& group, std::size_t room, const Plan& plan);

  std::map<std::uint64_t, Group> groups_; // in the order in which they came
  std::unordered_map<const Block*, std::uint64_t> groupOf_;
  std::uint64_t count_ = 0;
  std::size_t bytes_ = 0; // of those admitted
};

} // namespace offload
