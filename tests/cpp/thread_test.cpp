// Threads that share Blocks, for the thread sanitizer and for deadlocks. All host threads are one actor to the simulation, so what
// it reports here is order that no thread has; races of the host's own are the sanitizer's part.
#include <functional>
#include <thread>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 700;
constexpr std::uint64_t kThreads = 4;
constexpr int kRepeats = 200;

void onThreads(const std::function<void(std::uint64_t thread)>& body) {
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back(body, thread);
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

/// Whole values only: every byte the same.
bool isOneValue(const unsigned char* data, std::size_t bytes) {
  return std::memcmp(data, data + 1, bytes - 1) == 0;
}

struct Shared {
  explicit Shared(CoreOptions options) : rig(options) {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(rig.newBlock(Bytes(kBytes, static_cast<unsigned char>(i))));
    }
    for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
      streams.push_back(rig.sim.createStream(static_cast<int>(thread) % rig.sim.deviceCount()));
    }
  }
  ~Shared() {
    for (const auto& block : blocks) {
      EXPECT_NO_THROW(rig.cache.validate(*block));
    }
    for (int device = 0; device < rig.sim.deviceCount(); ++device) {
      EXPECT_EQ(rig.cache.stats(device).pinnedBytes, 0U);
      rig.cache.emptyCache(device);
      EXPECT_EQ(rig.sim.bytesInUse(device), 0U);
    }
    EXPECT_EQ(rig.owned, 0);
    EXPECT_NO_THROW(rig.sim.drain());
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  /// Fetches, and enqueues a kernel that wants to see one value.
  void fetch(Block& block, Stream stream) {
    const Pin pin = rig.cache.fetch(block, {0, kBytes}, stream);
    const auto* const data = static_cast<const unsigned char*>(pin.data());
    rig.sim.launch(stream, [=] { EXPECT_TRUE(isOneValue(data, kBytes)); }, {{data, kBytes}}, {});
  }

  Rig rig;
  std::vector<Rig::BlockPtr> blocks;
  std::vector<Stream> streams;
};

CoreOptions options(std::uint64_t seed) {
  CoreOptions options;
  options.sim.seed = seed;
  options.sim.devices = 1 + static_cast<int>(seed % 2);
  options.cache.ringBytes = 2048;
  options.cache.evictAtUnpin = seed == 2;
  if (seed == 3) { // pageable memory, in several pieces, sometimes without a chunk of the ring
    options.arena.pinnedLimit = 0;
    options.cache.chunkBytes = 100;
    options.sim.registrationLimit = 4 * BounceRing::kChunks * options.cache.chunkBytes;
  }
  if (seed == 4) options.cache.budgetBytes = 2 * kBytes;
  if (seed == 5) { // automatic, of a device with room for about six
    options.cache.budgetBytes.reset();
    options.sim.deviceBytes = 1 << 14;
    options.cache.headroomBytes = 1 << 13;
  }
  return options;
}

constexpr std::uint64_t kVariants[] = {0, 1, 2, 3, 4, 5};

TEST(Threads, FetchReadAndEvictSharedBlocks) {
  for (const std::uint64_t seed : kVariants) {
    Shared shared(options(seed));
    onThreads([&](std::uint64_t thread) {
      SimRandom random(thread);
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        Block& block = *shared.blocks[random.below(shared.blocks.size())];
        switch (random.below(10)) {
          case 8:
            shared.rig.cache.relieve(0, 0, kBytes, 2 * kBytes);
            break;
          case 9:
            if (seed >= 4)
              shared.rig.cache.setBudget(random.oneIn(2) ? std::optional<std::size_t>(random.below(4096)) : std::nullopt);
            break;
          case 0:
            EXPECT_TRUE(isOneValue(shared.rig.read(block).data(), kBytes));
            break;
          case 1:
            shared.rig.cache.emptyCache(0);
            break;
          case 2:
            shared.rig.cache.setRingBytes(1024 * (1 + random.below(4)));
            break;
          case 3:
            shared.rig.cache.validate(block);
            break;
          default:
            shared.fetch(block, shared.streams[thread]);
        }
      }
    });
  }
}

