// The cache: which extents of which Blocks have device memory, in what order they give it up, and how bytes stay true meanwhile.
//
// Note [Ordering by construction]
// Every access to the bytes of a Block is ordered after the accesses that it must not overtake:
//   copy to a Slot   after copies into the host bytes          (Block::writers)
//   copy home        after its producer, and after copies out of and into the host bytes
//   kernel           after the copy into its Slot               (Slot::ready, on the kernel's own stream)
//   reuse of memory  after the Slot's readers                   (Slot::readers, on the memory's home stream)
//   host access      after Block::writers, to write also after Block::readers (HostLease)
// All but the last are orders between streams; only a HostLease waits on the host.
//
// Note [Locks]
// One mutex guards Blocks and Slots. It is never held across a Link call (link.h), so an operation is: decide under the mutex,
// enqueue without it, publish tokens under it. In between the Block is `issuing`, and whoever must know its tokens waits for that
// to end; it does end, because who issues waits for nobody.
//
// Note [Budget]
// Slots that nothing pins stay in the queue of their device, and are found again, until their bytes are wanted. A fetch never
// waits for a Pin: where all of the ring is pinned it takes more memory, so device bytes stay within
// max(ring, twice the fetch at hand) plus what is pinned. Memory that is given up is reused in stream order, without the host.
#pragma once

#include "core/host_lease.h"
#include "core/pin.h"
#include "core/slot_queue.h"
#include "core/transfer.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace offload {

struct ResidencyOptions {
  /// Device bytes that unpinned and pinned Slots together should stay within, for each device.
  std::size_t ringBytes = std::size_t{512} << 20;
  /// For tests: gives up every Slot at its last unpin, and fills memory that is given up with 0xFF.
  bool evictAtUnpin = false;
  bool poison = false;
  /// For tests: every copy waits this long on its stream first.
  std::chrono::microseconds copyDelay{0};
  /// Memory that is not page-locked is copied in pieces of this size.
  std::size_t chunkBytes = TransferOptions{}.chunkBytes;
};

class Residency {
 public:
  Residency(Link& link, ResidencyOptions options);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  /// The newest bytes of an extent on the device of `stream`, for work enqueued there from now on. Throws OutOfMemory; Error
  /// while the stream is being captured.
  Pin fetch(Block& block, Extent extent, Stream stream);

  /// Makes device memory that `producer` has just written the newest value of the whole Block, without a copy on the device.
  void adopt(Block& block, DeviceBuffer buffer, Stream producer);

  /// Copies an extent home from device memory that somebody else owns. Work enqueued on `producer` later may overwrite it.
  void store(Block& block, Extent extent, const void* device, Stream producer);

  /// See HostLease. The only call here that may wait.
  HostLease lease(Block& block, Access access);

  /// Marks bytes that were changed behind this library's back, under a lease that reads, as written.
  void markWritten(Block& block);

  /// Takes a Block out before it is destroyed; what still uses its host bytes. Never waits.
  std::vector<Token> forget(Block& block) noexcept;

  /// Gives up every Slot of a device that nothing pins; their bytes.
  std::size_t emptyCache(int device);
  /// Waits for every copy of this Residency; afterwards, with `close`, Pins are let go without touching the device.
  void drain(bool close);

  void setRingBytes(std::size_t bytes);
  std::size_t ringBytes() const;
  ResidencyStats stats(int device) const;
  void resetPeaks(int device);
  TransferStats transferStats(int device) const;
  /// Checks every invariant; throws Error with what is broken.
  void validate(const Block& block) const;

 private:
  friend class Pin;
  friend class HostLease;
  using Lock = std::unique_lock<std::mutex>;

  struct Device {
    Device(Link& link, EventPool& events, int index, TransferOptions options) : transfer(link, events, index, options) {}
    Transfer transfer;
    SlotQueue queue;
  };

  Device& device(int index);
  const Device& device(int index) const;
  std::shared_ptr<Slot> find(const Block& block, Extent extent, int device) const;
  void awaitIssued(Lock& lock, const Block& block);
  std::size_t budget(std::size_t bytes) const;
  void retireStale(Block& block, Slots& retired);
  void release(Slots& retired) noexcept;
  void settle() noexcept;
  DeviceBuffer allocate(Device& device, std::size_t bytes);
  void copyIn(Slot& slot, const Block& block, Device& device, const std::vector<Token>& after, Stream stream, TokenSet& reads);
  void unpin(const std::shared_ptr<Slot>& slot, const std::vector<Stream>& streams) noexcept;
  void endLease(Block& block, Access access) noexcept;
  void refuseCapture(Stream stream, const char* what);

  Link& link_;
  EventPool events_;
  mutable std::mutex mutex_;
  std::condition_variable issued_;
  std::size_t ringBytes_;
  const ResidencyOptions options_;
  std::vector<std::unique_ptr<Device>> devices_;
  /// What the Link would not do when it was due, and settle() tries again: unpins on a stream that was being captured, when no
  /// event may be recorded, and memory that could not be ordered after its uses.
  std::vector<std::pair<std::shared_ptr<Slot>, std::vector<Stream>>> deferred_;
  Slots unreleased_;
  bool closed_ = false;
};

} // namespace offload
