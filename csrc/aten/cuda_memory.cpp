// Device memory of PyTorch's CUDA caching allocator, and what goes back to it when it runs short.
#include "aten/cuda_glue.h"
#include "core/demand_guess.h"
#include "core/error.h"

#ifdef OFFLOAD_WITH_CUDA
#include "compat/refused_memory.h"
#include "core/host_wait.h"
#include "core/link/cuda_link.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>
#endif

namespace offload::cuda {

#ifdef OFFLOAD_WITH_CUDA
namespace {

MemoryInfo memoryInfo(c10::DeviceIndex index);
void tookMemory(c10::DeviceIndex index);

// Requests of our own: no reason to give something back, nor is what they take what others want.
class OwnRequest {
 public:
  explicit OwnRequest(c10::DeviceIndex index) : index_(index) {
    state = State::Asking;
  }
  ~OwnRequest() {
    if (std::exchange(state, State::None) == State::Missed) tookMemory(index_);
  }
  OwnRequest(const OwnRequest&) = delete;
  OwnRequest& operator=(const OwnRequest&) = delete;

  /// Whether this thread's request is one; the allocator has no block for it.
  static bool missed() {
    if (state == State::None) return false;
    state = State::Missed;
    return true;
  }
  static bool current() {
    return state != State::None;
  }

 private:
  enum class State { None, Asking, Missed };
  static thread_local State state;
  const c10::DeviceIndex index_;
};
thread_local OwnRequest::State OwnRequest::state = State::None;

// What we have of the allocator. What we give back it keeps for our stream, where we find it again: to us that is as good as free,
// and the driver counts it as used.
class Ledger {
 public:
  void took(const void* data, std::size_t bytes, int device) {
    std::lock_guard lock(mutex_);
    taken_[data] = {bytes, device};
    Account& account = accounts_[device];
    account.now += bytes;
    account.most = std::max(account.most, account.now);
  }

  void gave(const void* data) {
    std::lock_guard lock(mutex_);
    const auto found = taken_.find(data);
    if (found == taken_.end()) return;
    accounts_[found->second.second].now -= found->second.first;
    taken_.erase(found);
  }

  std::size_t now(int device) {
    std::lock_guard lock(mutex_);
    return accounts_[device].now;
  }

  /// At most `cached` bytes, all that the allocator keeps for anybody: it gives that back to the driver when memory is short.
  std::size_t keptForUs(int device, std::size_t cached) {
    std::lock_guard lock(mutex_);
    Account& account = accounts_[device];
    account.most = std::min(account.most, account.now + cached);
    return account.most - account.now;
  }

 private:
  struct Account {
    std::size_t now = 0;
    std::size_t most = 0;
  };
  std::mutex mutex_; // innermost: taken also with the allocator's lock held
  std::unordered_map<const void*, std::pair<std::size_t, int>> taken_;
  std::unordered_map<int, Account> accounts_;
};

Ledger& ledger() {
  static auto* instance = new Ledger();
  return *instance;
}

thread_local bool threadHasPool = false;

class CachingMemory final : public DeviceMemory {
 public:
  // A pool may go, or is counted by who has made it, as by the graphs of torch.compile: what the cache keeps must not be in it. That
  // a thread's requests go there the allocator tells by the thread, so another one asks.
  void* allocate(std::size_t bytes, Stream stream) override {
    if (!threadHasPool) return allocateHere(bytes, stream);
    void* data = nullptr;
    std::exception_ptr failure;
    const auto ask = [&] {
      try {
        data = allocateHere(bytes, stream);
      } catch (...) {
        failure = std::current_exception();
      }
    };
    hostWait([&ask] { std::thread(ask).join(); }); // it may want the GIL
    if (failure) std::rethrow_exception(failure);
    return data;
  }

  void free(void* device, Stream /*stream*/) noexcept override {
    ledger_.gave(device);
    c10::cuda::CUDACachingAllocator::raw_delete(device);
  }

  MemoryInfo memoryInfo(int device) override {
    return cuda::memoryInfo(static_cast<c10::DeviceIndex>(device));
  }

 private:
  void* allocateHere(std::size_t bytes, Stream stream) {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(stream.device));
    const OwnRequest own(static_cast<c10::DeviceIndex>(stream.device));
    try {
      void* const data =
          c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream.handle));
      try {
        ledger_.took(data, bytes, stream.device);
      } catch (...) {
        c10::cuda::CUDACachingAllocator::raw_delete(data);
        throw;
      }
      return data;
    } catch (const c10::OutOfMemoryError& error) {
      throw OutOfMemory(OutOfMemory::Where::Device, bytes, error.what_without_backtrace());
    }
  }

  Ledger& ledger_ = ledger();
};

