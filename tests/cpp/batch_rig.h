// A link that watches how copies to the device are enqueued, one by one or several at once, and what else that takes, and refuses device
// memory when it is told to.
#pragma once

#include "core_rig.h"

#include <atomic>

namespace offload::core_test {

class BatchLink : public FaultLink {
 public:
  using FaultLink::FaultLink;

  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override {
    {
      const std::lock_guard lock(mutex_);
      singles.push_back(bytes);
    }
    FaultLink::copyToDevice(device, host, bytes, stream);
  }
  void copyAllToDevice(std::span<const Copy> copies, Stream stream) override {
    std::function<void(std::span<const Copy>)> now;
    {
      const std::lock_guard lock(mutex_);
      batches.emplace_back(copies.begin(), copies.end());
      now.swap(meanwhile);
    }
    if (now) now(copies);
    if (failAfter == SIZE_MAX) return FaultLink::copyAllToDevice(copies, stream);
    FaultLink::copyAllToDevice(copies.first(failAfter), stream);
    throw Error("offload: the device was made to fail after some of the copies.");
  }

  void wait(Stream stream, Event event) override {
    ++waits;
    FaultLink::wait(stream, event);
  }
  bool query(Event event) override {
    ++queries;
    return FaultLink::query(event);
  }

  void* allocate(std::size_t bytes, Stream stream) override {
    if (whenAllocating) std::exchange(whenAllocating, nullptr)();
    if (refuses > 0 && --refuses == 0) {
      ++refused;
      throw OutOfMemory(OutOfMemory::Where::Device, bytes, "no memory");
    }
    return FaultLink::allocate(bytes, stream);
  }

  std::vector<std::size_t> singles; // their bytes
  std::vector<std::vector<Copy>> batches;
  std::atomic<std::size_t> waits{0}; // of streams
  std::atomic<std::size_t> queries{0};
  std::function<void(std::span<const Copy>)> meanwhile; // called once, while a batch is being enqueued
  std::function<void()> whenAllocating; // called once, in tests of one thread
  std::size_t failAfter = SIZE_MAX; // copies of a batch
  std::size_t refuses = 0; // the allocation of this number from now on, 1 being the next; in tests of one thread
  std::size_t refused = 0;

 private:
  std::mutex mutex_;
};

} // namespace offload::core_test
