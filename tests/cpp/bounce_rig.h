// What the tests of copies of pageable memory share: a Transfer over a link that watches.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>

#include "core_rig.h"

namespace offload::bounce_test {

using namespace core_test;

inline constexpr std::size_t kChunk = 100;

/// Knows which host memory is page-locked, which the copies used, and whether anybody asked for an event.
class WatchingLink : public FaultLink {
 public:
  using FaultLink::FaultLink;

  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override {
    pageableCopies += !isLocked(host);
    hosts.insert(host);
    FaultLink::copyToDevice(device, host, bytes, stream);
  }
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    pageableCopies += !isLocked(host);
    hosts.insert(host);
    FaultLink::copyToHost(host, device, bytes, stream);
  }
  void launchHost(HostTask task, Stream stream) override {
    if (whenLaunched) whenLaunched();
    FaultLink::launchHost(std::move(task), stream);
  }
  bool query(Event event) override {
    ++asked;
    return FaultLink::query(event);
  }
  void synchronize(Event event) override {
    ++asked;
    FaultLink::synchronize(event);
  }
  bool registerHost(void* host, std::size_t bytes) override {
    ++registrations;
    const bool done = FaultLink::registerHost(host, bytes);
    if (done) locked[static_cast<const std::byte*>(host)] = bytes;
    return done;
  }
  void unregisterHost(void* host, std::size_t bytes) noexcept override {
    EXPECT_EQ(locked.at(static_cast<const std::byte*>(host)), bytes);
    locked.erase(static_cast<const std::byte*>(host));
    FaultLink::unregisterHost(host, bytes);
  }
  bool wantsRegistration() const override {
    return wanted;
  }

  bool isLocked(const void* host) const {
    const auto after = locked.upper_bound(static_cast<const std::byte*>(host));
    return after != locked.begin() && host < std::prev(after)->first + std::prev(after)->second;
  }

  bool wanted = true;
  std::function<void()> whenLaunched;
  int pageableCopies = 0;
  std::set<const void*> hosts;
  int asked = 0;
  int registrations = 0;
  std::map<const std::byte*, std::size_t> locked;
};

struct Bounce {
  explicit Bounce(SimOptions options = {}, bool wanted = true) : sim(options), link(sim), events(link) {
    link.wanted = wanted;
    transfer.emplace(link, events, 0, TransferOptions{.chunkBytes = kChunk});
  }
  ~Bounce() {
    transfer.reset();
    EXPECT_TRUE(link.locked.empty());
    EXPECT_NO_THROW(sim.drain());
  }
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  Token send(void* device, const Bytes& host, std::span<const Token> after = {}) {
    reads = {};
    return transfer->toDevice(device, host.data(), host.size(), HostMemory::Pageable, after, reads);
  }
  Token receive(Bytes& host, const void* device, std::span<const Token> after = {}) {
    uses = {};
    return transfer->toHost(host.data(), device, host.size(), HostMemory::Pageable, after, uses);
  }
  /// Device memory that holds `value` after the token.
  std::pair<void*, Token> newOnDevice(const Bytes& value) {
    void* const data = sim.allocate(value.size(), stream);
    sim.launch(stream, [=] { std::memcpy(data, value.data(), value.size()); }, {}, {{data, value.size()}});
    return {data, events.record(stream)};
  }
  Bytes onDevice(const void* device, std::size_t bytes, const Token& after) {
    Bytes seen(bytes);
    after.orderBefore(stream);
    sim.launch(stream, [&] { std::memcpy(seen.data(), device, bytes); }, {{device, bytes}}, {});
    events.record(stream).wait();
    return seen;
  }
  void* allocate(std::size_t bytes) {
    return sim.allocate(bytes, transfer->deviceBound());
  }

  SimLink sim;
  WatchingLink link;
  EventPool events;
  std::optional<Transfer> transfer;
  Stream stream = sim.createStream(0);
  TokenSet reads;
  TokenSet uses;
};

inline void onEverySeed(const std::function<void(Bounce&)>& body) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Bounce on({.seed = seed});
    ASSERT_NO_THROW(body(on)) << "seed " << seed;
    ASSERT_NO_THROW(on.sim.drain()) << "seed " << seed;
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

} // namespace offload::bounce_test