std::size_t sumOf(const c10::CachingAllocator::StatArray& stat) {
  return static_cast<std::size_t>(stat[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
}

std::size_t reservedBytes(c10::DeviceIndex index) {
  return sumOf(c10::cuda::CUDACachingAllocator::getDeviceStats(index).reserved_bytes);
}

// What the driver has free, within what the process may take by set_per_process_memory_fraction(), and what the allocator keeps for
// us.
MemoryInfo memoryInfo(c10::DeviceIndex index) {
  c10::cuda::CUDAGuard guard(index);
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  const std::size_t reserved = sumOf(stats.reserved_bytes);
  const double fraction = c10::cuda::CUDACachingAllocator::getMemoryFraction(index);
  if (fraction < 1.0) {
    total = static_cast<std::size_t>(fraction * static_cast<double>(total));
    free = std::min(free, total > reserved ? total - reserved : 0);
  }
  return {free + ledger().keptForUs(index, reserved - std::min(reserved, sumOf(stats.active_bytes))), total};
}

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Note [What the allocator asks for]
// It calls back at every request that none of its free blocks serves, before it asks the driver, and doesn't say for how much. So
// the answer goes by the last requests, by what its memory has grown by from one call to the next (demand_guess.h), and is a quarter of
// what the process may use of the device where it has not called for long. Where the driver then refuses a request it gets as much again
// before it asks a second time, if the driver is whom it asks: see Note [Refused memory]. Otherwise a request that is beyond the answer and
// beyond what is free fails, and where even that is not enough, or not Clean. Then, with the lock let go, everything is given back, what is
// Dirty too, and its size is remembered, so that another attempt succeeds.
// While it records its history it wants the GIL to free a block, which nobody may take under its lock: then it gets no answer.
class Relief {
 public:
  Relief(Relieve relieve, RelieveOf relieveOf, GiveUp giveUp)
      : relieve_(relieve),
        relieveOf_(relieveOf),
        giveUp_(giveUp),
        devices_(static_cast<std::size_t>(c10::cuda::device_count())) {}

  bool ask(c10::DeviceIndex index) {
    if (OwnRequest::missed() || !mayFree()) return false;
    Device& device = devices_[static_cast<std::size_t>(index)];
    const std::size_t reserved = reservedBytes(index);
    const std::size_t before = device.reserved.exchange(reserved);
    if (before != 0 && reserved > before) device.guess.asked(reserved - before);
    const std::size_t refused = device.calls++ < device.rememberUntil ? device.refused.load() : 0;
    const auto [free, total] = memoryInfo(index);
    const std::size_t usual = std::max(device.guess.most(), refused);
    const std::size_t kept = std::max(device.guess.within(free + ledger().now(index)), refused);
    return relieve_(index, free, usual, std::max(usual, total / 4), kept) > 0;
  }

  // By the driver, for now.
  void refusedOnce(c10::DeviceIndex index, std::size_t bytes) {
    if (!OwnRequest::current() && mayFree()) (void)relieveOf_(index, bytes);
  }

  void refused(c10::DeviceIndex index, std::size_t bytes) {
    if (OwnRequest::current() || capturing()) return;
    Device& device = devices_[static_cast<std::size_t>(index)];
    device.refused = bytes;
    device.rememberUntil = device.calls + 64;
    giveUp_(index);
  }

  void tookMemory(c10::DeviceIndex index) {
    devices_[static_cast<std::size_t>(index)].reserved = reservedBytes(index);
  }

 private:
  struct Device {
    DemandGuess guess; // by how much `reserved` has grown from call to call; guarded by the allocator's lock
    std::atomic<std::size_t> reserved{0}; // by the allocator when it asked last, or when we took some
    std::atomic<std::size_t> refused{0}; // the last request that failed
    std::atomic<std::uint64_t> calls{0};
    std::atomic<std::uint64_t> rememberUntil{0};
  };

  static bool mayFree() {
    return !capturing() && !c10::cuda::CUDACachingAllocator::isHistoryEnabled();
  }

  const Relieve relieve_;
  const RelieveOf relieveOf_;
  const GiveUp giveUp_;
  std::vector<Device> devices_;
};

std::atomic<Relief*> theRelief{nullptr};

void tookMemory(c10::DeviceIndex index) {
  if (Relief* relief = theRelief.load(std::memory_order_acquire)) relief->tookMemory(index);
}

class AskRelief final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    Relief* relief = theRelief.load(std::memory_order_acquire);
    return relief != nullptr && relief->ask(c10::cuda::current_device());
  }
};

} // namespace

void relieveAllocatorBy(Relieve relieve, RelieveOf relieveOf, GiveUp giveUp) {
  theRelief.store(new Relief(relieve, relieveOf, giveUp), std::memory_order_release);
  const bool told =
      compat::tellOfRefusedMemory([](std::size_t bytes) { theRelief.load()->refusedOnce(c10::cuda::current_device(), bytes); });
  c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(
      [](std::int64_t device, std::size_t bytes, std::size_t /*allowed*/, std::size_t /*free*/) {
        theRelief.load()->refused(static_cast<c10::DeviceIndex>(device), bytes);
      });
  if (!told)
    TORCH_WARN(
        "offload: PyTorch's CUDA allocator can't be watched for requests that the driver refuses, so the first request of more"
        " than is free fails even while the cache holds as much; ask again, or call torch_offload.empty_cache() before.");
}

void setThreadHasPool(bool has) noexcept {
  threadHasPool = has;
}

void releaseCached() {
  if (capturing()) return;
  try {
    c10::cuda::CUDACachingAllocator::emptyCache();
  } catch (const c10::Error& error) { // as while another thread captures
    TORCH_WARN("offload: PyTorch's CUDA allocator keeps what it has cached: ", error.what_without_backtrace());
  }
}

std::unique_ptr<Link> makeLink() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return makeCudaLink(std::make_unique<CachingMemory>());
}

#else

void relieveAllocatorBy(Relieve /*relieve*/, RelieveOf /*relieveOf*/, GiveUp /*giveUp*/) {}

void setThreadHasPool(bool /*has*/) noexcept {}

void releaseCached() {}

std::unique_ptr<Link> makeLink() {
  throw Error("offload: this build has no CUDA support; install a CUDA build of torch and build torch_offload again.");
}

#endif

} // namespace offload::cuda

#ifdef OFFLOAD_WITH_CUDA
namespace c10 {
// The registry is found by its plain name.
using offload::cuda::AskRelief;
REGISTER_FREE_MEMORY_CALLBACK("torch_offload", AskRelief)
} // namespace c10
#endif
