// Memory of several processes: what they have in common, how it is counted and page-locked, and that it goes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;

std::size_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:torch_offload") != std::string::npos ? 1 : 0;
  }
  return count;
}

unsigned char* bytesOf(const SharedMemory& memory) {
  return static_cast<unsigned char*>(memory.data());
}

TEST(SharedMemory, TwoMappingsHaveBytesAndVersionInCommon) {
  const auto one = SharedMemory::create(10000, Born::Device);
  EXPECT_EQ(Bytes(bytesOf(*one), bytesOf(*one) + 10000), Bytes(10000, 0));
  bytesOf(*one)[9999] = 7;
  EXPECT_EQ(one->bump(), 0U);
  const auto two = SharedMemory::open(dup(one->descriptor()));
  EXPECT_NE(two->data(), one->data());
  EXPECT_EQ(two->bytes(), 10000U);
  EXPECT_EQ(two->born(), Born::Device);
  EXPECT_EQ(bytesOf(*two)[9999], 7);
  EXPECT_EQ(two->version(), 1U);
  bytesOf(*two)[0] = 8;
  EXPECT_EQ(two->bump(), 1U);
  EXPECT_EQ(bytesOf(*one)[0], 8);
  EXPECT_EQ(one->version(), 2U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(two->data()) % kAlignment, 0U);
}

TEST(SharedMemory, GoesWithItsLastMapping) {
  const std::size_t before = descriptors();
  {
    auto one = SharedMemory::create(10000, Born::Host);
    const auto two = SharedMemory::open(dup(one->descriptor()));
    EXPECT_EQ(mappings(), 2U);
    bytesOf(*one)[1] = 3;
    one.reset();
    EXPECT_EQ(bytesOf(*two)[1], 3);
    EXPECT_EQ(mappings(), 1U);
  }
  EXPECT_EQ(mappings(), 0U);
  EXPECT_EQ(descriptors(), before);
}

TEST(SharedMemory, NobodyCanCutItShort) {
  const auto memory = SharedMemory::create(10000, Born::Host);
  EXPECT_NE(ftruncate(memory->descriptor(), 0), 0);
  bytesOf(*memory)[9999] = 1;
}

TEST(SharedMemory, OtherDescriptorsAreRefusedAndClosed) {
  const std::size_t before = descriptors();
  const int device = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_THROW(SharedMemory::open(device), Error);
  const int small = memfd_create("other", MFD_CLOEXEC);
  EXPECT_THROW(SharedMemory::open(small), Error);
  const int large = memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(large, 1 << 16), 0);
  EXPECT_THROW(SharedMemory::open(large), Error);
  EXPECT_THROW(SharedMemory::open(-1), Error);
  EXPECT_EQ(descriptors(), before);
  EXPECT_EQ(mappings(), 0U);
}

TEST(SharedMemory, MoreThanThereIsIsRefused) {
  const std::size_t before = descriptors();
  try {
    SharedMemory::create(std::size_t{1} << 60, Born::Host);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.where(), OutOfMemory::Where::Host);
    EXPECT_NE(std::string(error.what()).find("1152921504606846976"), std::string::npos) << error.what();
  }
  EXPECT_THROW(SharedMemory::create(SIZE_MAX, Born::Host), OutOfMemory);
  EXPECT_EQ(descriptors(), before);
}

class SharedArena : public testing::Test {
 protected:
  ArenaOptions options(std::size_t limit = SIZE_MAX) {
    ArenaOptions options = untouched();
    options.pinnedLimit = limit;
    options.warn = [this](const std::string& sentence) { warnings.push_back(sentence); };
    return options;
  }

  std::vector<std::string> warnings;
  SimLink sim{{.bias = SimBias::Late, .wantsRegistration = true}};
  LockingLink link{sim};
};

TEST_F(SharedArena, IsCountedAndLockedAsAWhole) {
  Arena arena(&link, options());
  auto memory = arena.share(10000, Born::Host);
  const std::size_t whole = memory->mappedBytes();
  EXPECT_GE(whole, 10000U);
  EXPECT_TRUE(memory->pinned);
  EXPECT_EQ(link.locked.at(memory->mapped()), whole);
  EXPECT_EQ(arena.stats().shared, whole);
  EXPECT_EQ(arena.stats().pinned, whole);
  EXPECT_EQ(arena.stats().reserved, 0U);
  auto again = arena.openShared(dup(memory->descriptor()));
  EXPECT_EQ(arena.stats().shared, 2 * whole); // each mapping is a registration of its own
  arena.validate();
  memory.reset();
  again.reset();
  EXPECT_EQ(arena.stats().shared, 0U);
  EXPECT_EQ(arena.stats().pinned, 0U);
  EXPECT_TRUE(link.locked.empty());
  EXPECT_TRUE(warnings.empty());
  arena.validate();
}

