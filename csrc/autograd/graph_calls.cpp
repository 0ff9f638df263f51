// What compiled graphs call beside fetch and stash, all of it below autograd: torch_offload/compile names the operations.
#include "aten/fetch.h"
#include "aten/placement.h"
#include "autograd/nodes.h"
#include "compat/registration.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/index.h>

namespace offload {
namespace {

// As the code of a compiled graph calls it, whose kernels are made for addresses that are multiples of `alignment`. Devices are
// numbers there: what inductor generates in C++ does not compile for an operation that takes a Device.
at::Tensor fetchCoded(const at::Tensor& self, std::int64_t type, std::int64_t index, std::int64_t alignment) {
  const c10::Device target(static_cast<c10::DeviceType>(type), static_cast<c10::DeviceIndex>(index));
  at::Tensor fetched = fetchTo(self, target);
  const auto address = reinterpret_cast<std::uintptr_t>(fetched.const_data_ptr());
  if (address % static_cast<std::uintptr_t>(alignment) == 0) return fetched;
  const auto bytes = at::detail::computeStorageNbytes(fetched.sizes(), fetched.strides(), fetched.dtype().itemsize());
  const auto items = static_cast<std::int64_t>(bytes / fetched.dtype().itemsize());
  return fetched.as_strided({items}, {1}).clone().as_strided(fetched.sizes(), fetched.strides(), 0);
}

// As a compiled graph calls it, which writes to `self` no more and has no other holder of its memory that could.
at::Tensor givePlain(const at::Tensor& self, c10::Device home) {
  TORCH_CHECK(home.type() == kOffload, "offload: a result is given to an offload device, and not to ", home, ".");
  if (!self.is_non_overlapping_and_dense()) return stashPlain(self, home); // with the strides of a copy, as was traced
  return stashResult(self, home, computedOn(self, home), purposeOfResult());
}

at::Tensor stashCoded(const at::Tensor& self, std::int64_t index) {
  return stashPlain(self, c10::Device(kOffload, static_cast<c10::DeviceIndex>(index)));
}

at::Tensor giveCoded(const at::Tensor& self, std::int64_t index) {
  return givePlain(self, c10::Device(kOffload, static_cast<c10::DeviceIndex>(index)));
}

// As a compiled graph calls it, in place of a lookup in what a fetch gave: see Note [Lookups].
at::Tensor lookUpPlain(const at::Tensor& self, const at::Tensor& index) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor rows = at::index(self, {index.reshape(-1)}); // an index without dimensions says nothing of where it computes
  auto sizes = index.sizes().vec();
  sizes.insert(sizes.end(), self.sizes().begin() + 1, self.sizes().end());
  return rows.contiguous().view(sizes);
}

void writePlain(const at::Tensor& self, const at::Tensor& value) {
  const_cast<at::Tensor&>(self).copy_(value);
}

at::Tensor fetchOfOther(const at::Tensor& self, c10::Device /*target*/) {
  TORCH_CHECK(
      false, "offload: fetch takes a tensor on offload, and was given one on ", self.device(),
      ". A compiled function whose weights have been moved from offload has to be compiled again: call "
      "torch.compiler.reset().");
}

at::Tensor fetchOfOtherCoded(
    const at::Tensor& self, std::int64_t /*type*/, std::int64_t /*index*/, std::int64_t /*alignment*/) {
  return fetchOfOther(self, self.device());
}

at::Tensor lookUpInOther(const at::Tensor& self, const at::Tensor& /*index*/) {
  return fetchOfOther(self, self.device());
}

// Of tensors of the devices that compute.
void takeWhatComputed(torch::Library& m) {
  m.impl("fetch", fetchOfOther);
  m.impl("fetch.coded", fetchOfOtherCoded);
  m.impl("look_up", lookUpInOther);
  m.impl("stash.coded", stashCoded);
  m.impl("give", givePlain);
  m.impl("give.coded", giveCoded);
}

} // namespace

OFFLOAD_LIBRARY_IMPL(offload, PrivateUse1, m) {
  m.impl("fetch.coded", fetchCoded);
  m.impl("look_up", lookUpPlain);
  m.impl("stash.coded", stashCoded);
  m.impl("write_", writePlain);
}

OFFLOAD_LIBRARY_IMPL(offload, CPU, m) {
  takeWhatComputed(m);
}

OFFLOAD_LIBRARY_IMPL(offload, CUDA, m) {
  takeWhatComputed(m);
}

} // namespace offload
