// How long streams of a device stand still for copies.
//
// Note [Stalls]
// A stream that is to run behind a copy gets a timer on each side of its wait. It does nothing else between the two, so the time
// between them is how long it stood still: none where it came there after the copy had landed. Timers are read when somebody asks, or
// when there are many; neither a stream nor the host waits for one. Not counted is what can't be timed, what a graph does, and the wait for
// a copy of less than kLeastBytes: there the host has no time for more calls of the driver, or it would hold the link up.
#pragma once

#include "core/token.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace offload {

struct StallStats {
  std::uint64_t count = 0;
  std::chrono::duration<double> time{0};
};

class StallMeter {
 public:
  /// `link` must outlive this.
  StallMeter(Link& link, int device) : link_(link), device_(device) {}
  ~StallMeter();
  StallMeter(const StallMeter&) = delete;
  StallMeter& operator=(const StallMeter&) = delete;

  /// Makes later work on `stream` run after all of `tokens`, as Token::orderBefore() does. The stream is not being captured.
  void orderBefore(std::span<const Token> tokens, Stream stream);
  /// The same, of a copy of so many bytes.
  void orderBefore(const Token& copy, std::size_t bytes, Stream stream) {
    if (bytes < kLeastBytes) return copy.orderBefore(stream);
    orderBefore(std::span(&copy, 1), stream);
  }
  static constexpr std::size_t kLeastBytes = std::size_t{2} << 20;
  /// Of all that have ended.
  StallStats stats() noexcept;

 private:
  struct Wait {
    Event before = nullptr;
    Event after = nullptr;
  };

  Wait begin(Stream stream) noexcept;
  void end(Wait wait, Stream stream) noexcept;
  void destroy(Wait wait) noexcept;
  void read() noexcept;

  Link& link_;
  const int device_;
  std::mutex mutex_;
  std::vector<Wait> pending_; // whose timers have been recorded
  std::vector<Wait> idle_;
  std::size_t readAt_ = 0; // how many pending ones make it worth while to read them
  StallStats stats_;
};

} // namespace offload
