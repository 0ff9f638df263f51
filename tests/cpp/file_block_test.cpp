// Blocks whose bytes are a file's: right values in every order, no use of the mapping by a fetch, and errors that are told.
#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "core_rig.h"
#include "test_file.h"

namespace offload {
namespace {

using namespace core_test;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::size_t kOffset = 37;
constexpr std::size_t kBytes = 1000;

CoreOptions smallChunks(std::uint64_t seed, SimBias bias = SimBias::Seeded) {
  CoreOptions options;
  options.sim.seed = seed;
  options.sim.bias = bias;
  options.sim.wantsRegistration = seed % 2 == 1; // chunks that are page-locked, and chunks that are not
  options.cache.chunkBytes = 150;
  options.cache.ringBytes = 4096;
  return options;
}

/// A file of `kOffset` bytes, the Block's bytes, and as many of a neighbour's.
struct OnFile {
  explicit OnFile(const CoreOptions& options)
      : contents(pattern(1, kOffset + 2 * kBytes)),
        disk(contents),
        descriptor(FailingReads::lowestFree()),
        file(std::make_shared<File>(disk.path())),
        rig(options),
        block(rig.fileBlock(file, kOffset, kBytes)),
        neighbour(rig.fileBlock(file, kOffset + kBytes, kBytes)) {}

  Bytes part(std::size_t begin, std::size_t bytes) const {
    const auto from = contents.begin() + static_cast<std::ptrdiff_t>(kOffset + begin);
    return {from, from + static_cast<std::ptrdiff_t>(bytes)};
  }
  Bytes fetched(Block& from, Extent extent) {
    const Pin pin = rig.cache.fetch(from, extent, stream);
    const auto seen = rig.readOnDevice(stream, pin.data(), extent.bytes());
    rig.sim.drain();
    return *seen;
  }
  std::string messageOf(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing was thrown";
  }

  const Bytes contents;
  const TestFile disk;
  const int descriptor;
  std::shared_ptr<File> file;
  Rig rig;
  Rig::BlockPtr block;
  Rig::BlockPtr neighbour;
  Stream stream = rig.sim.createStream(0);
};

void onEverySeed(const std::function<void(OnFile&)>& body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    OnFile on(smallChunks(seed));
    ASSERT_NO_THROW(body(on)) << "seed " << seed;
    ASSERT_NO_THROW(on.rig.sim.drain()) << "seed " << seed;
    on.rig.cache.validate(*on.block);
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(FileBlock, AFetchReadsTheFileAndNotTheMapping) {
  onEverySeed([](OnFile& on) {
    ASSERT_EQ(mprotect(on.file->mapping(), on.contents.size(), PROT_NONE), 0);
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
    EXPECT_EQ(on.fetched(*on.neighbour, {256, 777}), on.part(kBytes + 256, 521));
    EXPECT_EQ(on.rig.arena.stats().allocated, 0U);
  });
}

TEST(FileBlock, AHitReadsNothing) {
  OnFile on(smallChunks(1));
  on.fetched(*on.block, {0, kBytes});
  const auto before = on.rig.cache.transferStats(0).bytesToDevice;
  EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
  EXPECT_EQ(on.rig.cache.transferStats(0).bytesToDevice, before);
}

TEST(FileBlock, WhatWasEvictedIsReadAgain) {
  onEverySeed([](OnFile& on) {
    for (int round = 0; round < 3; ++round) {
      EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
      on.rig.cache.emptyCache(0);
    }
    EXPECT_EQ(on.rig.cache.stats(0).hits, 0U);
  });
}

TEST(FileBlock, ManyFetchesShareTheChunksInOrder) {
  onEverySeed([](OnFile& on) {
    std::vector<std::pair<Extent, std::shared_ptr<Bytes>>> seen;
    for (std::size_t begin = 0; begin < kBytes; begin += 256) {
      const Extent extent{begin, kBytes};
      for (Block* block : {on.block.get(), on.neighbour.get()}) {
        const Pin pin = on.rig.cache.fetch(*block, extent, on.stream);
        const std::size_t at = begin + (block == on.neighbour.get() ? kBytes : 0);
        seen.emplace_back(Extent{at, at + extent.bytes()}, on.rig.readOnDevice(on.stream, pin.data(), extent.bytes()));
      }
    }
    on.rig.sim.drain();
    for (const auto& [extent, bytes] : seen) EXPECT_EQ(*bytes, on.part(extent.begin, extent.bytes()));
  });
}

TEST(FileBlock, DeviceCopiesAreAlignedWhateverThePlaceInTheFile) {
  OnFile on(smallChunks(1));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(on.rig.cache.fetch(*on.block, {0, 10}, on.stream).data()) % kAlignment, 0U);
  const Pin inside = on.rig.cache.fetch(*on.block, {300, 310}, on.stream);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(inside.data()) % kAlignment, 300 % kAlignment);
  on.rig.write(*on.block, {9}); // which changes nothing about that
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(on.rig.cache.fetch(*on.block, {0, 10}, on.stream).data()) % kAlignment, 0U);
}

