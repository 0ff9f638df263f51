#include "core/host_copy.h"

#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

namespace offload {
namespace {

constexpr std::size_t kMostThreads = 4;
constexpr std::size_t kPiece = std::size_t{1} << 20;

} // namespace

void copyHost(void* to, const void* from, std::size_t bytes) noexcept {
  static const std::size_t hardware = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t threads = std::clamp<std::size_t>(bytes / kPiece, 1, std::min(kMostThreads, hardware));
  if (threads == 1) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::atomic<std::size_t> next{0};
  inParallel(threads, [&] {
    for (std::size_t begin = next.fetch_add(kPiece); begin < bytes; begin = next.fetch_add(kPiece)) {
      const std::size_t piece = std::min(kPiece, bytes - begin);
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin, piece);
    }
  });
}

} // namespace offload
