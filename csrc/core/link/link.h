// The one seam to hardware. Everything above it is portable and runs on the simulation in tests.
//
// Note [Link calls and locks]
// A Link call may block, allocate, take the GIL (PyTorch's allocator records Python frames) or call back into this library
// (PyTorch's free-memory callback). Therefore no lock of ours is held across any Link call.
//
// Note [Order]
// Work on one stream runs in the order in which it was enqueued. Between streams only events give order. An event that was never
// recorded counts as having happened. Recording again moves the event to the new place; waits enqueued before keep the old one.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace offload {

/// A stream of one device. A null handle names the device's default stream.
struct Stream {
  int device = 0;
  void* handle = nullptr;
  /// Tells streams apart that have one handle after another, or each in its thread; zero for one that is there for good.
  std::uint64_t id = 0;

  friend bool operator==(const Stream&, const Stream&) = default;
};

/// An event of one device; created and destroyed by the Link only.
using Event = void*;

enum class Access { Read, Write };

/// Host bytes that a host task reads or writes.
struct HostUse {
  const void* data = nullptr;
  std::size_t bytes = 0;
  Access access = Access::Read;
};

/// Bytes of a device.
struct MemoryInfo {
  std::size_t free = 0; // that nobody uses: neither we nor anybody else on it, within the limits that this process has
  std::size_t total = 0; // that this process may use
};

/// One copy of several that are enqueued together.
struct Copy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

/// Work for the host in stream order.
///
/// Note [Host tasks]
/// The driver runs a task on a thread of its own and can neither report a failure nor let it wait. So a task
/// - must not throw: with CUDA that ends the process, and the simulation reports it,
/// - must not call the Link or the driver, wait for a token or take the GIL; nor may the destructors of what it holds.
struct HostTask {
  template <std::invocable Body>
  HostTask(Body body, std::vector<HostUse> touches = {}) : run(std::move(body)), uses(std::move(touches)) {}

  std::function<void()> run;
  /// What `run` reads and writes of the bytes that others use too. Only the simulation looks at it, for races.
  std::vector<HostUse> uses;
};

class Link {
 public:
  virtual ~Link() = default;

  virtual int deviceCount() const = 0;
  virtual std::string name() const = 0;

  virtual Stream createStream(int device) = 0;
  virtual void destroyStream(Stream stream) noexcept = 0;

  virtual Event createEvent(int device) = 0;
  virtual void destroyEvent(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  /// Work enqueued on `stream` from now on runs after `event`. Never blocks the host.
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool query(Event event) = 0;
  /// Blocks the host until `event` has happened. Called through Token::wait() only, which lets go of the GIL.
  virtual void synchronize(Event event) = 0;

  /// An event that tells when it happened, too; null where the link tells no time.
  virtual Event createTimer(int device) = 0;
  /// Seconds from one timer of a device, which has been recorded, to another; none while either has not happened.
  virtual std::optional<double> elapsed(int device, Event from, Event to) = 0;

  virtual void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) = 0;
  /// The same from several places of page-locked memory, to places that don't overlap. The whole is in stream order, and nothing orders
  /// one copy after another. Not for a default stream. Where this throws, some of the copies may be on their way.
  virtual void copyAllToDevice(std::span<const Copy> copies, Stream stream) {
    for (const Copy& copy : copies) copyToDevice(copy.to, copy.from, copy.bytes, stream);
  }
  virtual void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) = 0;
  /// Fills device bytes; used to poison what is free.
  virtual void fill(void* device, unsigned char value, std::size_t bytes, Stream stream) = 0;
  /// Runs `task` on the host in stream order; see Note [Host tasks]. One that is captured is kept for good: for tests alone.
  virtual void launchHost(HostTask task, Stream stream) = 0;

  /// Page-locks host memory for fast copies. Returns false, and leaves no error behind, when the system refuses.
  virtual bool registerHost(void* host, std::size_t bytes) = 0;
  virtual void unregisterHost(void* host, std::size_t bytes) noexcept = 0;
  /// Whether host memory is worth registering at all (not in the simulation, unless it is asked to play that).
  virtual bool wantsRegistration() const = 0;

  /// Whether kernels of a device can read page-locked host memory by its address on the host.
  virtual bool readsHostMemory(int device) = 0;

  /// Device memory whose next use must be on `stream`, or ordered after what is enqueued there now. Aligned to 256 bytes.
  /// Throws OutOfMemory.
  virtual void* allocate(std::size_t bytes, Stream stream) = 0;
  /// Gives back memory of allocate(); what is enqueued on its stream by now may still use it.
  virtual void free(void* device, Stream stream) noexcept = 0;

  virtual MemoryInfo memoryInfo(int device) = 0;

  /// Names the capture of a graph that work on `stream` becomes part of, rather than run; 0 where there is none. Work that is captured
  /// has an event wait for what is captured with it, and nothing else may.
  virtual std::uint64_t captureOf(Stream stream) = 0;
  bool capturing(Stream stream) {
    return captureOf(stream) != 0;
  }
  /// Tells the simulation that the host reads or writes these bytes now; hardware has no use for it.
  virtual void hostAccess(const void* /*host*/, std::size_t /*bytes*/, Access /*access*/) {}
  /// The same of a kernel that has been enqueued on `stream` just now.
  virtual void deviceAccess(const void* /*host*/, std::size_t /*bytes*/, Access /*access*/, Stream /*stream*/) noexcept {}
};

} // namespace offload
