// What makes `offload` a device: guard, hooks, allocator.
//
// Note [A device without streams]
// Host memory has no streams of its own: the order of copies is kept by Residency on the streams of the paired device. So the
// guard has one constant default stream and events that have always happened, and autograd puts gradients of offload tensors on
// whatever stream it runs on. Whoever synchronizes either waits for all copies, as for the device. An event that measures time is
// one of the paired device (events.h).
#include "aten/cuda_glue.h"
#include "aten/events.h"
#include "aten/generator.h"
#include "aten/tensors.h"
#include "compat/accelerator.h"
#include "compat/registration.h"

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace offload {
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kOffload;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kOffload, currentIndex()};
  }
  void setDevice(c10::Device device) const override {
    setCurrentIndex(withIndex(device).index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) setCurrentIndex(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, withIndex(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, withIndex(device));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return c10::Stream(c10::Stream::DEFAULT, withIndex(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::DEFAULT, stream.device());
  }
  // Autograd runs the nodes of a device that isn't the CPU in a thread of its own, and starts as many as the guards report. With
  // such a thread a process can't fork and go on, nor always exit cleanly. So without a GPU no device is reported, and backward
  // runs on its caller's thread, as for CPU tensors: torch_offload/_backward.py.
  // Unless PyTorch takes offload for its accelerator: then backward asks for a stream of each of its devices.
  c10::DeviceIndex deviceCount() const noexcept override {
    return compat::isAccelerator() ? offload::deviceCount() : cuda::deviceCount();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    events::destroy(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/, c10::EventFlag flag) const override {
    events::record(*event, stream.device_index(), flag);
  }
  void block(void* event, const c10::Stream& /*stream*/) const override {
    events::block(event);
  }
  bool queryEvent(void* event) const override {
    return events::query(event);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex /*index*/) const override {
    return events::elapsed(from, to);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronizeDevice(stream.device_index());
  }
  void synchronizeEvent(void* event) const override {
    events::synchronize(event);
  }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {
    if (Context* context = Context::ifCreated()) context->drain(false);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return offload::deviceCount();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return currentIndex();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    setCurrentIndex(withIndex({kOffload, index}).index());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = currentIndex();
    setCurrentDevice(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  // Page-locked memory of plain CPU tensors is CUDA's affair, with this package or without it.
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(
        cuda::deviceCount() > 0, "offload: there is no GPU that memory could be page-locked for; leave pin_memory out.");
    return at::globalContext().getAcceleratorHooksInterface(c10::kCUDA).getPinnedMemoryAllocator();
  }
  bool isPinnedPtr(const void* data) const override {
    return at::globalContext().hasCUDA() && at::globalContext().getAcceleratorHooksInterface(c10::kCUDA).isPinnedPtr(data);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return defaultGenerator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return newGenerator(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resizeStorage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

namespace {
const compat::Registration device(+[] {
  const c10::impl::DeviceGuardImplRegistrar guard(kOffload, new Guard());
  c10::SetAllocator(kOffload, offloadAllocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
});
} // namespace

} // namespace offload
