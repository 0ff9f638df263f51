#include "core/link/cuda_link.h"

#include "core/error.h"
#include "core/link/cuda_message.h"

#include <cuda_runtime_api.h>

#include <numeric>
#include <optional>

namespace offload {
namespace {

// Clears the error so that the next CUDA call of the process doesn't report ours.
void check(
    cudaError_t code, const char* what, std::optional<int> device = std::nullopt,
    std::optional<std::size_t> bytes = std::nullopt) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(messageOf({what, cudaGetErrorName(code), cudaGetErrorString(code), device, bytes}));
}

cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

cudaEvent_t native(Event event) {
  return static_cast<cudaEvent_t>(event);
}

class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "read the current device");
    if (previous_ != device) check(cudaSetDevice(device), "select a device", device);
    changed_ = previous_ != device;
  }
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// A capture elsewhere in the process forbids some calls to every thread that doesn't say that it knows what it does.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaLink final : public Link {
 public:
  explicit CudaLink(std::unique_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {
    check(cudaGetDeviceCount(&devices_), "count the devices");
    check(cudaDriverGetVersion(&driver_), "read the version of the driver");
  }

  int deviceCount() const override {
    return devices_;
  }

  std::string name() const override {
    return "cuda";
  }

  Stream createStream(int device) override {
    RelaxedCapture relaxed;
    DeviceScope scope(device);
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream", device);
    return {device, stream};
  }

  void destroyStream(Stream stream) noexcept override {
    RelaxedCapture relaxed;
    if (cudaStreamDestroy(native(stream)) != cudaSuccess) (void)cudaGetLastError();
  }

  Event createEvent(int device) override {
    return create(device, cudaEventDisableTiming);
  }

  void destroyEvent(Event event) noexcept override {
    RelaxedCapture relaxed;
    if (cudaEventDestroy(native(event)) != cudaSuccess) (void)cudaGetLastError();
  }

  void record(Event event, Stream stream) override {
    DeviceScope scope(stream.device);
    check(cudaEventRecord(native(event), native(stream)), "record an event", stream.device);
  }

  void wait(Stream stream, Event event) override {
    DeviceScope scope(stream.device);
    check(cudaStreamWaitEvent(native(stream), native(event), 0), "make a stream wait", stream.device);
  }

  bool query(Event event) override {
    RelaxedCapture relaxed;
    const cudaError_t code = cudaEventQuery(native(event));
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(code, "query an event");
    return true;
  }

  void synchronize(Event event) override {
    RelaxedCapture relaxed;
    check(cudaEventSynchronize(native(event)), "wait for a copy");
  }

  Event createTimer(int device) override {
    return create(device, cudaEventDefault);
  }

  std::optional<double> elapsed(int device, Event from, Event to) override {
    RelaxedCapture relaxed;
    DeviceScope scope(device); // or the call would make a context on whatever device is current
    float milliseconds = 0;
    const cudaError_t code = cudaEventElapsedTime(&milliseconds, native(from), native(to));
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return std::nullopt;
    }
    check(code, "read a timer", device);
    return milliseconds / 1e3;
  }

  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override {
    DeviceScope scope(stream.device);
    check(
        cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, native(stream)), "copy to the device", stream.device,
        bytes);
  }

  // Where this CUDA, or the driver, is older than the call: one call each.
  void copyAllToDevice(std::span<const Copy> copies, Stream stream) override {
#if CUDART_VERSION >= 12080
    if (driver_ < 12080) return Link::copyAllToDevice(copies, stream);
    std::vector<void*> to;
    std::vector<void*> from;
    std::vector<std::size_t> bytes;
    for (const Copy& copy : copies) {
      to.push_back(copy.to);
      from.push_back(const_cast<void*>(copy.from)); // CUDA 12 asks for it
      bytes.push_back(copy.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder =
        cudaMemcpySrcAccessOrderStream; // the host may write again once the stream has passed, not before
    std::size_t first = 0; // of the copies with these attributes
    RelaxedCapture relaxed;
    DeviceScope scope(stream.device);
#if CUDART_VERSION >= 13000
    const cudaError_t code =
        cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1, native(stream));
#else
    std::size_t failed = 0;
    const cudaError_t code =
        cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1, &failed, native(stream));
#endif
    check(code, "copy to the device", stream.device, std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}));
#else
    Link::copyAllToDevice(copies, stream);
#endif
  }

  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    DeviceScope scope(stream.device);
    check(
        cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, native(stream)), "copy to the host", stream.device, bytes);
  }

  void fill(void* device, unsigned char value, std::size_t bytes, Stream stream) override {
    DeviceScope scope(stream.device);
    check(cudaMemsetAsync(device, value, bytes, native(stream)), "fill device memory", stream.device, bytes);
  }

  void launchHost(HostTask task, Stream stream) override {
    DeviceScope scope(stream.device);
    // An exception can't pass through the driver; one that tries ends the process rather than be lost.
    auto run = [](void* argument) noexcept {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(argument));
      (*owned)();
    };
    auto owned = std::make_unique<std::function<void()>>(std::move(task.run));
    if (capturing(stream)) {
      // Every replay runs it, and nobody tells when there is none any more.
      auto runAgain = [](void* argument) noexcept { (*static_cast<std::function<void()>*>(argument))(); };
      check(cudaLaunchHostFunc(native(stream), runAgain, owned.release()), "launch a host task", stream.device);
      return;
    }
    check(cudaLaunchHostFunc(native(stream), run, owned.get()), "launch a host task", stream.device);
    (void)owned.release();
  }

  bool registerHost(void* host, std::size_t bytes) override {
    RelaxedCapture relaxed;
    if (cudaHostRegister(host, bytes, cudaHostRegisterPortable) == cudaSuccess) return true;
    (void)cudaGetLastError();
    return false;
  }

  void unregisterHost(void* host, std::size_t /*bytes*/) noexcept override {
    RelaxedCapture relaxed;
    if (cudaHostUnregister(host) != cudaSuccess) (void)cudaGetLastError();
  }

  bool wantsRegistration() const override {
    return true;
  }

  bool readsHostMemory(int device) override {
    int reads = 0;
    if (cudaDeviceGetAttribute(&reads, cudaDevAttrCanUseHostPointerForRegisteredMem, device) != cudaSuccess) {
      (void)cudaGetLastError();
    }
    return reads != 0;
  }

  void* allocate(std::size_t bytes, Stream stream) override {
    RelaxedCapture relaxed;
    return memory_->allocate(bytes, stream);
  }

  void free(void* device, Stream stream) noexcept override {
    memory_->free(device, stream);
  }

  MemoryInfo memoryInfo(int device) override {
    return memory_->memoryInfo(device);
  }

  std::uint64_t captureOf(Stream stream) override {
    if (stream.handle == nullptr)
      return 0; // the legacy stream can't be captured, and to ask while another one is would be an error
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (cudaStreamGetCaptureInfo(native(stream), &status, &id) != cudaSuccess) {
      (void)cudaGetLastError();
      return 0;
    }
    // What has been invalidated takes no work at all, and CUDA says so.
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }

 private:
  static Event create(int device, unsigned flags) {
    RelaxedCapture relaxed;
    DeviceScope scope(device);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, flags), "create an event", device);
    return event;
  }

  std::unique_ptr<DeviceMemory> memory_;
  int devices_ = 0;
  int driver_ = 0; // the newest CUDA that it runs
};

} // namespace

std::unique_ptr<Link> makeCudaLink(std::unique_ptr<DeviceMemory> memory) {
  return std::make_unique<CudaLink>(std::move(memory));
}

} // namespace offload
