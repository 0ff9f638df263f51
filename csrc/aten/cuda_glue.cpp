#include "aten/cuda_glue.h"

#include "core/error.h"

#ifdef OFFLOAD_WITH_CUDA
#include "core/link/cuda_link.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <vector>
#endif

namespace offload::cuda {

#ifdef OFFLOAD_WITH_CUDA
namespace {

std::size_t freeBytes(c10::DeviceIndex index);
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

class CachingMemory final : public DeviceMemory {
 public:
  void* allocate(std::size_t bytes, Stream stream) override {
    c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(stream.device));
    const OwnRequest own(static_cast<c10::DeviceIndex>(stream.device));
    try {
      return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream.handle));
    } catch (const c10::OutOfMemoryError& error) {
      throw OutOfMemory(OutOfMemory::Where::Device, bytes, error.what_without_backtrace());
    }
  }

  void free(void* device, Stream /*stream*/) noexcept override {
    c10::cuda::CUDACachingAllocator::raw_delete(device);
  }

  std::size_t freeBytes(int device) override {
    return cuda::freeBytes(static_cast<c10::DeviceIndex>(device));
  }
};

std::size_t reservedBytes(c10::DeviceIndex index) {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(index);
  return static_cast<std::size_t>(
      stats.reserved_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current);
}

// What the driver has free, within what the process may take by set_per_process_memory_fraction().
std::size_t freeBytes(c10::DeviceIndex index) {
  c10::cuda::CUDAGuard guard(index);
  std::size_t free = 0;
  std::size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  const double fraction = c10::cuda::CUDACachingAllocator::getMemoryFraction(index);
  if (fraction >= 1.0) return free;
  const auto allowed = static_cast<std::size_t>(fraction * static_cast<double>(total));
  const std::size_t reserved = reservedBytes(index);
  return std::min(free, allowed > reserved ? allowed - reserved : 0);
}

// Note [What the allocator asks for]
// It calls back at every request that none of its free blocks serves, before it asks the driver, and doesn't say for how much. So
// the answer goes by the last requests: twice the most that its memory has grown by from one call to the next, and a quarter of the
// device where it has not called for long. A request that is beyond that and beyond what is free fails; by then its size is known,
// as much is given back, and remembered, so that another attempt succeeds.
class Relief {
 public:
  explicit Relief(Relieve relieve) : relieve_(relieve), devices_(static_cast<std::size_t>(c10::cuda::device_count())) {}

  bool ask(c10::DeviceIndex index) {
    if (OwnRequest::missed() || c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
      return false;
    Device& device = devices_[static_cast<std::size_t>(index)];
    const std::size_t reserved = reservedBytes(index);
    const std::size_t before = device.reserved.exchange(reserved);
    const std::size_t grown = before != 0 && reserved > before ? reserved - before : 0;
    device.usual = std::max({grown, device.usual - device.usual / 32, kLeastGrowth});
    if (device.remembered > 0) --device.remembered;
    const std::size_t refused = device.remembered > 0 ? device.refused : 0;
    const std::size_t quarter = at::cuda::getDeviceProperties(index)->totalGlobalMem / 4;
    const std::size_t usual = std::max(2 * device.usual, refused);
    return relieve_(index, freeBytes(index), usual, std::max(usual, quarter)) > 0;
  }

  void refused(c10::DeviceIndex index, std::size_t bytes) {
    if (OwnRequest::current()) return;
    Device& device = devices_[static_cast<std::size_t>(index)];
    device.refused = bytes;
    device.remembered = 64;
    relieve_(index, 0, bytes, bytes);
  }

  void tookMemory(c10::DeviceIndex index) {
    devices_[static_cast<std::size_t>(index)].reserved = reservedBytes(index);
  }

 private:
  /// Guarded by the allocator's own lock, but for what is atomic.
  struct Device {
    std::atomic<std::size_t> reserved{0}; // by the allocator when it asked last, or when we took some
    std::size_t usual = 0; // the most that this has grown by from one call to the next; long ago counts less
    std::size_t refused = 0; // the last request that failed
    int remembered = 0; // for so many calls more
  };

  static constexpr std::size_t kLeastGrowth = std::size_t{256} << 20;
  const Relieve relieve_;
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

c10::DeviceIndex deviceCount() noexcept {
  return c10::cuda::device_count();
}

std::size_t totalMemory() {
  return at::cuda::getDeviceProperties(0)->totalGlobalMem;
}

Stream currentStream(c10::DeviceIndex index) {
  return {index, c10::cuda::getCurrentCUDAStream(index).stream()};
}

Stream streamOf(c10::Stream stream) {
  return {stream.device_index(), c10::cuda::CUDAStream(stream).stream()};
}

void relieveAllocatorBy(Relieve relieve) {
  theRelief.store(new Relief(relieve), std::memory_order_release);
  c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(
      [](std::int64_t device, std::size_t bytes, std::size_t /*allowed*/, std::size_t /*free*/) {
        theRelief.load()->refused(static_cast<c10::DeviceIndex>(device), bytes);
      });
}

std::unique_ptr<Link> makeLink() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return makeCudaLink(std::make_unique<CachingMemory>());
}

#else

c10::DeviceIndex deviceCount() noexcept {
  return 0;
}

std::size_t totalMemory() {
  return 0;
}

Stream currentStream(c10::DeviceIndex index) {
  return {index, nullptr};
}

Stream streamOf(c10::Stream stream) {
  return {stream.device_index(), nullptr};
}

void relieveAllocatorBy(Relieve /*relieve*/) {}

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