TEST(FileBlock, TheHostReadsThroughTheMapping) {
  onEverySeed([](OnFile& on) {
    EXPECT_EQ(on.rig.read(*on.block), on.part(0, kBytes));
    EXPECT_TRUE(on.block->file->inFile());
  });
}

TEST(FileBlock, AWriteIsFetchedAndNeverReachesTheFile) {
  onEverySeed([](OnFile& on) {
    const Pin before = on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream);
    const auto old = on.rig.readOnDevice(on.stream, before.data(), kBytes);
    on.rig.write(*on.block, pattern(2, 100), 450);
    Bytes expected = on.part(0, kBytes);
    const Bytes written = pattern(2, 100);
    std::copy(written.begin(), written.end(), expected.begin() + 450);
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), expected);
    EXPECT_EQ(*old, on.part(0, kBytes));
    EXPECT_EQ(on.rig.read(*on.block), expected);
    EXPECT_EQ(on.fetched(*on.neighbour, {0, kBytes}), on.part(kBytes, kBytes));
    EXPECT_EQ(on.rig.read(*on.neighbour), on.part(kBytes, kBytes));
    EXPECT_EQ(on.disk.contents(), on.contents);
  });
}

class FileBlockOfJobs : public testing::TestWithParam<HostJobs::When> {};
INSTANTIATE_TEST_SUITE_P(
    Whenever, FileBlockOfJobs, testing::Values(HostJobs::When::AtOnce, HostJobs::When::Wanted, HostJobs::When::Soon),
    [](const auto& info) {
      return info.param == HostJobs::When::AtOnce ? "AtOnce" : info.param == HostJobs::When::Wanted ? "Wanted" : "Soon";
    });

TEST_P(FileBlockOfJobs, WhatIsWrittenLaterIsFetchedAndNeverReachesTheFile) {
  CoreOptions options = smallChunks(1);
  options.cache.hostJobs = GetParam();
  OnFile on(options);
  EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
  Block& to = *on.block;
  const Block& from = *on.neighbour;
  on.rig.cache.runLater({{&to, Access::Write}, {on.neighbour.get(), Access::Read}}, [&] {
    EXPECT_FALSE(to.file->inFile()) << "what is written to has memory of its own";
    EXPECT_TRUE(from.file->inFile()) << "what is only read needs none";
    std::memcpy(to.data, from.data, kBytes);
  });
  EXPECT_EQ(on.fetched(to, {0, kBytes}), on.part(kBytes, kBytes)) << "not the copy that there was";
  EXPECT_EQ(on.fetched(*on.neighbour, {0, kBytes}), on.part(kBytes, kBytes));
  EXPECT_EQ(on.disk.contents(), on.contents);
  on.disk.cutTo(0);
  EXPECT_EQ(on.rig.read(to), on.part(kBytes, kBytes)) << "it is the file's no more";
}

TEST_P(FileBlockOfJobs, WorkOnAFileThatWasCutShortIsNotBegun) {
  for (const Access access : {Access::Read, Access::Write}) {
    CoreOptions options = smallChunks(1);
    options.cache.hostJobs = GetParam();
    OnFile on(options);
    const auto other = on.rig.newBlock(pattern(2, kBytes));
    on.disk.cutTo(kOffset);
    bool done = false;
    const std::vector<Residency::Claim> claims{{other.get(), Access::Write}, {on.block.get(), access}};
    EXPECT_THAT(on.messageOf([&] { on.rig.cache.runLater(claims, [&done] { done = true; }); }), HasSubstr("chang"));
    on.rig.cache.finishJobs();
    EXPECT_FALSE(done);
    EXPECT_EQ(other->issuing + other->claims + on.block->issuing + on.block->claims, 0) << "and nobody waits for it";
    EXPECT_EQ(on.rig.read(*other), pattern(2, kBytes));
  }
}

TEST(FileBlock, AResultIsStoredInto) {
  onEverySeed([](OnFile& on) {
    const DeviceBuffer result = on.rig.newResult(on.stream, pattern(3, 300));
    on.rig.cache.store(*on.block, {500, 800}, result.data, on.stream);
    Bytes expected = on.part(0, kBytes);
    const Bytes stored = pattern(3, 300);
    std::copy(stored.begin(), stored.end(), expected.begin() + 500);
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), expected);
    EXPECT_EQ(on.rig.read(*on.block), expected);
    EXPECT_EQ(on.disk.contents(), on.contents);
  });
}

