// The cache: which extents of which Blocks have device memory, in what order they give it up, and how bytes stay true meanwhile.
//
// Note [Ordering by construction]
// Every access to the bytes of a Block is ordered after the accesses that it must not overtake:
//   copy to a Slot   after copies into the host bytes          (Block::writers)
//   copy home        after its producer, and after copies out of and into the host bytes
//   kernel           after the copy into its Slot               (Slot::ready, on the kernel's own stream)
//   that reads the host's bytes  after copies into them         (Block::writers, on its stream; then it is one of Block::readers)
//   change of a Slot after that, and after the Slot's readers   (updateThere and changeThere, on the stream of the change, then `ready`)
//   reuse of memory  after the Slot's readers                   (Slot::readers, on the memory's home stream)
//   host access      after Block::writers, to write also after Block::readers (HostLease)
// All but the last are orders between streams. The host waits for copies only where host bytes are touched: for a HostLease, for a job, and
// for a write to a Shared Block or beside a lease.
//
// Note [Locks]
// One mutex guards Blocks and Slots. It is never held across a Link call (link.h), so an operation is: decide under the mutex,
// enqueue without it, publish tokens under it. In between the Block is `issuing`, and whoever must know its tokens waits for that
// to end; it does end, because who enqueues waits for nobody, and a job, which counts as one, for copies alone.
//
// Note [Ring and budget]
// A Slot is on one of two accounts. What passes is charged to the ring, and leaves it in the order in which it came, what may be late
// last. What the Schedule wants to stay is charged to the budget, and so is what is newer than the host's bytes (Dirty), but for what the
// write buffer, a part of the ring, has room for (SlotQueue). Slots that nothing pins are found again until their bytes are wanted. A fetch never waits for a Pin: where all of the ring is pinned it takes more memory, so
// device bytes stay within budget + max(ring, twice the largest fetch of a pass) + what is pinned, and what graphs have (staging.h).
// Memory that is given up is reused in stream order, without the host. An automatic budget follows what is free: it is looked at when
// a pass of the Schedule ends and when much has been added; in between PyTorch's allocator asks for memory back by relieve().
//
// Note [Blocks of several processes]
// A Shared Block is never Dirty, and who writes to it waits until the bytes have landed and then counts up the version in the shared
// header (shared_memory.h): when a call returns, another process may be told to read. Versions of Slots stay this process's own. A
// fetch that finds another count in the header than the last one did makes a new version, as a write does. Its own writes count too:
// the Slots that were made while one landed may lack what others wrote then. Writes of several processes at once have no order;
// each is followed by a count, so whatever they leave in memory is what later fetches get.
#pragma once

#include "core/audit.h"
#include "core/captured_fetches.h"
#include "core/device_lease.h"
#include "core/host_jobs.h"
#include "core/host_lease.h"
#include "core/observer.h"
#include "core/pin.h"
#include "core/schedule.h"
#include "core/slot_queue.h"
#include "core/stall_meter.h"
#include "core/transfer.h"

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

