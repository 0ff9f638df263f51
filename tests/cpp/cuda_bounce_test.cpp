// Pageable memory on a real device: whole, in order, and without the caller waiting. Skipped where there is none.
#ifdef OFFLOAD_WITH_CUDA
#include <chrono>
#include <thread>

#include "cuda_rig.h"

namespace offload {
namespace {

using namespace core_test;
using namespace std::chrono_literals;

TEST(CudaBounce, CopiesOfPageableMemoryDoNotWait) {
  if (!hasCuda()) {
    GTEST_SKIP() << "no CUDA device";
  }
  const auto link = makeCudaLink(std::make_unique<PlainMemory>());
  EventPool events(*link);
  Executor sleeper(*link, events, 0);
  Transfer transfer(*link, events, 0);
  const Bytes sent = pattern(1, (std::size_t{50} << 20) + 3);
  void* const device = link->allocate(sent.size(), transfer.deviceBound());
  for (int repeat = 0; repeat < 3; ++repeat) {
    Bytes home(sent.size());
    TokenSet reads;
    TokenSet uses;
    // A caller that waited for what the copies wait for would be late.
    const Token slept = sleeper.submit([] { std::this_thread::sleep_for(500ms); }, {});
    const auto start = std::chrono::steady_clock::now();
    const Token there = transfer.toDevice(device, sent.data(), sent.size(), HostMemory::Pageable, {&slept, 1}, reads);
    const Token back = transfer.toHost(home.data(), device, sent.size(), HostMemory::Pageable, {&there, 1}, uses);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 250ms);
    EXPECT_FALSE(back.done());
    back.wait();
    EXPECT_TRUE(home == sent);
    // Work of later repeats overwrites the device memory.
    back.orderBefore(transfer.deviceBound());
  }
  transfer.drain();
  link->free(device, transfer.deviceBound());
}

} // namespace
} // namespace offload
#endif
