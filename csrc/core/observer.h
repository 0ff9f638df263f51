// Tells somebody what the cache does.
#pragma once

#include "core/purpose.h"

#include <cstddef>
#include <memory>

namespace offload {

enum class Activity : unsigned char {
  Hit, // a fetch found its bytes on the device
  Fetch, // a fetch did not, and its copy is being enqueued
  Prefetch, // the copy for a fetch that is expected is being enqueued
  WriteBack, // the copy home of a result that the device holds is being enqueued
  Store, // the same for memory that somebody else owns
  Evict, // device memory is given up
  Wait, // the host waits for copies, or for host work, to touch host bytes
  HostWork, // the host computes what need not be done at once
};

struct Observation {
  Activity activity;
  int device; // -1 for a Wait and for HostWork
  const void* host; // where the bytes begin, or would, on the host
  std::size_t bytes;
  Purpose purpose;
  const void* derivedFrom; // see Block
};

/// Called on the thread that does something, with no lock of this library held, so it may ask for statistics. It must not throw, and
/// not fetch, store or lease, nor take the GIL or wait for another thread: that one may wait for the copy which this is about.
/// Evictions may come while PyTorch's allocator holds its lock: no device memory may be asked for.
class Observer {
 public:
  /// Ends with the activity.
  struct Span {
    virtual ~Span() = default;
  };

  virtual ~Observer() = default;
  /// Null where nobody looks at present.
  virtual std::unique_ptr<Span> begin(const Observation& observation) noexcept = 0;
  /// Whoever does host work, a thread that nobody looks at perhaps, is within it meanwhile, and while it copies ahead what that has written.
  virtual std::unique_ptr<Span> enterHostWork() noexcept {
    return nullptr;
  }
};

} // namespace offload
