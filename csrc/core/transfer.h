// The copy streams of one device.
#pragma once

#include "core/token.h"

#include <atomic>
#include <chrono>
#include <span>

namespace offload {

struct TransferStats {
  std::uint64_t bytesToDevice = 0;
  std::uint64_t bytesToHost = 0;
  std::uint64_t copiesToDevice = 0;
  std::uint64_t copiesToHost = 0;
};

/// One stream for each direction, so that the link carries both at once. Nothing here waits on the host.
class Transfer {
 public:
  /// Each copy waits `delay` on its stream first, for tests.
  Transfer(Link& link, EventPool& events, int device, std::chrono::microseconds delay = {});
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  /// Each runs after all of `after` and returns the token of the copy.
  Token toDevice(void* device, const void* host, std::size_t bytes, std::span<const Token> after);
  Token toHost(void* host, const void* device, std::size_t bytes, std::span<const Token> after);

  /// Where memory that is filled by toDevice() is allocated and given back.
  Stream deviceBound() const noexcept {
    return toDevice_;
  }
  Stream hostBound() const noexcept {
    return toHost_;
  }

  TransferStats stats() const;

 private:
  void sleep(Stream stream);

  Link& link_;
  EventPool& events_;
  const std::chrono::microseconds delay_;
  const Stream toDevice_;
  const Stream toHost_;
  std::atomic<std::uint64_t> bytesToDevice_{0};
  std::atomic<std::uint64_t> bytesToHost_{0};
  std::atomic<std::uint64_t> copiesToDevice_{0};
  std::atomic<std::uint64_t> copiesToHost_{0};
};

} // namespace offload
