#include "core/link/sim_memory.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>

#include "core/error.h"

namespace offload {

namespace {

// In front a whole alignment unit, so that data keeps its alignment; behind, enough for the widest vector store.
constexpr std::size_t guardInFront = SimMemory::alignment;
constexpr std::size_t guardBehind = SimMemory::alignment;
// Of what is free. More would show no more, and is looked through whenever memory is asked for.
constexpr std::size_t mostKept = std::size_t{64} << 20;
constexpr std::size_t mostFree = 1024;

std::size_t roundUp(std::size_t bytes) {
  const std::size_t unit = SimMemory::alignment;
  return std::max(unit, (bytes + unit - 1) / unit * unit);
}

bool holdsOnly(const std::byte* data, std::size_t bytes, unsigned char value) {
  // Comparing the bytes with themselves shifted by one runs at the speed of memcmp.
  return bytes == 0 || (data[0] == std::byte{value} && std::memcmp(data, data + 1, bytes - 1) == 0);
}

} // namespace

SimMemory::Region& SimMemory::allocate(
    std::size_t bytes, int device, std::size_t actor, std::uint64_t oldestPending, SimRandom& random) {
  Device& on = devices_[static_cast<std::size_t>(device)];
  if (bytes > deviceBytes_ || roundUp(bytes) > deviceBytes_ - on.inUse) {
    std::ostringstream text;
    text << "simulated device " << device << " has " << deviceBytes_ << " bytes, of which " << on.inUse << " are in use; "
         << bytes << " more do not fit. Free device memory first.";
    throw OutOfMemory(OutOfMemory::Where::Device, bytes, text.str());
  }
  const std::size_t capacity = roundUp(bytes);
  trim(on, oldestPending);
  Region* region = reuse(on, capacity, actor, random);
  if (region == nullptr) {
    region = &create(device, capacity);
  }
  region->bytes = bytes;
  region->actor = actor;
  region->number = ++allocations_;
  region->live = true;
  region->freeHasRun = false;
  on.inUse += capacity;
  return *region;
}

void SimMemory::free(Region& region, std::uint64_t sequence) {
  Device& on = devices_[static_cast<std::size_t>(region.device)];
  region.live = false;
  region.freedAt = sequence;
  on.inUse -= roundUp(region.bytes);
  on.kept += region.capacity;
  on.free.push_back(&region);
}

SimMemory::Region* SimMemory::reuse(Device& device, std::size_t capacity, std::size_t actor, SimRandom& random) {
  // Mostly memory that was just in use, because that is where a missing order shows; sometimes new memory, as after a growth.
  if (device.kept < keptAtMost() && device.free.size() < mostFree && random.oneIn(4)) {
    return nullptr;
  }
  std::size_t fitting = 0;
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < device.free.size(); ++i) {
    const Region& region = *device.free[i];
    const bool fits = region.capacity >= capacity && region.capacity / 2 <= capacity;
    const bool ordered = region.actor == actor || region.freeHasRun;
    if (fits && ordered && random.oneIn(++fitting)) {
      chosen = i;
    }
  }
  if (fitting == 0) {
    return nullptr;
  }
  Region* region = device.free[chosen];
  device.free.erase(device.free.begin() + static_cast<std::ptrdiff_t>(chosen));
  device.kept -= region->capacity;
  return region;
}

SimMemory::Region& SimMemory::create(int device, std::size_t capacity) {
  Region region;
  region.heap.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, guardInFront + capacity + guardBehind)));
  if (region.heap == nullptr) {
    throw std::bad_alloc();
  }
  region.data = region.heap.get() + guardInFront;
  region.capacity = capacity;
  region.device = device;
  std::memset(region.heap.get(), guardByte, guardInFront);
  const auto key = reinterpret_cast<std::uintptr_t>(region.heap.get());
  return regions_.emplace(key, std::move(region)).first->second;
}

std::size_t SimMemory::keptAtMost() const {
  return std::min(deviceBytes_ / 4, mostKept);
}

void SimMemory::trim(Device& device, std::uint64_t oldestPending) {
  if (device.kept <= keptAtMost()) {
    return;
  }
  std::erase_if(device.free, [&](Region* region) {
    if (!region->freeHasRun || region->freedAt >= oldestPending) {
      return false;
    }
    device.kept -= region->capacity;
    returned_.push_back(region->whole());
    regions_.erase(reinterpret_cast<std::uintptr_t>(region->heap.get()));
    return true;
  });
}

void SimMemory::poisonFresh(Region& region, std::size_t bytes) {
  std::memset(region.data, freshByte, bytes);
  std::memset(region.data + bytes, guardByte, region.capacity - bytes + guardBehind);
}

bool SimMemory::poisonFreed(Region& region, std::size_t bytes, std::uint64_t number) {
  const bool whole = holdsOnly(region.heap.get(), guardInFront, guardByte) &&
      holdsOnly(region.data + bytes, region.capacity - bytes + guardBehind, guardByte);
  std::memset(region.heap.get(), guardByte, guardInFront);
  std::memset(region.data, freedByte, region.capacity);
  if (region.number == number) {
    region.freeHasRun = true;
  }
  return whole;
}

SimMemory::Region* SimMemory::find(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto next = regions_.upper_bound(at);
  if (next == regions_.begin()) {
    return nullptr;
  }
  auto& [begin, region] = *std::prev(next);
  return at < begin + guardInFront + region.capacity + guardBehind ? &region : nullptr;
}

std::optional<std::string> SimMemory::complaint(MemoryRange range) {
  const Region* region = find(range.data);
  if (region == nullptr && foreign_) {
    return std::nullopt;
  }
  if (region == nullptr) {
    return "memory that was never allocated on a device, or went back to the system";
  }
  if (!region->live) {
    return "device memory that was freed";
  }
  const MemoryRange valid{region->data, region->bytes};
  if (range.begin() < valid.begin() || range.bytes > region->bytes ||
      range.begin() - valid.begin() > region->bytes - range.bytes) {
    return "device memory out of the bounds of its allocation of " + std::to_string(region->bytes) + " bytes";
  }
  return std::nullopt;
}

std::string SimMemory::describe(MemoryRange range) {
  std::ostringstream text;
  if (const Region* region = find(range.data)) {
    const auto first = static_cast<std::ptrdiff_t>(range.begin()) - reinterpret_cast<std::ptrdiff_t>(region->data);
    text << "bytes [" << first << ", " << first + static_cast<std::ptrdiff_t>(range.bytes) << ") of allocation "
         << region->number << " of device " << region->device;
  } else {
    text << range.bytes << " host bytes at " << range.data;
  }
  return text.str();
}

} // namespace offload
