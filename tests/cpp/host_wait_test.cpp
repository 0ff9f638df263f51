#include "core/host_wait.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

namespace offload {
namespace {

TEST(HostWait, EveryOneIsCountedWithItsTime) {
  const HostWaitStats before = hostWaitStats();
  hostWait([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  EXPECT_THROW(hostWait([] { throw std::runtime_error("broken off"); }), std::runtime_error);
  const HostWaitStats after = hostWaitStats();
  EXPECT_EQ(after.count, before.count + 2);
  EXPECT_GE(after.time - before.time, std::chrono::milliseconds(20));
}

} // namespace
} // namespace offload
