// Slabs, and how much more than was asked for is taken from the system.
#include <algorithm>
#include <numeric>

#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kMiB = std::size_t{1} << 20;
using Sizes = std::vector<std::size_t>;

std::size_t sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

/// Weights of Llama-3-8B: 32 blocks of hidden size 4096, 8 key and value heads of 128, feed-forward size 14336, 128256 tokens.
Sizes llama8B(std::size_t itemBytes) {
  constexpr std::size_t hidden = 4096;
  Sizes sizes{128256 * hidden};
  for (int block = 0; block < 32; ++block) {
    sizes.insert(sizes.end(), {hidden * hidden, 1024 * hidden, 1024 * hidden, hidden * hidden});
    sizes.insert(sizes.end(), {14336 * hidden, 14336 * hidden, 14336 * hidden, hidden, hidden});
  }
  sizes.insert(sizes.end(), {hidden, 128256 * hidden});
  for (auto& size : sizes) {
    size *= itemBytes;
  }
  return sizes;
}

/// Weights and buffers of ResNet-50 (torchvision's): convolutions without bias, each with a batch norm.
Sizes resnet50(std::size_t itemBytes) {
  Sizes sizes;
  auto convolution = [&](std::size_t in, std::size_t out, std::size_t kernel) {
    sizes.push_back(in * out * kernel * kernel * itemBytes);
    sizes.insert(sizes.end(), 4, out * itemBytes); // weight, bias, running mean and variance
    sizes.push_back(8); // batches seen
  };
  convolution(3, 64, 7);
  std::size_t in = 64;
  for (const auto& [width, blocks] : {std::pair<std::size_t, int>{64, 3}, {128, 4}, {256, 6}, {512, 3}}) {
    for (int block = 0; block < blocks; ++block) {
      convolution(in, width, 1);
      convolution(width, width, 3);
      convolution(width, 4 * width, 1);
      if (block == 0) {
        convolution(in, 4 * width, 1);
      }
      in = 4 * width;
    }
  }
  sizes.insert(sizes.end(), {1000 * 2048 * itemBytes, 1000 * itemBytes});
  return sizes;
}

