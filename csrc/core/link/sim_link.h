// A simulated link: the oracle for missing order. Operations run in any legal order and as late as they may, by a seed; what
// nothing orders is reported as a race even where the values happen to be right.
//
// Note [The simulated link]
// - Same seed and same calls: same order of execution (trace() tells). See Notes [The simulation's schedule], [Order in the
//   simulation] and [Simulated device memory].
// - The null stream of each device is host-driven: the calling thread plays it. Work enqueued there runs at once, an event
//   recorded there has happened, and waiting there blocks. Its accesses are the host's.
// - Misuse and races are reported, see Note [Reports of the simulation]. Without failFast an operation on memory that is not
//   there is dropped, and everything else goes on.
// - Host tasks and kernels name what they read and write when they are enqueued, and must not call the link.
// - One mutex guards all of it. It is not held while host tasks and kernels run.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/link/link.h"
#include "core/link/sim_checks.h"
#include "core/link/sim_memory.h"
#include "core/link/sim_races.h"
#include "core/link/sim_schedule.h"

namespace offload {

struct SimOptions {
  std::uint64_t seed = 0;
  int devices = 1;
  std::size_t deviceBytes = std::size_t{1} << 30; ///< of each device
  SimBias bias = SimBias::Seeded;
  bool detectRaces = true; ///< Wrong addresses and broken guards are reported without it too.
  bool foreignDeviceMemory =
      false; ///< Device addresses that are not of allocate() are right too: CPU tensors that play CUDA's.
  bool failFast = true; ///< Reports are thrown.
  bool wantsRegistration = false; ///< Plays a system on which host memory is to be page-locked,
  std::size_t registrationLimit = SIZE_MAX; ///< and which refuses past so many bytes.
  std::size_t maxPending = 1024; ///< Operations that may wait; then enqueueing runs some.
  bool tellsTime = false; ///< Has timers, by which each operation takes a microsecond.
};

class SimLink final : public Link {
  using Lock = std::unique_lock<std::mutex>;

 public:
  explicit SimLink(SimOptions options = {});
  /// Runs what is pending. After a report it drops that instead: the program ended midway, and its host memory may be gone.
  ~SimLink() override;
  SimLink(const SimLink&) = delete;
  SimLink& operator=(const SimLink&) = delete;

  int deviceCount() const override {
    return options_.devices;
  }
  std::string name() const override {
    return "sim";
  }
  Stream createStream(int device) override;
  void destroyStream(Stream stream) noexcept override;
  Event createEvent(int device) override;
  void destroyEvent(Event event) noexcept override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool query(Event event) override;
  void synchronize(Event event) override;
  Event createTimer(int device) override {
    return options_.tellsTime ? createEvent(device) : nullptr;
  }
  std::optional<double> elapsed(int device, Event from, Event to) override;
  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override;
  void copyAllToDevice(std::span<const Copy> copies, Stream stream) override;
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override;
  void fill(void* device, unsigned char value, std::size_t bytes, Stream stream) override;
  void launchHost(HostTask task, Stream stream) override;
  bool registerHost(void* host, std::size_t bytes) override;
  void unregisterHost(void* host, std::size_t bytes) noexcept override;
  bool wantsRegistration() const override {
    return options_.wantsRegistration;
  }
  bool readsHostMemory(int /*device*/) override {
    return true;
  }
  void* allocate(std::size_t bytes, Stream stream) override;
  void free(void* device, Stream stream) noexcept override;
  MemoryInfo memoryInfo(int device) override;
  std::uint64_t captureOf(Stream /*stream*/) override {
    return 0;
  }
  void hostAccess(const void* host, std::size_t bytes, Access access) override;
  void deviceAccess(const void* host, std::size_t bytes, Access access, Stream stream) noexcept override;

  /// Enqueues `body` as a kernel that reads and writes these ranges of device or host memory.
  void launch(
      Stream stream, std::function<void()> body, const std::vector<MemoryRange>& reads, const std::vector<MemoryRange>& writes);
  /// Runs everything that is pending; the host is ordered after it.
  void drain();

  std::vector<std::string> reports() const {
    const Lock lock(mutex_);
    return checks_.reports();
  }
  /// A digest of which operations ran, in their order.
  std::uint64_t trace() const {
    const Lock lock(mutex_);
    return schedule_.trace();
  }
  std::size_t bytesInUse(int device) const {
    const Lock lock(mutex_);
    return memory_.bytesInUse(device);
  }

 private:
  struct SimStream {
    int device = 0;
    bool open = false;
  };
  struct SimEvent {
    int device = 0;
    RecordingPtr latest;
  };
  /// The host task or kernel that a thread runs.
  struct RunningTask {
    const SimLink* link;
    ActionPtr action;
  };

  Lock enter();
  template <class Body>
  void enterQuietly(Body body) noexcept;
  void refuseInsideTask();
  Actor actorOf(Stream stream);
  SimEvent& eventOf(Event event);
  void enqueue(Lock& lock, Operation operation);
  void enqueueUsersCode(Lock& lock, const ActionPtr& action, std::function<void()> body);

  const SimOptions options_;
  mutable std::mutex mutex_;
  SimMemory memory_;
  RaceDetector races_;
  SimChecks checks_;
  std::vector<SimStream> streams_; // by actor
  std::unordered_map<std::uintptr_t, SimEvent> events_;
  std::uintptr_t lastEvent_ = 0;
  std::size_t registered_ = 0; // host bytes
  SimSchedule schedule_; // last, because what dies with its operations may still call

  static thread_local const RunningTask* running_;
};

} // namespace offload