TEST(FileBlock, AnAdoptedResultComesHomeIntoIt) {
  onEverySeed([](OnFile& on) {
    on.rig.cache.adopt(*on.block, on.rig.newResult(on.stream, pattern(4, kBytes)), on.stream);
    on.rig.cache.emptyCache(0);
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), pattern(4, kBytes));
    EXPECT_EQ(on.rig.read(*on.block), pattern(4, kBytes));
  });
}

TEST(FileBlock, WhatTheHostHasWrittenOutlivesTheFile) {
  OnFile on(smallChunks(3));
  on.rig.write(*on.block, {9, 9, 9}, 600);
  on.disk.cutTo(0);
  Bytes expected = on.part(0, kBytes);
  std::fill_n(expected.begin() + 600, 3, static_cast<unsigned char>(9));
  EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), expected);
  EXPECT_EQ(on.rig.read(*on.block), expected);
}

TEST(FileBlock, WhatWasWrittenGoesWithItsBlockAndNotItsNeighbour) {
  constexpr std::size_t kEach = 100'000; // no multiple of a page
  const Bytes contents = pattern(5, 2 * kEach);
  const TestFile disk(contents);
  auto file = std::make_shared<File>(disk.path());
  auto one = std::make_unique<FileBytes>(file, 0, kEach);
  FileBytes other(file, kEach, kEach);
  one->prepare(Access::Write);
  other.prepare(Access::Write);
  std::memset(one->data(), 1, kEach);
  std::memcpy(other.data(), pattern(6, kEach).data(), kEach);
  one.reset();
  const auto* const bytes = reinterpret_cast<unsigned char*>(file->mapping());
  EXPECT_EQ(bytes[kEach / 2], 0) << "a page of zeros, which takes no memory";
  EXPECT_EQ(bytes[kEach - 1], 1) << "is in the neighbour's page";
  EXPECT_EQ(Bytes(bytes + kEach, bytes + 2 * kEach), pattern(6, kEach));
  EXPECT_EQ(disk.contents(), contents);
}

TEST(FileBlock, WhatWasMarkedAsWrittenStaysWhenItsNeighbourIsWritten) {
  OnFile on(smallChunks(3));
  {
    const HostLease lease = on.rig.cache.lease(*on.block, Access::Read);
    std::memcpy(lease.data(), pattern(2, kBytes).data(), kBytes);
    on.rig.cache.markWritten(*on.block);
  }
  on.rig.write(*on.neighbour, pattern(3, 100));
  EXPECT_EQ(on.rig.read(*on.block), pattern(2, kBytes));
  EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), pattern(2, kBytes));
  Bytes expected = on.part(kBytes, kBytes);
  const Bytes written = pattern(3, 100);
  std::copy(written.begin(), written.end(), expected.begin());
  EXPECT_EQ(on.fetched(*on.neighbour, {0, kBytes}), expected);
  EXPECT_EQ(on.disk.contents(), on.contents);
}

TEST(FileBlock, AFileThatWasCutShortIsAnErrorOfEveryAccess) {
  OnFile on(smallChunks(3));
  on.disk.cutTo(kOffset + 20);
  const std::vector<std::function<void()>> accesses{
      [&] { on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream); }, [&] { on.rig.cache.lease(*on.block, Access::Read); },
      [&] { on.rig.cache.lease(*on.block, Access::Write); },
      [&] { on.rig.cache.store(*on.block, {0, 10}, on.rig.newResult(on.stream, pattern(3, 10)).data, on.stream); }};
  for (const auto& access : accesses) {
    EXPECT_THAT(
        on.messageOf(access), AllOf(HasSubstr(on.disk.path()), HasSubstr("had 2037 bytes when it was opened and has 57 now")));
    on.rig.cache.validate(*on.block);
  }
  EXPECT_EQ(on.block->version, 0U);
  // The rest goes on.
  const auto other = on.rig.newBlock(pattern(5, 64));
  EXPECT_EQ(on.fetched(*other, {0, 64}), pattern(5, 64));
  EXPECT_NO_THROW(on.rig.cache.drain(false));
}

