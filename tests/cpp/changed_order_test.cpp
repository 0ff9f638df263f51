// What a step costs whose order of layers is not that of the steps before: copies that nobody had made ahead of their fetch.
#include <functional>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 4096;
constexpr std::size_t kLayers = 16;
using Order = std::vector<std::size_t>;

Order usual() {
  Order order;
  for (std::size_t k = 0; k < kLayers; ++k) order.push_back(k);
  return order;
}
Order without(std::size_t k) {
  Order order = usual();
  order.erase(order.begin() + static_cast<std::ptrdiff_t>(k));
  return order;
}
/// `added` come before layer `at`, in place of `left` layers.
Order with(std::size_t at, const Order& added, std::size_t left = 0) {
  Order order = usual();
  const auto place =
      order.erase(order.begin() + static_cast<std::ptrdiff_t>(at), order.begin() + static_cast<std::ptrdiff_t>(at + left));
  order.insert(place, added.begin(), added.end());
  return order;
}
Order swapped(std::size_t a, std::size_t b) {
  Order order = usual();
  std::swap(order[a], order[b]);
  return order;
}

/// Steps of a model whose ring holds four layers, forward and, where it trains, back again.
class Steps {
 public:
  explicit Steps(bool train) : train_(train) {
    for (std::size_t k = 0; k < 2 * kLayers; ++k) layers_.push_back(rig_.newBlock(pattern(k, kBytes)));
    for (int count = 0; count < 6; ++count) run(usual());
  }
  /// Fetches that found nothing.
  std::uint64_t run(Order order) {
    const auto before = rig_.cache.stats(0);
    if (train_) {
      const Order back(order.rbegin(), order.rend());
      order.insert(order.end(), back.begin(), back.end());
    }
    for (const std::size_t k : order) use(k);
    rig_.sim.drain();
    EXPECT_EQ(wrong_, 0);
    const auto after = rig_.cache.stats(0);
    return after.fetches - before.fetches - (after.hits - before.hits);
  }

 private:
  static CoreOptions options() {
    CoreOptions options;
    options.cache.ringBytes = 4 * kBytes;
    return options;
  }
  void use(std::size_t k) {
    const Pin pin = rig_.cache.fetch(*layers_.at(k), {0, kBytes}, stream_);
    const void* const data = pin.data();
    rig_.sim.launch(
        stream_, [this, data, k] { wrong_ += std::memcmp(data, pattern(k, kBytes).data(), kBytes) != 0; }, {{data, kBytes}},
        {});
  }

  const bool train_;
  int wrong_ = 0;
  Rig rig_{options()};
  Stream stream_ = rig_.sim.createStream(0);
  std::vector<Rig::BlockPtr> layers_;
};

struct Change {
  const char* name;
  Order order;
  std::uint64_t once; // what one such step costs, and, after it, the next usual one
  std::uint64_t back;
  std::uint64_t training; // the same for a step that trains
  friend void PrintTo(const Change& change, std::ostream* out) {
    *out << change.name;
  }
};

class ChangedOrder : public testing::TestWithParam<Change> {};
INSTANTIATE_TEST_SUITE_P(
    Steps, ChangedOrder,
    testing::Values(
        Change{"None", usual(), 0, 0, 0}, Change{"ALayerIsLeftOut", without(7), 0, 1, 0},
        Change{"ALayerComesTwice", with(7, {7}), 0, 0, 1}, Change{"ThreeComeAgain", with(8, {5, 6, 7}), 1, 1, 2},
        Change{"NeighboursAreSwapped", swapped(7, 8), 0, 0, 0}, Change{"TwoFarApartAreSwapped", swapped(4, 11), 2, 1, 6},
        Change{"ALayerIsNew", with(7, {20}), 1, 0, 3}, Change{"ThreeAreNew", with(7, {20, 21, 22}), 3, 1, 7},
        Change{"AnotherExpert", with(7, {20}, 1), 1, 1, 3}, Change{"ABranchOfThree", with(7, {20, 21, 22}, 3), 4, 1, 10}),
    [](const auto& info) { return info.param.name; });

TEST_P(ChangedOrder, CostsFewCopiesAndIsLearned) {
  const Change& change = GetParam();
  Steps steps(false);
  EXPECT_LE(steps.run(change.order), change.once);
  for (int count = 0; count < 3; ++count) EXPECT_EQ(steps.run(change.order), 0U) << "it is known by now";
}

TEST_P(ChangedOrder, OfOneStepIsForgotten) {
  const Change& change = GetParam();
  Steps steps(false);
  steps.run(change.order);
  EXPECT_LE(steps.run(usual()), change.back);
  EXPECT_LE(steps.run(usual()), change.back) << "the place that is followed is some steps ago";
  EXPECT_LE(steps.run(usual()), 1U);
  for (int count = 0; count < 3; ++count) EXPECT_EQ(steps.run(usual()), 0U);
}

TEST_P(ChangedOrder, CostsFewCopiesInTraining) {
  const Change& change = GetParam();
  Steps steps(true);
  EXPECT_LE(steps.run(change.order), change.training);
  for (int count = 0; count < 3; ++count) EXPECT_EQ(steps.run(change.order), 0U);
}

TEST_P(ChangedOrder, ThatAlternatesWithTheUsualOneIsLearned) {
  const Change& change = GetParam();
  Steps steps(false);
  for (int count = 0; count < 4; ++count) {
    steps.run(change.order);
    steps.run(usual());
  }
  EXPECT_EQ(steps.run(change.order) + steps.run(usual()) + steps.run(change.order), 0U);
}

} // namespace
} // namespace offload