namespace offload {

struct ResidencyOptions {
  /// Device bytes for what is passing through, for each device.
  std::size_t ringBytes = std::size_t{512} << 20;
  /// Device bytes beside the ring for what stays on the device and what is newer there; none: what is free, but for the headroom.
  std::optional<std::size_t> budgetBytes;
  std::size_t headroomBytes = std::size_t{1} << 30;
  /// Of what the process may use of a device the headroom is no more than this part.
  double headroomShare = 1;
  /// Whether somebody chose ringBytes; then a fetch that it is too small for is worth a word.
  bool ringIsSet = false;
  /// Called with one sentence, at most once, not under a lock.
  std::function<void(const std::string&)> warn;
  /// How long to go by what was free before it is asked again, at least; zero: not at all.
  std::chrono::microseconds lookInterval{5000};
  /// Copies what the Schedule expects next ahead of its fetch.
  bool prefetch = true;
  /// Of these, extents of page-locked memory that are no larger than this are copied together, so many bytes of them at a time; those
  /// that are no smaller than batchLeast, in one call of the Link.
  std::size_t batchLeast = TransferOptions{}.leastAtOnce;
  std::size_t batchMost = std::size_t{2} << 20;
  std::size_t batchBytes = std::size_t{8} << 20;
  /// The part of the ring in which results wait that the budget has no room for; what dies there never crosses the link. None with a
  /// budget of zero.
  double writeBufferShare = 0;
  /// For tests: gives up every Slot at its last unpin; fills memory that is given up with 0xFF, and has the bytes come back elsewhere.
  bool evictAtUnpin = false;
  bool poison = false;
  /// For tests: checks every invariant after every public call, and ends the process where one is broken.
  bool validate = false;
  /// For tests: every copy waits this long on its stream first.
  std::chrono::microseconds copyDelay{0};
  /// Memory that is not page-locked is copied in pieces of this size.
  std::size_t chunkBytes = TransferOptions{}.chunkBytes;
  /// When host work is done that need not be done at once.
  HostJobs::When hostJobs = HostJobs::When::Soon;
  /// Is told what happens; null: nobody is. It must outlive the Residency.
  Observer* observer = nullptr;
};

/// Throws Error.
void requireWithin(const Block& block, Extent extent);
HostMemory memoryOf(const Block& block);

class Residency {
 public:
  Residency(Link& link, ResidencyOptions options);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  /// The newest bytes of an extent on the device of `stream`, for work enqueued there from now on, or captured: Note [Captured fetches].
  /// Throws OutOfMemory; Error while a graph is being captured that nobody has told of, or where the bytes are not page-locked.
  Pin fetch(Block& block, Extent extent, Stream stream);

  /// Copies these bytes to the device of `stream`, where they are not there, for a fetch to find as long as the Pin is held. Its memory
  /// is not for use: nothing waits for the copy.
  Pin fetchAhead(Block& block, Extent extent, Stream stream);

  /// The owner of an adopted result's memory back from the cache, where the Block is gone, there is no other Pin, and all that uses
  /// the memory is on `stream`, as its home is. The Pin then holds nothing. Null otherwise, and nothing has happened.
  std::shared_ptr<void> takeBack(Pin& pin, Stream stream);

  /// The Block that the Pin's bytes are the newest of, and one more of its owners; null where it was written to since, or is gone.
  Block* retainSource(const Pin& pin);

  /// Makes device memory that `producer` has just written the newest value of the whole Block, without a copy on the device. It
  /// goes home when its room is wanted or the host asks, gradients by Note [When a gradient goes home]; at once where the Block is
  /// Shared, or goesHome. An empty Block keeps nothing of it.
  void adopt(Block& block, DeviceBuffer buffer, Stream producer);

  /// Gives up what of this purpose is on its way home, or was, until that is no more than `most` bytes of a device. What is enqueued
  /// from now on where it was made follows those copies.
  void giveUpLeaving(int device, Purpose purpose, std::size_t most);

  /// Copies an extent home from device memory that somebody else owns. Work enqueued on `producer` later may overwrite it.
  void store(Block& block, Extent extent, const void* device, Stream producer);

  /// From now on fetches on streams that are captured with `stream` become part of what is returned, as long as somebody keeps it.
  std::shared_ptr<CapturedFetches> beginCapture(Stream stream, CapturedFetches::Keep keep);
  /// To be called when the capture has ended, or failed to.
  void endCapture(CapturedFetches& graph);
  /// To be called right before a graph is launched on `stream`, by whom calls endReplay() right after, whether it was or not.
  void beginReplay(const CapturedFetches& graph, Stream stream);
  void endReplay(const CapturedFetches& graph, Stream stream);
  bool isCaptured(Stream stream) {
    return link_.capturing(stream);
  }
  /// Throws Error where that is so.
  void refuseCapture(Stream stream, const char* what);

