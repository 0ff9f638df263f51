#include "core/host_copy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <system_error>
#include <thread>

namespace offload {
namespace {

constexpr std::size_t kThreads = 4;
// To start a thread takes about as long as to copy a quarter of this.
constexpr std::size_t kBytesPerThread = std::size_t{1} << 20;

} // namespace

void copyHost(void* to, const void* from, std::size_t bytes) noexcept {
  static const std::size_t hardware = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t threads = std::clamp<std::size_t>(bytes / kBytesPerThread, 1, std::min(kThreads, hardware));
  const auto copy = [=](std::size_t begin, std::size_t end) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, end - begin);
  };
  std::array<std::thread, kThreads - 1> others;
  std::size_t mine = bytes; // and what no thread could be had for
  try {
    for (std::size_t i = 0; i + 1 < threads; ++i) {
      const std::size_t share = mine / (threads - i);
      others[i] = std::thread(copy, mine - share, mine);
      mine -= share;
    }
  } catch (const std::system_error&) {
  }
  copy(0, mine);
  for (std::thread& other : others) {
    if (other.joinable()) other.join();
  }
}

} // namespace offload
