#include "aten/generator.h"

#include "aten/tensors.h"
#include "core/fork_mutex.h"

#include <ATen/CPUGeneratorImpl.h>

#include <deque>

namespace offload {
namespace {

class OffloadGenerator final : public c10::GeneratorImpl {
 public:
  OffloadGenerator(c10::DeviceIndex index, at::Generator cpu)
      : GeneratorImpl(c10::Device(kOffload, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const noexcept {
    return cpu_;
  }
  void set_current_seed(std::uint64_t seed) override {
    cpu_.set_current_seed(seed);
  }
  // A CPU generator has none and refuses both calls. torch.Generator's pickle, and so its copy, carries an offset for every other
  // device: 0 stands for none.
  void set_offset(std::uint64_t offset) override {
    if (offset != 0) cpu_.set_offset(offset);
  }
  std::uint64_t get_offset() const override {
    return 0;
  }
  std::uint64_t current_seed() const override {
    return cpu_.current_seed();
  }
  std::uint64_t seed() override {
    return cpu_.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  OffloadGenerator* clone_impl() const override {
    return new OffloadGenerator(device().index(), cpu_.clone());
  }
  at::Generator cpu_;
};

} // namespace

const at::Generator& defaultGenerator(c10::DeviceIndex index) {
  static ForkMutex mutex(ForkRank::Other);
  static auto* generators = new std::deque<at::Generator>();
  const c10::DeviceIndex at = index < 0 ? 0 : withIndex({kOffload, index}).index();
  std::lock_guard lock(mutex);
  while (generators->size() <= static_cast<std::size_t>(at)) {
    const auto next = static_cast<c10::DeviceIndex>(generators->size());
    generators->push_back(at::make_generator<OffloadGenerator>(next, at::detail::getDefaultCPUGenerator()));
  }
  return (*generators)[static_cast<std::size_t>(at)];
}

at::Generator newGenerator(c10::DeviceIndex index) {
  const c10::Device device = withIndex(index < 0 ? c10::Device(kOffload) : c10::Device(kOffload, index));
  return at::make_generator<OffloadGenerator>(device.index(), at::detail::createCPUGenerator());
}

at::Generator hostGenerator(const at::Generator& generator) {
  if (!generator.defined() || generator.device().type() != kOffload) return generator;
  return static_cast<OffloadGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

} // namespace offload