  /// See HostLease. Waits for copies; so do drain(), writes to a Shared Block or while somebody has a lease, and a store that is the
  /// first write to bytes of a file. Whatever needs a Block's tokens waits for jobs on it.
  HostLease lease(Block& block, Access access);

  /// See DeviceLease; `reads` bytes of the extent will be read, for statistics. An empty one where a fetch is due: where a Slot of that
  /// device has the newest bytes, or one of any device is Dirty, the memory is not page-locked, the device can't read it, or the stream is being captured.
  DeviceLease leaseToDevice(Block& block, Extent extent, Stream stream, std::size_t reads);

  struct Claim {
    Block* block;
    Access access;
  };
  /// Has `work` done on host bytes as under leases of these Blocks, each of which is named once: at once or later, by Note [Host jobs].
  /// Where anybody has a lease on one, or it is Shared, that is at once. `work` keeps the Blocks alive, and neither calls this library
  /// nor takes the GIL; what it throws later does whoever waits for it, or the next fetch, lease or drain.
  void runLater(std::vector<Claim> claims, std::function<void()> work);
  /// Waits for all such work.
  void finishJobs() {
    jobs_.drain();
  }

  /// Has `work` change whole Blocks, as runLater() does, in the cache of the device of `stream`: it is given their addresses there, in
  /// the order of the claims, and enqueues on `stream` what reads and writes them; before it has, it may throw OutOfMemory. What it may
  /// write to goes home, and stays: Note [Guests]. False, and no byte has changed, where not all of them are there or find room, or
  /// somebody else uses what is to be written, or is to.
  bool updateThere(const std::vector<Claim>& claims, Stream stream, const std::function<void(const std::vector<void*>&)>& work);

  /// Has `work` change a part of a Block's newest bytes where the cache of the device of `stream` has all of them, for what adopt() would
  /// make of the whole: it is given their address and who else's the memory is (DeviceBuffer::owner), enqueues on `stream` what changes
  /// them, and calls nothing here; or returns false and does not. False, and no byte has changed, also where they are not there, or
  /// somebody has a Pin or a lease, or the Block is Shared. The caller keeps the Block. A failure leaves what the work has made of them.
  bool changeThere(Block& block, Stream stream, const std::function<bool(void* data, void* owner)>& work);

  /// Orders `stream` after all that reads the device bytes of a Pin, copies home among it: for who is about to change them. What is on
  /// the device alone does not go home to make room until it is unpinned. The caller keeps the Block.
  void beforeChange(const Pin& pin, Stream stream);

  /// Copies home what work on `producer` has written to the device bytes that a fetch gave, and makes these the newest; nothing where
  /// the Block was written to since by anybody else, or is about to be. The caller keeps the Block: retainSource().
  void bringHome(const Pin& pin, Stream producer);

  /// The version of the newest bytes, once all jobs on the Block are done; none where the host does not have them.
  std::optional<std::uint64_t> awaitVersion(Block& block);
  /// That of the bytes which a job reads, for `work` to ask.
  std::uint64_t versionOf(const Block& block) const;

  /// Marks bytes that were changed behind this library's back, under a lease that reads, as written.
  void markWritten(Block& block);

  /// Takes a Block out before it is destroyed; what still uses its host bytes. Never waits.
  std::vector<Token> forget(Block& block) noexcept;

