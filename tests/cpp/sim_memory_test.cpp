// Device memory of the simulated link: bounds, poison, guards, and reuse in stream order.
#include <gtest/gtest.h>

#include <set>

#include "sim_rig.h"

namespace offload {
namespace {

using namespace sim_test;

unsigned char byteAt(const void* data, std::size_t offset = 0) {
  return static_cast<const unsigned char*>(data)[offset];
}

TEST(SimMemory, IsAlignedPoisonedAndCounted) {
  Rig rig(1);
  for (const std::size_t bytes : {0, 1, 255, 256, 257}) {
    void* device = rig.link.allocate(bytes, rig.one);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(device) % 256, 0U);
    EXPECT_EQ(rig.link.bytesInUse(0), bytes <= 256 ? 512U : 768U);
    rig.link.record(rig.event, rig.one);
    rig.link.synchronize(rig.event);
    for (std::size_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(byteAt(device, i), SimMemory::freshByte);
    }
    rig.link.free(device, rig.one);
  }
  rig.link.free(rig.device, rig.one);
  EXPECT_EQ(rig.link.bytesInUse(0), 0U);
}

TEST(SimMemory, HasACapacity) {
  Rig rig(1);
  void* device = rig.link.allocate(3800, rig.one);
  try {
    rig.link.allocate(100, rig.two);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.where(), OutOfMemory::Where::Device);
    EXPECT_EQ(error.bytes(), 100U);
  }
  rig.link.free(device, rig.one);
  EXPECT_NO_THROW(rig.link.allocate(100, rig.two));
  EXPECT_TRUE(rig.link.reports().empty());
  EXPECT_THROW(rig.link.allocate(~std::size_t{0}, rig.two), OutOfMemory);
}

TEST(SimMemory, IsFreedInStreamOrder) {
  Rig rig(1);
  void* device = rig.link.allocate(size, rig.one);
  rig.link.fill(device, 1, size, rig.one);
  rig.link.copyToHost(rig.host.data(), device, size, rig.one);
  rig.link.free(device, rig.one);
  rig.link.drain();
  EXPECT_EQ(rig.host[0], 1);
  EXPECT_EQ(byteAt(device), SimMemory::freedByte);
}

TEST(SimMemory, IsReusedAtOnceOnItsStreamAndLaterOnOthers) {
  int sameStream = 0;
  int otherStream = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    void* first = rig.link.allocate(size, rig.one);
    rig.link.fill(first, 1, size, rig.one);
    rig.link.copyToHost(rig.host.data(), first, size, rig.one);
    rig.link.free(first, rig.one);
    EXPECT_NE(rig.link.allocate(size, rig.two), first);
    void* second = rig.link.allocate(size / 2, rig.one);
    if (second == first) {
      ++sameStream;
      rig.link.fill(second, 2, size / 2, rig.one);
    }
    rig.link.drain();
    EXPECT_EQ(rig.host[0], 1);
    if (second == first) {
      EXPECT_EQ(byteAt(second), 2);
    } else {
      EXPECT_EQ(byteAt(first), SimMemory::freedByte);
      otherStream += rig.link.allocate(size, rig.two) == first;
    }
    EXPECT_TRUE(rig.link.reports().empty());
  }
  EXPECT_GT(sameStream, 100);
  EXPECT_GT(otherStream, 10);
}

TEST(SimMemory, FindsFreeThatOtherStreamsAreNotOrderedBefore) {
  expectReport(
      [](Rig& rig) {
        rig.link.record(rig.event, rig.one);
        rig.link.wait(rig.two, rig.event);
        rig.link.fill(rig.device, 1, size, rig.two);
        rig.link.free(rig.device, rig.one);
      },
      {"race: free #"});
}

TEST(SimMemory, FindsReuseOnAnotherStreamWithoutOrder) {
  int found = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Rig rig(seed);
    void* first = rig.link.allocate(size, rig.one);
    rig.link.free(first, rig.one);
    void* second = rig.link.allocate(size, rig.one);
    EXPECT_THROW(rig.link.copyToHost(rig.host.data(), first, size, rig.two), Error) << seed;
    found += first == second && rig.link.reports().front().find("race: copy to host") == 0;
  }
  EXPECT_GT(found, 100);
}

