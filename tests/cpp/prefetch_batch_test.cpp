// Copies ahead that are enqueued several at once: which ones, when, and that nothing else is different.
#include "prefetch_batch_rig.h"
#include "test_file.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace offload {
namespace {

using namespace core_test;

TEST_F(PrefetchBatch, AKnownOrderIsCopiedFourAtOnceAndEveryFetchFindsItsBytes) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(options(seed));
    forward(2);
    const ResidencyStats before = stats();
    const TransferStats movedBefore = moved();
    rig_->link.singles.clear();
    rig_->link.batches.clear();
    forward(3);
    EXPECT_EQ(stats().hits, before.hits + 72);
    EXPECT_EQ(stats().prefetches, before.prefetches + 72);
    EXPECT_EQ(stats().prefetchesWasted, 0U);
    EXPECT_EQ(moved().copiesToDevice, movedBefore.copiesToDevice + 72) << "nothing is copied for nothing";
    EXPECT_EQ(moved().bytesToDevice, movedBefore.bytesToDevice + 72 * kBytes);
    EXPECT_EQ(rig_->link.singles.size(), 0U);
    EXPECT_EQ(rig_->link.batches.size(), 18U);
    for (const auto& batch : rig_->link.batches) EXPECT_EQ(batch.size(), 4U);
    EXPECT_LE(stats().slotBytesPeak, kSlots * kBytes);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(PrefetchBatch, WhatIsAheadIsRefilledWhenHalfOfItIsLeft) {
  make(options());
  forward(2);
  for (std::size_t k = 0; k < 3 * kLayers; ++k) {
    use(k % kLayers);
    const std::uint64_t ahead = moved().copiesToDevice - stats().fetches;
    EXPECT_GE(ahead, 5U) << "fetch " << k;
    EXPECT_LE(ahead, 8U) << "fetch " << k;
  }
  checkValues();
}

// The stream that computes waits for its copies, and the copies for the memory that they go to.
TEST_F(PrefetchBatch, TwoStreamsWaitOnceForABatch) {
  CoreOptions late = options();
  late.sim.bias = SimBias::Late; // no copy is done before somebody waits for it
  late.sim.maxPending = SIZE_MAX;
  make(late);
  forward(2);
  rig_->link.batches.clear();
  rig_->link.waits = rig_->link.queries = 0;
  forward(3);
  EXPECT_EQ(rig_->link.batches.size(), 18U);
  EXPECT_EQ(rig_->link.waits, 36U);
  EXPECT_EQ(rig_->link.queries, 18U + 72U) << "and every fetch asks whether the link has nothing to do";
  checkValues();
}

TEST_F(PrefetchBatch, NoFetchWaitsForABatch) {
  make(options());
  forward(2);
  std::vector<Pin> held; // of what leaves no room ahead
  for (std::size_t k = 0; k < kLayers; ++k) held.push_back(rig_->cache.fetch(*layers_[k], {0, kBytes}, stream_));
  EXPECT_EQ(moved().copiesToDevice, stats().fetches) << "each has been copied once, by whomever";
  held.clear();
  forward();
  checkValues();
}

TEST_F(PrefetchBatch, SmallOnesAreCopiedOneByOneWithinABatch) {
  std::vector<std::size_t> sizes;
  for (std::size_t k = 0; k < kLayers; ++k) sizes.push_back(k % 3 == 0 ? kBytes / 2 - 1 : kBytes);
  make(options(), sizes);
  forward(2);
  const std::uint64_t before = moved().copiesToDevice;
  const std::uint64_t hits = stats().hits;
  rig_->link.singles.clear();
  rig_->link.batches.clear();
  forward(3);
  EXPECT_EQ(stats().hits, hits + 72);
  EXPECT_EQ(moved().copiesToDevice, before + 72);
  std::size_t alone = 0;
  std::size_t together = 0;
  for (const std::size_t bytes : rig_->link.singles) (bytes == kBytes ? alone : together) += 1;
  EXPECT_EQ(together, 24U) << "all of the small ones";
  for (const auto& batch : rig_->link.batches) {
    EXPECT_GE(batch.size(), 2U);
    for (const Copy& copy : batch) EXPECT_EQ(copy.bytes, kBytes);
    together += batch.size();
  }
  EXPECT_EQ(together + alone, 72U);
  EXPECT_LE(rig_->link.batches.size(), 24U);
  checkValues();
}

TEST_F(PrefetchBatch, LargePageableAndFileBackedOnesGoAlone) {
  CoreOptions large = options();
  large.cache.batchMost = kBytes - 1;
  CoreOptions pageable = options();
  pageable.arena.pinnedLimit = 0;
  for (const CoreOptions& one : {large, pageable}) {
    make(one);
    forward(4);
    EXPECT_GE(stats().prefetches, 48U);
    EXPECT_EQ(rig_->link.batches.size(), 0U);
    checkValues();
  }
  make(options(), {});
  for (std::size_t k = 0; k < kLayers; ++k) {
    tags_.push_back(k);
    layers_.push_back(rig_->fileBlock(std::make_shared<File>(TestFile(pattern(k, kBytes)).path()), 0, kBytes));
  }
  forward(4);
  EXPECT_GE(stats().prefetches, 48U);
  EXPECT_EQ(rig_->link.batches.size(), 0U);
  checkValues();
}

TEST_F(PrefetchBatch, WhatAStepWritesIsCopiedAfterIt) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(options(seed));
    for (int step = 0; step < 4; ++step) {
      forward();
      for (std::size_t k = 0; k < layers_.size(); k += 2) write(k);
      for (std::size_t k = 1; k < layers_.size(); k += 2) {
        tags_[k] = 1000 + ++writes_;
        const DeviceBuffer result = rig_->newResult(stream_, pattern(tags_[k], kBytes));
        rig_->cache.store(*layers_[k], {0, kBytes}, result.data, stream_);
      }
    }
    EXPECT_GE(rig_->link.batches.size(), 4U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(PrefetchBatch, OneExtentTwiceAndTwoOfOneBlock) {
  make(options());
  std::uint64_t before = 0;
  for (int step = 0; step < 5; ++step) {
    if (step == 2) before = moved().copiesToDevice;
    if (step == 2) rig_->link.batches.clear();
    for (std::size_t k = 0; k < kLayers; ++k) {
      use(k, {0, kBytes / 2});
      use(k, {kBytes / 2, kBytes});
      use(k, {0, kBytes / 2});
    }
  }
  EXPECT_EQ(moved().copiesToDevice, before + 3 * 2 * kLayers) << "the third time it is found";
  EXPECT_EQ(stats().prefetchesWasted, 0U);
  EXPECT_GE(rig_->link.batches.size(), 1U);
  EXPECT_LE(rig_->link.batches.size(), 3 * 2 * kLayers / 8);
  checkValues();
}

TEST_F(PrefetchBatch, PoisonAndCopiesThatComeLateChangeNothing) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CoreOptions late = options(seed);
    late.cache.poison = true;
    late.cache.copyDelay = std::chrono::microseconds(1);
    make(late);
    forward(4);
    EXPECT_GE(rig_->link.batches.size(), 12U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// ---- what happens while a batch is being enqueued

TEST_F(PrefetchBatch, WhoWritesMeanwhileWaitsForTheCopies) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(options(seed));
    forward(2);
    std::thread writer;
    std::atomic<bool> written = false;
    rig_->link.meanwhile = [&](std::span<const Copy> copies) {
      const std::size_t k = layerAt(copies[1].from);
      writer = std::thread([&, k] {
        rig_->write(*layers_[k], pattern(500, kBytes));
        written = true;
      });
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      EXPECT_FALSE(written);
      tags_[k] = 500;
    };
    for (std::size_t k = 0; k < kLayers && !writer.joinable(); ++k) use(k);
    ASSERT_TRUE(writer.joinable());
    writer.join();
    forward();
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(PrefetchBatch, ABlockThatGoesMeanwhileKeepsItsMemoryUntilItHasBeenRead) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(options(seed));
    forward(2);
    std::thread goer;
    std::atomic<bool> gone = false;
    std::size_t which = kLayers;
    rig_->link.meanwhile = [&](std::span<const Copy> copies) {
      which = layerAt(copies[2].from);
      goer = std::thread([&, block = layers_[which].release()] {
        const BlockPtr going(block, BatchRig::Return{rig_.get()});
        gone = true;
      });
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    };
    std::size_t used = 0;
    for (; !goer.joinable(); ++used) use(used);
    goer.join();
    layers_.erase(layers_.begin() + static_cast<std::ptrdiff_t>(which));
    tags_.erase(tags_.begin() + static_cast<std::ptrdiff_t>(which));
    EXPECT_TRUE(gone);
    // Its host memory is had again, and written, when the copy has been made.
    layers_.push_back(rig_->newBlock(pattern(700, kBytes)));
    tags_.push_back(700);
    forward(3);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(PrefetchBatch, ALeaseThatIsTakenMeanwhileKeepsItsBytesFromBeingCopied) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    make(options(seed));
    forward(2);
    rig_->link.batches.clear();
    HostLease lease;
    std::size_t leased = kLayers;
    std::size_t k = 0;
    rig_->link.whenAllocating = [&] {
      leased = k + 6; // five to eight are to be copied
      lease = rig_->cache.lease(*layers_[leased], Access::Write);
    };
    while (!lease) use(k++);
    ASSERT_EQ(rig_->link.batches.size(), 1U);
    EXPECT_EQ(rig_->link.batches[0].size(), 3U);
    tags_[leased] = 500;
    rig_->sim.hostAccess(lease.data(), kBytes, Access::Write);
    std::memcpy(lease.data(), pattern(500, kBytes).data(), kBytes);
    lease = {};
    for (; k < kLayers; ++k) use(k);
    forward();
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_F(PrefetchBatch, FetchesThatOvertakeABatchAreNotCopiedAgain) {
  make(options());
  forward(2);
  std::size_t k = 0;
  bool overtaken = false;
  rig_->link.whenAllocating = [&] { // as another thread may
    const std::size_t last = k + 7;
    while (k < last) use(++k);
    overtaken = true;
  };
  for (; k < kLayers; ++k) use(k);
  EXPECT_TRUE(overtaken);
  forward(2);
  EXPECT_EQ(stats().prefetchesWasted, 0U);
  EXPECT_LE(moved().copiesToDevice, stats().fetches + 8);
  checkValues();
}

TEST_F(PrefetchBatch, ThreadsThatFetchAndThreadsThatWrite) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    make(options(seed));
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([this, thread] {
        const Stream own = rig_->sim.createStream(0);
        for (int step = 0; step < 12; ++step) {
          for (std::size_t k = 0; k < kLayers / 2; ++k) {
            if (thread == 0 && step % 4 == 3) rig_->write(*layers_[k], pattern(k, kBytes));
            const Pin pin = rig_->cache.fetch(*layers_[k], {0, kBytes}, own);
            const void* const data = pin.data();
            rig_->sim.launch(
                own, [data, k] { EXPECT_EQ(std::memcmp(data, pattern(k, kBytes).data(), kBytes), 0); }, {{data, kBytes}}, {});
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    forward(4);
    EXPECT_GE(rig_->link.batches.size(), 4U);
    checkValues();
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

// ---- what fails

TEST_F(PrefetchBatch, ABatchThatFailsIsFetchedOnDemand) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    for (const std::size_t enqueued : {0U, 1U, 3U}) {
      CoreOptions faulty = options(seed);
      faulty.cache.poison = seed % 2 == 1;
      make(faulty);
      forward(2);
      const std::uint64_t hits = stats().hits;
      const std::uint64_t prefetches = stats().prefetches;
      rig_->link.failAfter = enqueued;
      forward();
      EXPECT_EQ(stats().prefetches, prefetches) << "none of a batch that failed counts";
      EXPECT_LE(stats().hits, hits + 8) << "but what was ahead before";
      for (std::size_t k = 0; k < layers_.size(); ++k) write(k); // over what may be on its way
      rig_->link.failAfter = SIZE_MAX;
      forward(3);
      EXPECT_GE(stats().hits, hits + 24);
      checkValues();
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", " << enqueued << " of a batch";
    }
  }
}

// All that is allocated in a known order is for copies ahead. What is refused there, nobody learns of: the fetch itself copies, and from
// then on all is as before.
TEST_F(PrefetchBatch, EachAllocationIsRefusedOnce) {
  for (const bool together : {true, false}) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      std::size_t shorter = 0;
      std::size_t n = 1;
      for (bool refused = true; refused; ++n) {
        CoreOptions faulty = options(seed);
        if (!together) faulty.cache.batchMost = 0;
        faulty.cache.poison = seed % 2 == 1;
        make(faulty);
        forward(2);
        rig_->link.batches.clear();
        const TransferStats before = moved();
        rig_->link.refuses = n;
        for (std::size_t k = 0; k < layers_.size(); ++k) ASSERT_NO_THROW(use(k));
        rig_->link.refuses = 0;
        refused = rig_->link.refused > 0;
        for (const auto& batch : rig_->link.batches) shorter += batch.size() < 4;
        EXPECT_LE(moved().copiesToDevice, before.copiesToDevice + kLayers + kSlots / 2)
            << "what is ahead is all that may be more";
        EXPECT_EQ(stats().prefetchesWasted, 0U);
        EXPECT_EQ(stats().pinnedBytes, 0U);
        EXPECT_LE(stats().slotBytesPeak, kSlots * kBytes);
        EXPECT_EQ(rig_->sim.bytesInUse(0), stats().slotBytes) << "memory that no Slot has";
        for (std::size_t k = 0; k < layers_.size(); k += 3) write(k); // over what was refused and what was not
        forward(2);
        const ResidencyStats again = stats();
        forward();
        EXPECT_EQ(stats().hits, again.hits + kLayers) << "and the order is foretold as before";
        checkValues();
        rig_->cache.emptyCache(0);
        EXPECT_EQ(stats().slotBytes, 0U);
        EXPECT_EQ(rig_->sim.bytesInUse(0), 0U);
        EXPECT_EQ(rig_->link.use().buffers, 0);
        ASSERT_FALSE(HasFailure()) << (together ? "together" : "alone") << ", seed " << seed << ", allocation " << n;
      }
      EXPECT_GT(n, kLayers) << "one for each copy";
      EXPECT_TRUE(!together || shorter > 0) << "some are refused in the middle of a batch";
    }
  }
}

// A device on which there is no room for what may be ahead.
TEST_F(PrefetchBatch, WhereThereIsNoMemoryForCopiesAheadFetchesGoOn) {
  for (const std::size_t fits : {2U, 3U, 6U, 10U}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      CoreOptions small = options(seed);
      small.sim.deviceBytes = fits * kBytes;
      make(small);
      for (int pass = 0; pass < 4; ++pass) {
        for (std::size_t k = 0; k < layers_.size(); ++k) ASSERT_NO_THROW(use(k));
        for (std::size_t k = 0; k < layers_.size(); k += 5) write(k);
      }
      EXPECT_GT(stats().evictions, 0U);
      EXPECT_EQ(stats().pinnedBytes, 0U);
      checkValues();
      rig_->cache.emptyCache(0);
      EXPECT_EQ(rig_->sim.bytesInUse(0), 0U);
      ASSERT_FALSE(HasFailure()) << fits << " fit, seed " << seed;
    }
  }
}

TEST_F(PrefetchBatch, EachCallFailsOnce) {
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    bool failed = true;
    std::uint64_t n = 1;
    for (; failed; ++n) {
      CoreOptions faulty = options(seed);
      faulty.cache.poison = seed % 2 == 1;
      make(faulty);
      forward(2);
      rig_->link.fail(n);
      for (std::size_t k = 0; k < 9; ++k) {
        try {
          use(k);
        } catch (const Error&) {
          EXPECT_EQ(rig_->link.failures(), 1U);
        }
      }
      failed = rig_->link.failures() > 0;
      rig_->link.fail(0);
      for (std::size_t k = 0; k < layers_.size(); ++k) write(k);
      forward();
      checkValues();
      rig_->cache.emptyCache(0);
      EXPECT_EQ(rig_->sim.bytesInUse(0), 0U);
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", call " << n;
    }
    EXPECT_GE(n, 40U);
  }
}

} // namespace
} // namespace offload
