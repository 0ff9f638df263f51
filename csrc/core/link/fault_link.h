// Fails chosen calls of another link, and counts what has not come back from it.
//
// Note [Injected failures]
// A call that fails has no effect on the link below. Which call fails is its number among those that may: everything but the
// noexcept ones and the ones that only tell. Device memory fails as OutOfMemory, page-locking by refusing, the rest as Error.
#pragma once

#include <cstdint>
#include <mutex>

#include "core/link/link.h"

namespace offload {

enum class Failing {
  Once,
  FromThenOn, ///< A device that is lost.
};

/// What went through a link and has not come back.
struct LinkUse {
  std::int64_t streams = 0;
  std::int64_t events = 0;
  std::int64_t buffers = 0; ///< of device memory
  std::int64_t lockedBytes = 0; ///< of host memory

  friend bool operator==(const LinkUse&, const LinkUse&) = default;
};

class FaultLink : public Link {
 public:
  /// `link` must outlive this.
  explicit FaultLink(Link& link) : link_(link) {}

  /// Lets the `n`-th call from now on fail, 1 being the next; 0 lets none.
  void fail(std::uint64_t n, Failing failing = Failing::Once);
  /// Calls that have failed since fail().
  std::uint64_t failures() const;
  LinkUse use() const;

  int deviceCount() const override {
    return link_.deviceCount();
  }
  std::string name() const override {
    return link_.name();
  }
  Stream createStream(int device) override;
  void destroyStream(Stream stream) noexcept override;
  Event createEvent(int device) override;
  void destroyEvent(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool query(Event event) override;
  void synchronize(Event event) override;
  Event createTimer(int device) override;
  std::optional<double> elapsed(int device, Event from, Event to) override;
  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override;
  void copyAllToDevice(std::span<const Copy> copies, Stream stream) override;
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override;
  void fill(void* device, unsigned char value, std::size_t bytes, Stream stream) override;
  void launchHost(HostTask task, Stream stream) override;
  bool registerHost(void* host, std::size_t bytes) override;
  void unregisterHost(void* host, std::size_t bytes) noexcept override;
  /// Always, so that page-locking is among what fails.
  bool wantsRegistration() const override {
    return true;
  }
  bool readsHostMemory(int device) override {
    return link_.readsHostMemory(device);
  }
  void* allocate(std::size_t bytes, Stream stream) override;
  void free(void* device, Stream stream) noexcept override;
  MemoryInfo memoryInfo(int device) override {
    return link_.memoryInfo(device);
  }
  std::uint64_t captureOf(Stream stream) override;
  void hostAccess(const void* host, std::size_t bytes, Access access) override {
    link_.hostAccess(host, bytes, access);
  }
  void deviceAccess(const void* host, std::size_t bytes, Access access, Stream stream) noexcept override {
    link_.deviceAccess(host, bytes, access, stream);
  }

 private:
  bool failsNow();
  void mayFail(const char* call);
  void count(std::int64_t LinkUse::*of, std::int64_t by) noexcept;

  Link& link_;
  mutable std::mutex mutex_;
  std::uint64_t countdown_ = 0;
  std::uint64_t failures_ = 0;
  Failing failing_ = Failing::Once;
  LinkUse use_;
};

} // namespace offload
