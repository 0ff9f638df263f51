// Copies ahead of the fetches that the Schedule expects: that they come, and that they are right.
#include "prefetch_rig.h"

namespace offload {
namespace {

using namespace prefetch_test;

TEST_F(Prefetch, EveryFetchOfAKnownOrderFindsItsBytes) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(10, 4, seed);
    forward();
    forward();
    const std::uint64_t hits = stats().hits;
    const std::uint64_t before = copies();
    for (int step = 0; step < 3; ++step) forward();
    EXPECT_EQ(stats().hits, hits + 30);
    EXPECT_EQ(copies(), before + 30) << "and nothing is copied for nothing";
    EXPECT_EQ(stats().prefetchesWasted, 0U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Prefetch, CopiesRunWhileTheHostWaits) {
  make(10, 4);
  forward();
  forward();
  rig_->sim.drain(); // as a host does that reads a result
  const std::uint64_t hits = stats().hits;
  for (std::size_t k = 0; k < 4; ++k) use(k);
  EXPECT_EQ(stats().hits, hits + 4);
  checkValues();
}

// What was made on a device is no part of the order before it has been fetched often, as activations are not.
TEST_F(Prefetch, FetchesThatAreNoPartOfTheOrderSayNothingAboutIt) {
  make(10, 6);
  const auto result = [this](std::uint64_t tag) {
    auto block = rig_->newBlock(kBytes, Born::Device);
    rig_->cache.adopt(*block, rig_->newResult(stream_, pattern(tag, kBytes)), stream_);
    return block;
  };
  for (int step = 0; step < 4; ++step) forward();
  const auto other = rig_->newBlock(pattern(50, kBytes));
  use(0);
  use(1);
  (void)rig_->cache.fetch(*other, {0, kBytes}, stream_);
  for (std::uint64_t k = 0; k < 20; ++k) {
    const auto made = result(100 + k);
    (void)rig_->cache.fetch(*made, {0, kBytes}, stream_);
  }
  const std::uint64_t hits = stats().hits;
  for (std::size_t k = 2; k < 10; ++k) use(k);
  EXPECT_EQ(stats().hits, hits + 8);
  EXPECT_EQ(stats().prefetchesWasted, 0U);
  checkValues();
}

// Layers that begin with a small weight: what is ahead by then leaves no room in its half for one of the others.
TEST_F(Prefetch, AnIdleLinkGetsACopyWithTheFirstFetch) {
  make(10, 6);
  layers_[0] = rig_->newBlock(pattern(0, kBytes / 8));
  const auto step = [this] {
    for (const auto& layer : layers_) (void)rig_->cache.fetch(*layer, {0, layer->bytes}, stream_);
  };
  for (int count = 0; count < 3; ++count) step();
  rig_->sim.drain();
  const std::uint64_t before = copies();
  (void)rig_->cache.fetch(*layers_[0], {0, layers_[0]->bytes}, stream_);
  EXPECT_EQ(copies(), before + 1);
  (void)rig_->cache.fetch(*layers_[1], {0, kBytes}, stream_);
  EXPECT_EQ(copies(), before + 1) << "the link has something to do";
  EXPECT_EQ(stats().prefetchesWasted, 0U);
  EXPECT_LE(stats().slotBytesPeak, 6 * kBytes);
}

// Of the half that results have.
TEST_F(Prefetch, AnIdleLinkGetsNoneWhereResultsWait) {
  make(10, 6, 0, 1, true, 0.25);
  layers_[0] = rig_->newBlock(pattern(0, kBytes / 8));
  const auto step = [this] {
    for (const auto& layer : layers_) (void)rig_->cache.fetch(*layer, {0, layer->bytes}, stream_);
  };
  for (int count = 0; count < 3; ++count) step();
  rig_->sim.drain();
  const auto result = rig_->newBlock(kBytes, Born::Device);
  rig_->cache.adopt(*result, rig_->newResult(stream_, pattern(9, kBytes)), stream_);
  const std::uint64_t before = copies();
  (void)rig_->cache.fetch(*layers_[0], {0, layers_[0]->bytes}, stream_);
  EXPECT_EQ(copies(), before);
  EXPECT_EQ(stats().dirtyBytes, kBytes);
}

TEST_F(Prefetch, TheRingIsNotExceeded) {
  make(10, 4);
  for (int step = 0; step < 4; ++step) {
    forward();
    backward();
  }
  EXPECT_LE(stats().slotBytesPeak, 4 * kBytes);
  checkValues();
}

TEST_F(Prefetch, WhatIsWantedAtATurningPointIsStillThere) {
  make(10, 4);
  for (int step = 0; step < 3; ++step) {
    forward();
    backward();
  }
  const std::uint64_t before = copies();
  forward();
  backward();
  EXPECT_LE(copies() - before, 20U - 6U) << "three of each turn are found";
  EXPECT_EQ(stats().prefetchesWasted, 0U);
  checkValues();
}

TEST_F(Prefetch, WeightsThatAStepWritesAreNotCopiedBeforeIt) {
  for (const std::size_t every : {1U, 2U, 3U}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      make(8, 4, seed);
      const auto train = [this, every](int steps) {
        for (int step = 0; step < steps; ++step) {
          forward();
          backward();
          for (std::size_t k = 0; k < layers_.size(); k += every) write(k);
        }
      };
      train(6);
      const std::uint64_t wasted = stats().prefetchesWasted;
      train(4);
      EXPECT_EQ(stats().prefetchesWasted, wasted);
      checkValues();
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", every " << every << ". layer";
    }
  }
}

// Optimizers begin with the gradients that came first, and write to a weight more than once.
TEST_F(Prefetch, TheEndOfAStepIsFollowedByTheCopiesThatComeNext) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(8, 4, seed);
    const auto train = [this] {
      forward();
      backward();
      for (std::size_t k = layers_.size(); k-- > 0;) {
        write(k);
        write(k);
      }
    };
    for (int step = 0; step < 6; ++step) train();
    const auto before = stats();
    train();
    EXPECT_EQ(stats().hits - before.hits, stats().fetches - before.fetches);
    EXPECT_EQ(stats().prefetchesWasted, before.prefetchesWasted);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Prefetch, WhatStaysIsFetchedAheadToo) {
  make(10, 4, 0, 10 * kBytes);
  forward();
  forward();
  for (std::size_t k = 0; k < layers_.size(); ++k) write(k);
  forward(); // which learns that the host writes
  for (std::size_t k = 0; k < layers_.size(); ++k) write(k);
  const std::uint64_t hits = stats().hits;
  forward();
  EXPECT_GE(stats().hits, hits + 8) << "all but the first, and the one that tells that it goes on";
  EXPECT_EQ(stats().stayingBytes, 10 * kBytes);
  checkValues();
}