TEST(Threads, StoreAndAdoptWhatOthersFetch) {
  for (const std::uint64_t seed : kVariants) {
    Shared shared(options(seed));
    std::mutex owned; // guards the rig's own count
    onThreads([&](std::uint64_t thread) {
      SimRandom random(thread);
      const Stream stream = shared.streams[thread];
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        Block& block = *shared.blocks[random.below(shared.blocks.size())];
        const Bytes value(kBytes, static_cast<unsigned char>(random.next()));
        if (random.oneIn(2)) {
          shared.fetch(block, stream);
          continue;
        }
        void* const data = shared.rig.sim.allocate(kBytes, stream);
        shared.rig.writeOnDevice(stream, data, value);
        if (random.oneIn(2)) {
          shared.rig.cache.adopt(block, {data, kBytes, stream, nullptr}, stream);
        } else {
          shared.rig.cache.store(block, {0, kBytes}, data, stream);
          shared.rig.sim.free(data, stream);
        }
      }
    });
    for (const auto& block : shared.blocks) {
      const Bytes home = shared.rig.read(*block);
      EXPECT_TRUE(isOneValue(home.data(), kBytes));
      shared.fetch(*block, shared.streams[0]);
    }
  }
}

TEST(Threads, WriteTheirOwnBlocksAndFreeThem) {
  for (const std::uint64_t seed : kVariants) {
    Shared shared(options(seed));
    onThreads([&](std::uint64_t thread) {
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const auto block = shared.rig.newBlock(Bytes(kBytes, static_cast<unsigned char>(repeat)));
        const Pin pin = shared.rig.cache.fetch(*block, {0, kBytes}, shared.streams[thread]);
        shared.rig.write(*block, Bytes(kBytes, static_cast<unsigned char>(repeat + 1)));
        shared.fetch(*block, shared.streams[thread]);
        if (thread == 0) {
          shared.rig.arena.trim();
          shared.rig.arena.validate();
        }
      }
    });
    EXPECT_EQ(shared.rig.arena.stats().count, shared.blocks.size());
  }
}

// Each thread's results push those of the others home, whose Blocks may go at any time.
TEST(Threads, SpillWhatOthersOwn) {
  for (const std::uint64_t seed : kVariants) {
    Shared shared(options(seed));
    onThreads([&](std::uint64_t thread) {
      SimRandom random(thread);
      const Stream stream = shared.streams[thread];
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        const auto block = shared.rig.newBlock(Bytes(kBytes, 1));
        block->purpose = random.oneIn(2) ? Purpose::Gradient : Purpose::Temporary;
        block->derivedFrom = block->data;
        const auto value = static_cast<unsigned char>(random.next());
        for (std::uint64_t writes = 1 + random.below(3); writes > 0; --writes) {
          void* const data = shared.rig.sim.allocate(kBytes, stream);
          shared.rig.writeOnDevice(stream, data, Bytes(kBytes, value));
          shared.rig.cache.adopt(*block, {data, kBytes, stream, nullptr}, stream);
        }
        if (random.oneIn(2)) shared.fetch(*block, stream);
        if (random.oneIn(3)) {
          EXPECT_EQ(shared.rig.read(*block), Bytes(kBytes, value));
        }
        if (random.oneIn(16)) shared.rig.cache.emptyCache(stream.device);
      }
    });
  }
}

// Kernels read one value or another, and never some of both, whoever changes them where they are.
TEST(Threads, UpdateInTheCacheWhatOthersFetch) {
  for (const std::uint64_t seed : kVariants) {
    Shared shared(options(seed));
    onThreads([&](std::uint64_t thread) {
      SimRandom random(thread);
      const Stream stream = shared.streams[thread];
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        Block& block = *shared.blocks[random.below(shared.blocks.size())];
        const Bytes value(kBytes, static_cast<unsigned char>(random.next()));
        switch (random.below(8)) {
          case 0:
            EXPECT_TRUE(isOneValue(shared.rig.read(block).data(), kBytes));
            break;
          case 1:
            shared.rig.cache.relieve(0, 0, kBytes, 2 * kBytes);
            break;
          case 2:
            shared.rig.cache.emptyCache(stream.device);
            break;
          case 3:
            shared.fetch(block, stream);
            break;
          default:
            shared.rig.cache.updateThere({{&block, Access::Write}}, stream, [&](const std::vector<void*>& at) {
              shared.rig.writeOnDevice(stream, at[0], value);
            });
        }
      }
    });
    for (const auto& block : shared.blocks) {
      EXPECT_TRUE(isOneValue(shared.rig.read(*block).data(), kBytes));
      shared.fetch(*block, shared.streams[0]);
    }
  }
}

TEST(Threads, LetGoOfEachOthersPins) {
  Shared shared(options(3));
  std::mutex mutex;
  std::vector<Pin> pins;
  onThreads([&](std::uint64_t thread) {
    SimRandom random(thread);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      Pin pin = shared.rig.cache.fetch(*shared.blocks[random.below(4)], {0, kBytes}, shared.streams[thread]);
      const std::lock_guard lock(mutex);
      pins.push_back(std::move(pin));
      std::swap(pins.back(), pins[random.below(pins.size())]);
      if (pins.size() > 6) {
        pins.pop_back();
      }
    }
  });
  pins.clear();
}

} // namespace
} // namespace offload