TEST_F(SharedArena, PastTheLimitItIsPageableWithOneWarning) {
  Arena arena(&link, options(40000));
  auto one = arena.share(20000, Born::Host);
  EXPECT_TRUE(one->pinned);
  const auto two = arena.share(20000, Born::Host);
  const auto three = arena.share(20000, Born::Host);
  EXPECT_FALSE(two->pinned);
  EXPECT_FALSE(three->pinned);
  EXPECT_EQ(link.attempts, 1);
  EXPECT_EQ(warnings.size(), 1U);
  EXPECT_EQ(arena.stats().pinned, one->mappedBytes());
  one.reset();
  EXPECT_TRUE(arena.share(20000, Born::Host)->pinned); // there is room again
  arena.validate();
}

TEST_F(SharedArena, WhatIsCachedMakesRoom) {
  Arena arena(&link, options(1 << 20));
  arena.free(arena.allocate(900000).data, {});
  EXPECT_GT(arena.stats().pinned, 800000U);
  EXPECT_TRUE(arena.share(900000, Born::Host)->pinned);
  EXPECT_TRUE(warnings.empty());
}

TEST_F(SharedArena, ARefusalOfTheDriverMakesItPageable) {
  Arena arena(&link, options());
  link.capacity = 0;
  const auto memory = arena.share(20000, Born::Host);
  EXPECT_FALSE(memory->pinned);
  EXPECT_EQ(arena.stats().pinned, 0U);
  EXPECT_EQ(arena.stats().shared, memory->mappedBytes());
  EXPECT_EQ(warnings.size(), 1U);
  arena.validate();
}

TEST_F(SharedArena, StaysUntilTheCopiesAreDone) {
  Arena arena(&link, options());
  EventPool pool(link);
  const Stream stream = sim.createStream(0);
  auto memory = arena.share(1000, Born::Host);
  void* const device = sim.allocate(1000, stream);
  sim.copyToHost(memory->data(), device, 1000, stream);
  arena.keepAlive(std::move(memory), {pool.record(stream)});
  EXPECT_EQ(mappings(), 1U);
  EXPECT_EQ(link.locked.size(), 1U);
  sim.drain();
  arena.trim();
  EXPECT_EQ(mappings(), 0U);
  EXPECT_TRUE(link.locked.empty());
  sim.free(device, stream);
}

TEST_F(SharedArena, WhatWasLetGoMakesWayWhereDescriptorsAreShort) {
  const auto inAProcess = [this] {
    Arena arena(&link, options());
    const rlim_t most = descriptors() + 32 + 8; // of which 32 are left to others
    const struct rlimit limit {
      most, most
    };
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
    for (int round = 0; round < 3; ++round) {
      std::vector<std::shared_ptr<SharedMemory>> held;
      try {
        for (;;) held.push_back(arena.share(1000, Born::Host));
      } catch (const OutOfMemory&) {
        return 2;
      } catch (const Error&) {
        if (held.size() < 6) return 3;
      }
      for (auto& memory : held) arena.keepAlive(std::move(memory), {});
    }
    return 0;
  };
  EXPECT_EXIT(std::_Exit(inAProcess()), testing::ExitedWithCode(0), "");
}

TEST_F(SharedArena, WhatIsReceivedAndLetGoGoesBackWithoutAnAllocation) {
  Arena arena(&link, options());
  const auto made = SharedMemory::create(1000, Born::Host);
  for (int k = 0; k < 50; ++k) {
    arena.keepAlive(arena.openShared(dup(made->descriptor())), {});
    EXPECT_LE(arena.stats().shared, 2 * made->mappedBytes());
    arena.keepAlive(arena.share(1000, Born::Host), {});
    EXPECT_LE(arena.stats().shared, 2 * made->mappedBytes());
  }
  EXPECT_LE(link.locked.size(), 2U);
  arena.validate();
}

TEST_F(SharedArena, WhatWasLetGoMakesRoomWithinTheLimit) {
  constexpr std::size_t kLimit = 100'000;
  Arena arena(&link, options(kLimit));
  std::vector<std::shared_ptr<SharedMemory>> all;
  for (int k = 0; k < 4; ++k) {
    all.push_back(arena.share(20'000, Born::Host));
    EXPECT_TRUE(all.back()->pinned);
  }
  for (auto& memory : all) arena.keepAlive(std::move(memory), {});
  EXPECT_TRUE(arena.share(90'000, Born::Host)->pinned);
  EXPECT_TRUE(warnings.empty());
  EXPECT_LE(link.lockedBytes, kLimit);
  arena.validate();
}

} // namespace
} // namespace offload