  /// Gives up every Slot of a device that nothing pins; their bytes. Dirty ones are sent home first.
  std::size_t emptyCache(int device);
  /// Returns the host memory of the rings that pageable memory is copied through, after waiting for its last uses.
  void trimRings();
  /// Gives up Slots that are Clean and that nothing pins until `free` and their bytes make what is demanded; their bytes. Memory that is
  /// PyTorch's own goes a little later, and does not count. Where another thread is busy here for long it gives nothing; it never waits
  /// for the device or the GIL, and allocates no device memory: for PyTorch's allocator, which calls this while it holds its own lock and
  /// does not say how much it wants. Called now and then it gives `most`, for as often as it is called in that pass; called in every pass
  /// it gives `usual`, and an automatic budget leaves that much free from then on, and no more than `kept`, while it is called.
  std::size_t relieve(int device, std::size_t free, std::size_t usual, std::size_t most, std::size_t kept = SIZE_MAX) noexcept;
  /// The same for a request of so many bytes, which has been refused. What is free is looked at before anything new stays.
  std::size_t relieveOf(int device, std::size_t bytes) noexcept;
  /// Waits for every copy of this Residency, and for all that has read host bytes by lease; afterwards, with `close`, Pins are let go
  /// without touching the device. Throws what no other call has told yet of copies that have failed meanwhile.
  void drain(bool close);

  void setRingBytes(std::size_t bytes);
  std::size_t ringBytes() const;
  /// None: automatic.
  void setBudget(std::optional<std::size_t> bytes);
  /// As of the last look at what is free, of which this is the first where there has been none.
  std::size_t budget(int device);
  ResidencyStats stats(int device) const;
  void resetPeaks(int device);
  void resetEver(int device);
  TransferStats transferStats(int device) const;
  StallStats stallStats(int device);
  HostJobStats hostJobStats() {
    return jobs_.stats();
  }
  /// Checks every invariant, of all Slots and their Blocks, or of one Block; throws Error with what is broken.
  void validate() const;
  void validate(const Block& block) const;

 private:
  friend class Pin;
  friend class HostLease;
  friend class DeviceLease;
  using Lock = std::unique_lock<std::mutex>;

  struct Device {
    Device(Link& link, EventPool& events, int device, TransferOptions options)
        : index(device), transfer(link, events, device, options), stalls(link, device) {}
    const int index;
    Transfer transfer;
    StallMeter stalls;
    SlotQueue queue;
    Schedule schedule;
    std::size_t ring = 0; // the bytes that may pass, as of the last fetch that found nothing, or the last pass
    std::size_t largest = 0; // of this pass's fetches
    std::size_t budget = 0;
    std::size_t planned = 0; // what of the budget the plan was made for
    std::size_t room = 0; // what of it is left to results
    std::size_t results = 0; // the most that they have had in this pass
    std::size_t resultsBefore = 0; // and in the one before
    std::uint64_t passBegan = 0; // after how many fetches
    std::uint64_t passBeforeBegan = 0; // and the one before
    std::size_t unused = 0; // bytes of results that nobody had used in these two
    std::uint64_t unusedAt = 0; // as of so many fetches
    std::size_t lookAt = 0; // how many bytes on the budget's account make another look due
    bool lookDue = true;
    std::chrono::steady_clock::time_point lastLook{};
    std::chrono::nanoseconds lookInterval{0}; // by what a look has cost
    std::size_t demand = 0; // what PyTorch's allocator has asked for of late
    int quiet = INT_MAX / 2; // passes since it has asked
    bool generous = false; // as of when it has
    std::uint64_t horizon = 0; // the number of the last fetch that has been looked after ahead of it
    std::uint64_t unwritten = 0; // the first one before it that awaits a write of the host; 0: none
    std::uint64_t patience = 1; // how many fetches must have come as expected before a copy is made ahead
    bool lent = false; // to an idle link, some of the other half of the ring
    std::uint64_t lendsFrom = 0; // the number of the fetch from which on that may be
    std::uint64_t pause = 0; // how long it might not, last time
    std::uint64_t wrongGuesses = 0; // that `patience` has been told of
    std::uint64_t wrongCopies = 0; // and copies
    std::uint64_t followed = 0; // the number of the last fetch that `steady` has been told of
    int steady = 0; // how well the order could be foretold of late
    Token lastCopy; // of the last copy to the device
    TokenSet readers; // of host bytes, by lease
    std::shared_ptr<Staging> staging; // from the first capture of a graph on, as is the next
    std::shared_ptr<HeldCopies> held;
  };

