// Page-locking that the driver of a real device refuses: no error is left behind, and memory that is pageable instead is copied right.
#ifdef OFFLOAD_WITH_CUDA
#include <cstdlib>

#include "cuda_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = std::size_t{1} << 20;

struct Free {
  void operator()(void* memory) const {
    std::free(memory);
  }
};

/// To the device and back.
Bytes roundTrip(Transfer& transfer, Link& link, const void* host, HostMemory memory) {
  void* const device = link.allocate(kBytes, transfer.deviceBound());
  TokenSet reads;
  const Token there = transfer.toDevice(device, host, kBytes, memory, {}, reads);
  Bytes home(kBytes);
  TokenSet uses;
  transfer.toHost(home.data(), device, kBytes, HostMemory::Pageable, {&there, 1}, uses).wait();
  transfer.drain();
  link.free(device, transfer.deviceBound());
  return home;
}

TEST(CudaRegistration, ARefusalLeavesNoErrorBehind) {
  if (!hasCuda()) GTEST_SKIP() << "no CUDA device";
  const auto link = makeCudaLink(std::make_unique<PlainMemory>());
  EventPool events(*link);
  Transfer transfer(*link, events, 0);
  const std::unique_ptr<void, Free> host(std::aligned_alloc(4096, kBytes));
  std::memcpy(host.get(), pattern(1, kBytes).data(), kBytes);
  ASSERT_TRUE(link->registerHost(host.get(), kBytes));
  EXPECT_FALSE(link->registerHost(host.get(), kBytes)) << "it is locked already";
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_TRUE(roundTrip(transfer, *link, host.get(), HostMemory::Pinned) == pattern(1, kBytes));
  link->unregisterHost(host.get(), kBytes);
  link->unregisterHost(host.get(), kBytes); // which the driver refuses
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_TRUE(roundTrip(transfer, *link, host.get(), HostMemory::Pageable) == pattern(1, kBytes));
}

/// Has the driver itself refuse, as what is asked for is locked already.
class Refused final : public FaultLink {
 public:
  using FaultLink::FaultLink;
  bool registerHost(void* host, std::size_t bytes) override {
    if (!FaultLink::registerHost(host, bytes)) return false;
    const bool again = FaultLink::registerHost(host, bytes);
    FaultLink::unregisterHost(host, bytes);
    refusals += again ? 0 : 1;
    return again;
  }
  int refusals = 0;
};

TEST(CudaRegistration, TheArenaGoesOnWithPageableMemory) {
  if (!hasCuda()) GTEST_SKIP() << "no CUDA device";
  const auto cuda = makeCudaLink(std::make_unique<PlainMemory>());
  Refused link(*cuda);
  EventPool events(link);
  Transfer transfer(link, events, 0);
  Arena arena(&link);
  const HostRange range = arena.allocate(kBytes);
  EXPECT_GT(link.refusals, 0);
  EXPECT_FALSE(range.pinned);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  std::memcpy(range.data, pattern(2, kBytes).data(), kBytes);
  EXPECT_TRUE(roundTrip(transfer, link, range.data, HostMemory::Pageable) == pattern(2, kBytes));
  arena.free(range.data, {});
}

} // namespace
} // namespace offload
#endif