TEST(SimMemory, FindsUseThatDoesNotWaitForTheAllocation) {
  expectReport([](Rig& rig) { rig.link.fill(rig.device, 1, size, rig.two); }, {"allocation #"});
}

TEST(SimMemory, FindsUseOfFreedMemory) {
  expectReport(
      [](Rig& rig) {
        rig.link.free(rig.device, rig.one);
        rig.link.copyToHost(rig.host.data(), rig.device, size, rig.one);
      },
      {"device memory that was freed"});
}

TEST(SimMemory, FindsUseOfHostMemoryAsDeviceMemoryAndTheOtherWayRound) {
  expectReport([](Rig& rig) { rig.link.fill(rig.host.data(), 1, size, rig.one); }, {"never allocated on a device"});
  expectReport(
      [](Rig& rig) { rig.link.copyToDevice(rig.device, rig.device, size, rig.one); },
      {"device memory where host memory belongs"});
}

TEST(SimMemory, FindsCopiesOutOfBounds) {
  for (const std::ptrdiff_t offset : {-1, 1, 64, 70}) {
    expectReport(
        [&](Rig& rig) {
          auto* device = static_cast<std::byte*>(rig.device);
          rig.link.copyToDevice(device + offset, rig.host.data(), size, rig.one);
        },
        {"out of the bounds of its allocation of 64 bytes"});
  }
}

TEST(SimMemory, FindsKernelsThatWriteOutOfBounds) {
  for (const std::ptrdiff_t offset : {-256, -1, 64, 255, 256, 511}) {
    expectReport(
        [&](Rig& rig) {
          auto* device = static_cast<std::byte*>(rig.device);
          rig.link.launch(rig.one, [=] { device[offset] = std::byte{1}; }, {}, {{device, size}});
          rig.link.free(device, rig.one);
        },
        {"guard bytes changed"});
  }
}

TEST(SimMemory, FindsWrongFrees) {
  const std::string notAllocated = "frees what is not allocated";
  expectReport([](Rig& rig) { rig.link.free(rig.host.data(), rig.one); }, {notAllocated});
  expectReport(
      [](Rig& rig) {
        rig.link.free(rig.device, rig.one);
        rig.link.free(rig.device, rig.one);
      },
      {notAllocated});
  expectReport([](Rig& rig) { rig.link.free(static_cast<std::byte*>(rig.device) + 1, rig.one); }, {notAllocated});
  expectReport([](Rig& rig) { rig.link.free(rig.device, rig.two); }, {"allocated on another stream"});
}

TEST(SimMemory, KeepsABoundedAmountForReuse) {
  constexpr std::size_t capacity = 4096;
  SimMemory memory(1, capacity);
  SimRandom random(1);
  std::set<void*> addresses;
  for (std::uint64_t sequence = 1; sequence <= 1000; ++sequence) {
    // Sizes that do not fit each other's regions would otherwise all stay.
    const std::size_t bytes = std::size_t{256} << (sequence % 4);
    SimMemory::Region& region = memory.allocate(bytes, 0, hostActor, sequence, random);
    addresses.insert(region.data);
    memory.poisonFresh(region, bytes);
    memory.free(region, sequence);
    EXPECT_TRUE(memory.poisonFreed(region, bytes, region.number));
  }
  std::set<const SimMemory::Region*> kept;
  std::size_t keptBytes = 0;
  for (void* address : addresses) {
    const SimMemory::Region* region = memory.find(address);
    if (region != nullptr && kept.insert(region).second) {
      keptBytes += region->capacity;
    }
  }
  EXPECT_LE(keptBytes, capacity);
  EXPECT_GT(addresses.size(), kept.size());
}

TEST(SimMemory, KeepsNoMoreOfADeviceThatHasMuch) {
  SimMemory memory(1, std::size_t{8} << 30);
  SimRandom random(1);
  std::set<void*> addresses;
  for (std::uint64_t sequence = 1; sequence <= 20'000; ++sequence) {
    SimMemory::Region& region = memory.allocate(4096, 0, hostActor, sequence, random);
    addresses.insert(region.data);
    memory.free(region, sequence);
    memory.poisonFreed(region, 4096, region.number);
  }
  EXPECT_GT(addresses.size(), 1000U);
  EXPECT_LE(addresses.size(), 1025U);
}

} // namespace
} // namespace offload