  /// What is to be copied ahead of its fetch; or, where only the half of the ring stands in the way, the copy with whose end the link
  /// has nothing to do.
  struct Ahead {
    std::vector<Pin> batch;
    std::optional<Token> lastCopy;
  };

  /// A Slot, and the Block that it is about to get its bytes from.
  struct Copying {
    std::shared_ptr<Slot> slot;
    Block* block;
  };

  /// What has been retired under the mutex is released once that is not held, although something is thrown: declared before the lock.
  struct ReleaseAtEnd {
    Residency& residency;
    Slots& retired;
    ~ReleaseAtEnd() {
      residency.release(retired);
    }
  };

  // Tokens of streams that come and go don't imply each other; what is done is forgotten where a set has more.
  static constexpr std::size_t kManyTokens = 64;

  Device& device(int index);
  const Device& device(int index) const;
  void awaitIssued(Lock& lock, const Block& block);
  Pin fetchCaptured(Block& block, Extent extent, Stream stream, std::uint64_t id);
  Pin copyToDevice(
      Lock& lock, Device& dev, Block& block, Extent extent, const StreamSet& streams, Slots& retired, bool* tooLarge);
  std::shared_ptr<Slot> awaitNewest(Lock& lock, Block& block, Extent extent, int device);
  std::shared_ptr<Slot> takeResult(Device& device, const Block& block, DeviceBuffer buffer);
  Lock lockSoon() const noexcept;
  std::size_t giveBack(Lock& lock, Device& device, std::size_t bytes) noexcept;
  std::shared_ptr<Slot> dirtyOf(const Block& block) const;
  void writeHome(Lock& lock, const std::shared_ptr<Slot>& slot);
  void sendAllHome(Lock& lock, std::span<const Block* const> blocks, bool behindJobs);
  bool tryWriteHome(Lock& lock, const std::shared_ptr<Slot>& slot) noexcept;
  void spill(Lock& lock, Device& device, bool all = false) noexcept;
  bool stayDirty(const std::shared_ptr<Slot>& slot, Block& block, const Token& written);
  void forsake(const std::shared_ptr<Slot>& slot, const Block& block, Stream producer) noexcept;
  bool isLastWrite(const Block& block) const;
  static bool isAddend(const Block& block);
  static bool isWithin(const Device& device);
  static std::size_t roomForResults(const Device& device);
  static bool fits(const Device& device, std::size_t bytes);
  static void keepRoom(Device& device);
  void makeRoomForResult(Lock& lock, Device& device, Slots& retired) noexcept;
  void findRoomFor(Lock& lock, Device& device, const std::shared_ptr<Slot>& slot, bool leased, Slots& retired);
  void expectRead(Block& block);
  void follow(Device& device);
  void keepExpected(Device& device);
  bool looksAhead(const Device& device) const;
  Forecast::Expected lookAhead(Device& device, std::size_t most);
  void foresee(Device& device, bool idle, Slots& retired, Ahead& ahead) noexcept;
  void lookForCopies(Device& device, bool idle, Slots& retired, Ahead& ahead);
  bool mayPrefetch(const Block& block) const;
  void pauseLending(Device& device);
  bool goesInBatch(const Forecast::Expected& expected) const;
  Block* stillExpected(const Device& device, const Slot& slot) const;
  bool prefetch(Device& device, const std::vector<Pin>& batch) noexcept;
  void prefetchMore(Device& device, Ahead next) noexcept;
  void goOnAhead(const Block& written) noexcept;
  void look(Device& device);
  void endPass(Device& device);
  void planAgain(Device& device);
  std::size_t ring(std::size_t bytes) const;
  std::size_t writeBuffer() const;
  void warnOfRing(std::size_t bytes);
  void retireStale(Block& block, Slots& retired);
  void writeThrough(Block& block, DeviceBuffer buffer, Stream producer);
  void noticeShared(Block& block, Slots& retired);
  void letGo(const std::shared_ptr<Slot>& slot, Slots& retired);
  void orderBeforeReuse(const Slot& slot);
  void release(Slots& retired) noexcept;
  void releaseLater(std::shared_ptr<Slot> slot);
  void settle() noexcept;
  void* allocate(Device& device, std::size_t bytes);
  void moveElsewhere(Slot& slot);
  void copyIn(Slot& slot, const Block& block, Device& device, const std::vector<Token>& after, TokenSet& reads);
  void copyAllIn(const std::vector<Copying>& batch, Device& device, const std::vector<Token>& after, TokenSet& reads);
  void unpin(const std::shared_ptr<Slot>& slot, const StreamSet& streams) noexcept;
  void recordUses(const std::shared_ptr<Slot>& slot, const StreamSet& streams, Slots& retired) noexcept;
  void forgetDone(std::span<TokenSet* const> sets) noexcept;
  void endLease(Block& block, Access access) noexcept;
  void endDeviceLease(Block& block, Extent extent, Stream stream) noexcept;
  void limitJobs(const std::vector<Claim>& claims);
  bool claim(const std::vector<Claim>& claims, HostJobs::Job& job, std::vector<Token>& after);
  Pin pinNewest(Device& device, Block& block, Extent extent, const StreamSet& streams);
  bool mayBeThere(const std::vector<Claim>& claims, Device& device);
  static bool mayChange(const Slot& slot, int pins);
  bool dismiss(const std::vector<Claim>& claims, Device& device);
  bool beginUpdate(const std::vector<Claim>& claims, const std::vector<Pin>& pins, std::vector<Token>& before);
  void endUpdate(const std::vector<Claim>& claims, const std::vector<Pin>& pins, Stream stream, bool changed);
  void runJob(const std::vector<Claim>& claims, const std::vector<Token>& after, std::function<void()> work) noexcept;
  void require(const Block& block) const;
  auto audit(const char* call, const Block* block = nullptr) const {
    return Audit(options_.validate, call, [this, block] { block != nullptr ? validate(*block) : validate(); });
  }
  void prepareForWrite(Block& block);
  /// Not under the mutex.
  std::unique_ptr<Observer::Span> observe(const Observation& observation) const noexcept {
    return options_.observer != nullptr ? options_.observer->begin(observation) : nullptr;
  }