TEST(ArenaSizes, PinsLittleMoreThanModelsAskFor) {
  const std::vector<std::pair<const char*, Sizes>> models{
      {"64 tensors of 129.5 MB", Sizes(64, 129'500'000)},
      {"Llama-3-8B, bfloat16", llama8B(2)},
      {"Llama-3-8B, float32", llama8B(4)},
      {"ResNet-50, bfloat16", resnet50(2)},
      {"ResNet-50, float32", resnet50(4)},
      {"1,000 tensors of 1.1 MiB", Sizes(1000, kMiB * 11 / 10)},
      {"10,000 tensors of 20 KiB", Sizes(10'000, 20 << 10)},
      {"100,000 tensors of 1 KiB", Sizes(100'000, 1 << 10)},
  };
  for (const auto& [name, sizes] : models) {
    ArenaRig rig(untouched());
    for (const std::size_t size : sizes) {
      ASSERT_TRUE(rig.arena.allocate(size).pinned) << name;
    }
    const ArenaStats stats = rig.arena.stats();
    const double ratio = static_cast<double>(stats.pinned) / static_cast<double>(sum(sizes));
    EXPECT_LE(ratio, 1.03) << name;
    EXPECT_EQ(stats.pinned, rig.link.lockedBytes);
    EXPECT_EQ(stats.reserved, stats.pinned);
    rig.arena.validate();
  }
  EXPECT_EQ(sum(llama8B(1)), 8'030'261'248U);
}

TEST(ArenaSizes, SizesThatGrowAllTheTimeLeaveNoTrail) {
  ArenaRig rig(untouched());
  const std::size_t rest = 64 * kMiB;
  rig.arena.allocate(rest);
  HostRange cache = rig.arena.allocate(64 * kMiB);
  for (std::size_t token = 1; token <= 200; ++token) {
    const HostRange longer = rig.arena.allocate(64 * kMiB + token * kMiB / 4);
    rig.arena.free(cache.data, {});
    cache = longer;
  }
  const std::size_t peak = rig.arena.stats().allocatedPeak;
  EXPECT_LE(rig.arena.stats().reservedPeak, peak + peak / 8 + ArenaOptions().sharedRegionBytes + 2 * kMiB);
  EXPECT_EQ(rig.arena.stats().pinned, rig.link.lockedBytes);
}

TEST(ArenaSizes, EqualSmallRequestsLieSideBySide) {
  ArenaRig rig(untouched());
  auto* const first = static_cast<char*>(rig.arena.allocate(600).data);
  void* const other = rig.arena.allocate(5000).data;
  std::vector<void*> all{first};
  for (std::ptrdiff_t i = 1; i < 64; ++i) {
    all.push_back(rig.arena.allocate(600).data);
    EXPECT_EQ(all.back(), first + i * 1024);
  }
  EXPECT_EQ(rig.arena.stats().allocated, 64U * 1024 + 5120);
  // The slab is full: another begins.
  void* const next = rig.arena.allocate(600).data;
  EXPECT_TRUE(next < first || next >= first + std::ptrdiff_t{64} * 1024);
  rig.arena.validate();
  // A hole is filled before the newer slab.
  rig.arena.free(all[17], {});
  EXPECT_EQ(rig.arena.allocate(1024).data, all[17]);
  rig.arena.free(next, {});
  rig.arena.free(other, {});
  for (void* data : all) {
    rig.arena.free(data, {});
    rig.arena.validate();
  }
  EXPECT_EQ(rig.arena.trim(), rig.arena.stats().reservedPeak);
}

TEST(ArenaSizes, WhereNoSlabFitsAHoleDoes) {
  ArenaOptions options = smallRegions();
  ArenaRig rig(options);
  const std::size_t slab = options.sharedRegionBytes / 16;
  std::vector<void*> parts;
  for (int i = 0; i < 16; ++i) {
    parts.push_back(rig.arena.allocate(slab).data);
  }
  rig.arena.free(parts[3], {});
  ASSERT_EQ(rig.arena.allocate(slab - 512).data, parts[3]);
  const HostRange hole = rig.arena.allocate(100);
  EXPECT_EQ(hole.data, static_cast<char*>(parts[3]) + slab - 512);
  EXPECT_EQ(rig.arena.stats().reserved, options.sharedRegionBytes);
  rig.arena.validate();
  rig.arena.free(hole.data, {});
  rig.arena.validate();
}

TEST(ArenaSizes, APendingObjectOfASlabIsNotHandedOut) {
  ArenaRig rig;
  void* const data = rig.arena.allocate(512).data;
  void* const neighbour = rig.arena.allocate(512).data;
  void* const device = rig.sim.allocate(512, rig.stream);
  rig.sim.copyToDevice(device, data, 512, rig.stream);
  rig.arena.free(data, {rig.pool.record(rig.stream)});
  rig.arena.free(neighbour, {});
  rig.arena.validate();
  EXPECT_EQ(rig.arena.trim(), 0U);
  EXPECT_EQ(rig.arena.allocate(512).data, neighbour);
  rig.sim.drain();
  EXPECT_EQ(rig.arena.allocate(512).data, data);
  rig.sim.free(device, rig.stream);
}

/// A program of allocations, frees with copies pending, and trims, that knows what every range must hold.
void runProgram(std::uint64_t seed) {
  SimRandom random(seed);
  ArenaOptions options = smallRegions();
  options.slabBytes = std::size_t{2048} << random.below(3);
  options.sharedRegionBytes = std::size_t{1 << 15} << random.below(3);
  options.pinnedLimit = random.oneIn(2) ? SIZE_MAX : 3 * options.sharedRegionBytes;
  ArenaRig rig(options);
  std::vector<std::pair<HostRange, Bytes>> live;
  auto release = [&](std::size_t at) {
    auto& [range, value] = live[at];
    ASSERT_EQ(std::memcmp(range.data, value.data(), value.size()), 0);
    if (random.oneIn(3)) {
      // The device reads the bytes after they have been freed; a range that is handed out too early is a race.
      auto* const data = static_cast<unsigned char*>(range.data);
      rig.sim.launch(
          rig.stream, [data, expected = value] { EXPECT_EQ(std::memcmp(data, expected.data(), expected.size()), 0); },
          {{data, value.size()}}, {});
      rig.arena.free(data, {rig.pool.record(rig.stream)});
    } else {
      rig.arena.free(range.data, {});
    }
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
  };
  for (std::uint64_t step = 0; step < 300; ++step) {
    if (live.empty() || live.size() < random.below(120)) {
      const std::size_t bytes = 1 + (random.oneIn(10) ? random.below(1 << 17) : (1 + random.below(4)) * random.below(700));
      const HostRange range = rig.arena.allocate(bytes);
      const Bytes value = pattern(step, bytes);
      rig.sim.hostAccess(range.data, bytes, Access::Write);
      std::copy(value.begin(), value.end(), static_cast<unsigned char*>(range.data));
      live.emplace_back(range, value);
    } else if (random.oneIn(20)) {
      rig.arena.trim();
    } else {
      ASSERT_NO_FATAL_FAILURE(release(random.below(live.size())));
    }
    ASSERT_NO_THROW(rig.arena.validate());
    ASSERT_EQ(rig.arena.stats().count, live.size());
    ASSERT_EQ(rig.arena.stats().pinned, rig.link.lockedBytes);
    ASSERT_LE(rig.arena.stats().pinned, options.pinnedLimit);
  }
  while (!live.empty()) {
    ASSERT_NO_FATAL_FAILURE(release(live.size() - 1));
  }
  rig.sim.drain();
  rig.arena.trim();
  ASSERT_EQ(rig.arena.stats().reserved, 0U);
  ASSERT_NO_THROW(rig.arena.validate());
}

TEST(ArenaSizes, RandomPrograms) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    runProgram(seed);
    ASSERT_FALSE(testing::Test::HasFailure());
  }
}

} // namespace
} // namespace offload