TEST_F(Prefetch, ResultsDoNotPushOutWhatIsExpected) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(10, 4, seed);
    std::uint64_t before = 0;
    for (int step = 0; step < 4; ++step) {
      before = copies();
      forward();
      for (std::size_t k = layers_.size(); k-- > 0;) {
        use(k);
        const auto gradient = rig_->newBlock(kBytes);
        rig_->cache.adopt(*gradient, rig_->newResult(stream_, pattern(k, kBytes)), stream_);
      }
    }
    EXPECT_LE(copies() - before, 20U - 4U);
    EXPECT_EQ(stats().prefetchesWasted, 0U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// Unpacked weights: each layer makes two results of a quarter of the ring, which it reads at once, and the link is idle before.
TEST_F(Prefetch, ResultsGetBackTheHalfThatAnIdleLinkWasLent) {
  constexpr std::uint64_t kSteps = 16;
  for (std::uint64_t seed = 0; seed < kSeeds / 20; ++seed) {
    make(24, 8, seed);
    forward();
    forward();
    const std::uint64_t before = copies();
    for (std::uint64_t step = 0; step < kSteps; ++step) {
      for (std::size_t k = 0; k < layers_.size(); ++k) {
        use(k);
        rig_->sim.drain();
        std::vector<Rig::BlockPtr> results;
        for (int operation = 0; operation < 2; ++operation) {
          results.push_back(rig_->newBlock(2 * kBytes, Born::Device));
          rig_->cache.adopt(*results.back(), rig_->newResult(stream_, pattern(k, 2 * kBytes)), stream_);
        }
        for (const auto& result : results) (void)rig_->cache.fetch(*result, {0, result->bytes}, stream_);
      }
    }
    EXPECT_LE(copies() - before, kSteps * 24 * 105 / 100);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Prefetch, AnIdleLinkIsLentTheOtherHalfAgain) {
  make(24, 8);
  forward();
  forward();
  std::uint64_t used = 2 * layers_.size();
  // How many copies are ahead of their fetch at most, in a step in which the link has always time.
  const auto ahead = [&](bool results) {
    std::uint64_t most = 0;
    for (std::size_t k = 0; k < layers_.size(); ++k) {
      use(k);
      rig_->sim.drain();
      most = std::max(most, copies() - stats().prefetchesWasted - ++used);
      if (!results) continue;
      const auto result = rig_->newBlock(4 * kBytes, Born::Device);
      rig_->cache.adopt(*result, rig_->newResult(stream_, pattern(k, 4 * kBytes)), stream_);
      (void)rig_->cache.fetch(*result, {0, result->bytes}, stream_);
    }
    return most;
  };
  EXPECT_GT(ahead(false), 4U) << "more than half of the ring";
  for (int step = 0; step < 4; ++step) ahead(true);
  EXPECT_LE(ahead(true), 4U);
  int steps = 1;
  while (ahead(false) <= 4 && steps < 50) ++steps;
  EXPECT_GT(steps, 1) << "not at once";
  EXPECT_LT(steps, 50);
  rig_->cache.emptyCache(0);
  EXPECT_GT(ahead(false), 4U) << "an emptied cache is no reason to lend less";
  checkValues();
}

TEST_F(Prefetch, AResultBeforeTheFirstFetchHasTheRing) {
  make(1, 8);
  std::vector<Rig::BlockPtr> results;
  for (std::uint64_t k = 0; k < 3; ++k) {
    results.push_back(rig_->newBlock(kBytes, Born::Device));
    rig_->cache.adopt(*results.back(), rig_->newResult(stream_, pattern(k, kBytes)), stream_);
  }
  for (const auto& result : results) (void)rig_->cache.fetch(*result, {0, kBytes}, stream_);
  EXPECT_EQ(copies(), 0U);
  checkValues();
}

// Whoever lets go of memory that is still being copied home makes the stream that computes wait for that copy.
TEST_F(Prefetch, AResultKeepsItsMemoryWhileItGoesHome) {
  make(10, 4);
  for (int step = 0; step < 4; ++step) {
    forward();
    std::weak_ptr<void> last;
    for (std::size_t k = layers_.size(); k-- > 0;) {
      use(k);
      EXPECT_TRUE(k + 1 == layers_.size() || !last.expired()) << "step " << step << ", layer " << k;
      auto gradient = rig_->newBlock(kBytes);
      DeviceBuffer result = rig_->newResult(stream_, pattern(k, kBytes));
      last = result.owner;
      rig_->cache.adopt(*gradient, std::move(result), stream_);
      gradients_.push_back(std::move(gradient));
    }
    gradients_.clear();
  }
  EXPECT_GE(stats().prefetches, 20U);
  EXPECT_LE(stats().slotBytesPeak, 5 * kBytes) << "the ring, and the result that is made just now";
  checkValues();
}

TEST_F(Prefetch, CopiesHomeThatAreUnderWayGoFirst) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(8, 4, seed);
    for (int step = 0; step < 4; ++step) {
      forward();
      for (std::size_t k = 0; k < layers_.size(); ++k) {
        tags_[k] = 1000 + ++writes_;
        const DeviceBuffer result = rig_->newResult(stream_, pattern(tags_[k], kBytes));
        rig_->cache.store(*layers_[k], {0, kBytes}, result.data, stream_);
      }
    }
    EXPECT_GE(stats().prefetches, 8U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Prefetch, ABlockMayGoWhileItIsExpected) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(8, 4, seed);
    forward();
    forward();
    layers_.erase(layers_.begin() + 1);
    tags_.erase(tags_.begin() + 1);
    forward();
    forward();
    layers_.clear();
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(Prefetch, ALeaseThatIsHeldKeepsItsBytesFromBeingCopied) {
  make(8, 4);
  forward();
  forward();
  use(0);
  const std::uint64_t before = copies();
  HostLease lease = rig_->cache.lease(*layers_[5], Access::Write);
  for (std::size_t k = 1; k < 5; ++k) use(k);
  EXPECT_LE(copies() - before, 4U);
  tags_[5] = 500;
  rig_->sim.hostAccess(lease.data(), kBytes, Access::Write);
  std::memcpy(lease.data(), pattern(500, kBytes).data(), kBytes);
  lease = {};
  use(5);
  checkValues();
}

TEST_F(Prefetch, CanBeTurnedOff) {
  CoreOptions options;
  options.cache.ringBytes = 4 * kBytes;
  options.cache.prefetch = false;
  Rig rig(options);
  std::vector<Rig::BlockPtr> layers;
  for (std::size_t k = 0; k < 8; ++k) layers.push_back(rig.newBlock(pattern(k, kBytes)));
  for (int step = 0; step < 3; ++step) {
    for (const auto& layer : layers) rig.cache.fetch(*layer, {0, kBytes}, {});
  }
  EXPECT_EQ(rig.cache.stats(0).hits, 0U);
  EXPECT_EQ(rig.cache.stats(0).prefetches, 0U);
  layers.clear();
}

} // namespace
} // namespace offload