  Link& link_;
  EventPool events_;
  mutable std::mutex mutex_;
  std::condition_variable issued_;
  std::size_t ringBytes_;
  std::optional<std::size_t> budgetBytes_;
  /// How often the gradient of the tensor at an address was written before the host read one.
  std::map<const void*, std::uint32_t> writesOfGradients_;
  std::map<std::pair<int, const void*>, const void*> places_; // where host bytes were on a device last; with poison alone
  const ResidencyOptions options_;
  /// What failed in a host task, a read of a file, or in a job: the next fetch, lease or drain throws.
  DeferredError hostErrors_;
  std::vector<std::unique_ptr<Device>> devices_;
  /// What the Link would not do when it was due, and settle() tries again: unpins on a stream that was being captured, when no
  /// event may be recorded, and memory that could not be ordered after its uses.
  std::vector<std::pair<std::shared_ptr<Slot>, StreamSet>> deferred_;
  Slots unreleased_;
  std::atomic<bool> unsettled_{false}; // whether there may be any of either
  std::map<std::uint64_t, std::weak_ptr<CapturedFetches>> captures_; // that go on, by Link::captureOf()
  bool closed_ = false;
  bool ringIsSet_;
  bool warned_ = false;
  std::uint64_t claimsMade_ = 0;
  std::size_t claimedBytes_ = 0; // since what jobs keep was counted
  HostJobs jobs_; // first to go
};

} // namespace offload
