// Device memory of the simulation: regions of the host's heap that are handed out like a stream-ordered caching allocator does.
//
// Note [Simulated device memory]
// - What the caller sees changes when it calls: a region is live from allocate() to free(). What the bytes hold changes in
//   stream order: the poisons are operations that the link enqueues and that call poisonFresh() and poisonFreed() here.
// - A region freed on a stream may at once be handed out again on the same stream, where the poisons keep the order. Another
//   stream gets it only after poisonFreed() has run.
// - A region goes back to the heap only when no operation older than its free is pending: younger ones that name it are
//   refused. The heap may hand its addresses out as host memory, so what was remembered of them is to be forgotten then.
// - Bytes are counted in use from allocate() to free(), rounded up to the alignment; memory kept for reuse is not counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/link/sim_random.h"

namespace offload {

struct MemoryRange {
  const void* data = nullptr;
  std::size_t bytes = 0;

  std::uintptr_t begin() const {
    return reinterpret_cast<std::uintptr_t>(data);
  }
  std::uintptr_t end() const {
    return begin() + bytes;
  }
};

class SimMemory {
 public:
  static constexpr std::size_t alignment = 256;
  static constexpr unsigned char freshByte = 0xff; // NaN in every floating-point type
  static constexpr unsigned char freedByte = 0xa5;
  static constexpr unsigned char guardByte = 0xfd;

  struct Region {
    std::unique_ptr<std::byte, decltype(&std::free)> heap{nullptr, &std::free};
    std::byte* data = nullptr;
    std::size_t capacity = 0;
    std::size_t bytes = 0;
    int device = 0;
    std::size_t actor = 0; ///< Whose stream the allocation and its free belong to.
    std::uint64_t number = 0; ///< Of the allocation; a region handed out again gets a new one.
    bool live = false;
    bool freeHasRun = false;
    std::uint64_t freedAt = 0; ///< Sequence number of the free.

    MemoryRange whole() const {
      return {data, capacity};
    }
  };

  /// With `foreign`, device addresses that are not of allocate() are somebody else's and taken as they are.
  SimMemory(int devices, std::size_t deviceBytes, bool foreign = false)
      : deviceBytes_(deviceBytes), foreign_(foreign), devices_(devices) {}

  /// Throws OutOfMemory. `oldestPending` is the sequence number of the oldest operation that has not run.
  Region& allocate(std::size_t bytes, int device, std::size_t actor, std::uint64_t oldestPending, SimRandom& random);
  /// Ranges that have gone back to the heap since the last call.
  std::vector<MemoryRange> takeReturned() {
    return std::exchange(returned_, {});
  }
  void free(Region& region, std::uint64_t sequence);

  /// Fills what `bytes` asked for, and guards the rest of the region.
  void poisonFresh(Region& region, std::size_t bytes);
  /// Returns whether the guards of allocation `number` were whole.
  bool poisonFreed(Region& region, std::size_t bytes, std::uint64_t number);

  /// The region in which `address` lies, its guards included; null for host memory.
  Region* find(const void* address);
  /// Why the range can't be used as device memory; nothing when it can.
  std::optional<std::string> complaint(MemoryRange range);
  std::string describe(MemoryRange range);

  std::size_t bytesFree(int device) const {
    const std::size_t used = bytesInUse(device);
    return used < deviceBytes_ ? deviceBytes_ - used : 0;
  }
  std::size_t bytesInUse(int device) const {
    return devices_[static_cast<std::size_t>(device)].inUse;
  }

 private:
  struct Device {
    std::size_t inUse = 0;
    std::size_t kept = 0;
    std::vector<Region*> free;
  };

  Region* reuse(Device& device, std::size_t capacity, std::size_t actor, SimRandom& random);
  Region& create(int device, std::size_t capacity);
  std::size_t keptAtMost() const;
  void trim(Device& device, std::uint64_t oldestPending);

  std::size_t deviceBytes_;
  bool foreign_;
  std::uint64_t allocations_ = 0;
  std::vector<Device> devices_;
  std::map<std::uintptr_t, Region> regions_; // by the address of their heap block
  std::vector<MemoryRange> returned_;
};

} // namespace offload