TEST(FileBlock, AReadThatFailsLaterGivesNaNAndOneError) {
  const std::vector<std::pair<const char*, std::function<void(OnFile&, Block&)>>> calls{
      {"fetch", [](OnFile& on, Block& other) { on.rig.cache.fetch(other, {0, 64}, on.stream); }},
      {"lease", [](OnFile& on, Block& other) { on.rig.cache.lease(other, Access::Read); }},
      {"drain", [](OnFile& on, Block& /*other*/) { on.rig.cache.drain(false); }},
      {"close", [](OnFile& on, Block& /*other*/) { on.rig.cache.drain(true); }}};
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    OnFile on(smallChunks(2, SimBias::Late));
    const auto other = on.rig.newBlock(pattern(5, 64));
    std::shared_ptr<Bytes> seen;
    {
      const Pin pin = on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream);
      seen = on.rig.readOnDevice(on.stream, pin.data(), kBytes);
      on.disk.cutTo(kOffset + 320); // behind the second of its chunks
      on.rig.sim.drain();
    }
    Bytes expected = on.part(0, kBytes);
    std::fill(expected.begin() + 300, expected.end(), static_cast<unsigned char>(0xFF));
    EXPECT_EQ(*seen, expected);
    EXPECT_THAT(
        on.messageOf([&] { call(on, *other); }),
        AllOf(HasSubstr("of the 150 bytes from byte 337 of " + on.disk.path() + " only 20 could be read"), HasSubstr("NaN")));
    EXPECT_EQ(on.messageOf([&] { call(on, *other); }), "nothing was thrown");
  }
}

TEST(FileBlock, WhatCouldNotBeReadIsNeverAHit) {
  onEverySeed([](OnFile& on) {
    Pin held = on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream);
    const auto seen = on.rig.readOnDevice(on.stream, held.data(), kBytes);
    {
      const FailingReads failing(on.descriptor);
      on.rig.sim.drain();
    }
    if (*seen == on.part(0, kBytes)) return; // this seed had read it by then
    EXPECT_THAT(on.messageOf([&] { on.rig.cache.drain(false); }), HasSubstr("Is a directory"));
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
    held = Pin();
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), on.part(0, kBytes));
    on.rig.cache.emptyCache(0);
    EXPECT_EQ(on.rig.cache.stats(0).slotBytes, 0U);
  });
}

TEST(FileBlock, AFailedReadCostsNothingThatCameAfterIt) {
  onEverySeed([](OnFile& on) {
    { on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream); }
    // Newer than what is being read, and never from the file.
    on.rig.cache.adopt(*on.block, on.rig.newResult(on.stream, pattern(4, kBytes)), on.stream);
    {
      const FailingReads failing(on.descriptor);
      on.rig.sim.drain();
    }
    try {
      on.rig.cache.drain(false);
    } catch (const Error&) {
    }
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), pattern(4, kBytes));
    EXPECT_EQ(on.rig.read(*on.block), pattern(4, kBytes));
    on.rig.write(*on.block, pattern(5, kBytes));
    on.fetched(*on.block, {0, kBytes});
    const auto hits = on.rig.cache.stats(0).hits;
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), pattern(5, kBytes));
    EXPECT_EQ(on.rig.cache.stats(0).hits, hits + 1);
  });
}

TEST(FileBlock, ItMayGoWhileItIsRead) {
  onEverySeed([](OnFile& on) {
    const Pin pin = on.rig.cache.fetch(*on.block, {0, kBytes}, on.stream);
    const auto seen = on.rig.readOnDevice(on.stream, pin.data(), kBytes);
    const Bytes expected = on.part(0, kBytes);
    on.block = on.rig.newBlock(1);
    on.neighbour.reset();
    on.file.reset();
    on.rig.sim.drain();
    EXPECT_EQ(*seen, expected);
  });
}

TEST(FileBlock, AStoreIntoItMayOutliveIt) {
  onEverySeed([](OnFile& on) {
    const DeviceBuffer result = on.rig.newResult(on.stream, pattern(3, kBytes));
    on.rig.cache.store(*on.block, {0, kBytes}, result.data, on.stream);
    on.block = on.rig.newBlock(1);
    on.neighbour.reset();
    on.file.reset();
    on.rig.sim.drain();
  });
}

TEST(FileBlock, ThreadsThatWriteFirstAllWrite) {
  for (int round = 0; round < 20; ++round) {
    OnFile on(smallChunks(static_cast<std::uint64_t>(round)));
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        const HostLease lease = on.rig.cache.lease(*on.block, Access::Write);
        std::memset(static_cast<std::byte*>(lease.data()) + thread * 100, static_cast<int>(thread + 1), 100);
      });
    }
    for (auto& thread : threads) thread.join();
    Bytes expected = on.part(0, kBytes);
    for (std::size_t i = 0; i < 400; ++i) expected[i] = static_cast<unsigned char>(i / 100 + 1);
    EXPECT_EQ(on.fetched(*on.block, {0, kBytes}), expected);
  }
}

} // namespace
} // namespace offload
