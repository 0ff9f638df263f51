// Copies that are enqueued at once, on a real device: whole, in the order of their stream, and right when fetches are expected.
#ifdef OFFLOAD_WITH_CUDA
#include <chrono>
#include <thread>

#include "batch_rig.h"
#include "cuda_rig.h"

namespace offload {
namespace {

using namespace core_test;
using namespace std::chrono_literals;

TEST(CudaBatch, CopiesAtOnceReadTheirSourcesInTheOrderOfTheirStream) {
  if (!hasCuda()) GTEST_SKIP() << "no CUDA device";
  const auto link = makeCudaLink(std::make_unique<PlainMemory>());
  EventPool events(*link);
  Executor sleeper(*link, events, 0);
  Transfer transfer(*link, events, 0);
  Arena arena(link.get());
  const std::vector<std::size_t> sizes{1, 100, (64 << 10) - 1, 64 << 10, (64 << 10) + 3, (256 << 10) + 7, 1 << 20, 2 << 20};
  constexpr std::size_t kPlace = std::size_t{4} << 20;
  auto* const device = static_cast<std::byte*>(link->allocate(kPlace * sizes.size(), transfer.deviceBound()));
  std::vector<HostRange> sources;
  for (const std::size_t bytes : sizes) sources.push_back(arena.allocate(bytes));
  for (std::uint64_t repeat = 0; repeat < 3; ++repeat) {
    std::vector<Copy> copies;
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      ASSERT_TRUE(sources[k].pinned);
      std::memset(sources[k].data, 0xEE, sizes[k]);
      copies.push_back({device + k * kPlace + k, sources[k].data, sizes[k]});
    }
    TokenSet reads;
    const Token slept = sleeper.submit([] { std::this_thread::sleep_for(500ms); }, {});
    std::vector<Bytes> values;
    for (std::size_t k = 0; k < sizes.size(); ++k) values.push_back(pattern(100 * repeat + k, sizes[k]));
    const Token done = transfer.allToDevice(copies, {&slept, 1}, reads);
    EXPECT_FALSE(slept.done());
    EXPECT_FALSE(done.done());
    // They have not been read yet, whatever the call took.
    for (std::size_t k = 0; k < sizes.size(); ++k) std::memcpy(sources[k].data, values[k].data(), sizes[k]);
    EXPECT_FALSE(slept.done()) << "the machine was too slow for this test";
    reads.wait();
    EXPECT_TRUE(done.done());
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      Bytes home(sizes[k]);
      TokenSet uses;
      transfer.toHost(home.data(), device + k * kPlace + k, sizes[k], HostMemory::Pageable, {&done, 1}, uses).wait();
      EXPECT_TRUE(home == values[k]) << sizes[k] << " bytes, repeat " << repeat;
    }
  }
  transfer.drain();
  link->free(device, transfer.deviceBound());
  for (const HostRange& source : sources) arena.free(source.data, {});
}

TEST(CudaBatch, WhatIsExpectedIsCopiedInBatchesAndRight) {
  if (!hasCuda()) GTEST_SKIP() << "no CUDA device";
  const auto cuda = makeCudaLink(std::make_unique<PlainMemory>());
  BatchLink link(*cuda);
  Arena arena(&link);
  ResidencyOptions options = ringOnly();
  options.ringBytes = std::size_t{16} << 20;
  Residency cache(link, options);
  const Stream stream = link.createStream(0);
  const std::vector<std::size_t> sizes{16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20};
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Bytes> values;
  const auto write = [&](std::size_t k, std::uint64_t tag) {
    const HostLease lease = cache.lease(*blocks[k], Access::Write);
    values[k] = pattern(tag, blocks[k]->bytes);
    std::memcpy(lease.data(), values[k].data(), values[k].size());
  };
  for (std::size_t k = 0; k < 60; ++k) {
    const HostRange range = arena.allocate(sizes[k % sizes.size()]);
    ASSERT_TRUE(range.pinned);
    blocks.push_back(std::make_unique<Block>(range.data, sizes[k % sizes.size()], BlockKind::Pinned, Born::Host, 0));
    values.emplace_back();
    write(k, k);
  }
  EventPool events(link);
  for (std::uint64_t step = 0; step < 6; ++step) {
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      const Pin pin = cache.fetch(*blocks[k], {0, blocks[k]->bytes}, stream);
      Bytes home(blocks[k]->bytes);
      link.copyToHost(home.data(), pin.data(), home.size(), stream);
      events.record(stream).wait();
      ASSERT_TRUE(home == values[k]) << "step " << step << ", Block " << k;
    }
    for (std::size_t k = step % 3; k < blocks.size(); k += 7) write(k, 1000 * (step + 1) + k);
  }
  EXPECT_GE(link.batches.size(), 20U);
  EXPECT_GE(cache.stats(0).prefetches, 100U);
  for (auto& block : blocks) arena.free(block->data, cache.forget(*block));
  cache.emptyCache(0);
  cache.drain(true);
  link.destroyStream(stream);
}

} // namespace
} // namespace offload
#endif
