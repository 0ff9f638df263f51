// What the tests of budgets share: layers that are fetched in passes, and results of their size.
#pragma once

#include "core_rig.h"

#include <algorithm>

namespace offload::core_test {

inline constexpr std::size_t kBytes = std::size_t{5} << 18; // more than what stays because it is small

/// A value for each tag, of zeros but for its beginning and its end.
inline Bytes value(std::uint64_t tag, std::size_t bytes = kBytes) {
  Bytes out(bytes);
  const Bytes ends = pattern(tag, std::min<std::size_t>(bytes, 4096));
  std::copy(ends.begin(), ends.end(), out.begin());
  std::copy(ends.begin(), ends.end(), out.end() - static_cast<std::ptrdiff_t>(ends.size()));
  return out;
}

inline CoreOptions withBudget(std::optional<std::size_t> budget, std::size_t ring = kBytes) {
  CoreOptions options;
  options.cache.budgetBytes = budget;
  options.cache.ringBytes = ring;
  options.sim.deviceBytes = 64 * kBytes;
  options.cache.headroomBytes = 4 * kBytes;
  return options;
}

class Budget : public ::testing::Test {
 protected:
  void make(std::optional<std::size_t> budget, std::size_t count) {
    rig_ = std::make_unique<Rig>(withBudget(budget));
    for (std::size_t k = 0; k < count; ++k) layers_.push_back(rig_->newBlock(value(k)));
  }
  ~Budget() override {
    layers_.clear();
  }
  /// Fetches every layer in order, checks its bytes, and returns how many bytes the link carried for that.
  std::size_t pass(bool backward = false) {
    return passThrough(0, layers_.size(), backward);
  }
  /// The same with some of the layers.
  std::size_t passThrough(std::size_t first, std::size_t count, bool backward = false) {
    const std::size_t before = rig_->cache.transferStats(0).bytesToDevice;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t i = first + (backward ? count - 1 - k : k);
      const Pin pin = rig_->cache.fetch(*layers_[i], {0, kBytes}, {});
      const auto* const end = static_cast<const std::byte*>(pin.data()) + kBytes - 4096;
      const auto seen = rig_->readOnDevice({}, end, 4096);
      rig_->sim.drain();
      EXPECT_EQ(*seen, pattern(tag_ + i, 4096)) << "layer " << i;
    }
    for (const auto& layer : layers_) rig_->cache.validate(*layer);
    return rig_->cache.transferStats(0).bytesToDevice - before;
  }
  std::size_t home() const {
    return rig_->cache.transferStats(0).bytesToHost;
  }
  void adopt(Block& block, std::uint64_t tag) {
    rig_->cache.adopt(block, rig_->newResult({}, value(tag, block.bytes)), {});
    rig_->cache.validate(block);
  }
  Rig::BlockPtr newGradient() {
    auto block = rig_->newBlock(kBytes);
    block->purpose = Purpose::Gradient;
    block->derivedFrom = this; // a name
    return block;
  }

  std::unique_ptr<Rig> rig_;
  std::vector<Rig::BlockPtr> layers_;
  std::uint64_t tag_ = 0;
};

} // namespace offload::core_test
