#include "aten/device_work.h"

#include "aten/context.h"
#include "aten/fetch.h"

#include <atomic>

namespace offload {
namespace {

std::atomic<bool> may{false};

at::Tensor tensorAt(void* data, const at::Tensor& like, c10::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), like.storage().nbytes(), c10::DataPtr(data, device), nullptr, false);
  return tensorOver(std::move(storage), device.type(), like, like.storage_offset());
}

} // namespace

void setWorkOnDevice(bool on) {
  may = on;
}

bool mayWorkOnDevice() {
  return may;
}

bool doOnDevice(
    const std::vector<HostOperand>& operands, const std::function<void(const std::vector<at::Tensor>& there)>& work) {
  Context& context = Context::get();
  if (!may || !context.hasCache() || operands.empty()) return false;
  const c10::DeviceIndex index = operands.front().tensor.device().index();
  std::vector<Residency::Claim> claims;
  std::vector<c10::DataPtr> owners; // another thread may give a storage other memory
  for (const auto& [tensor, written] : operands) {
    if (tensor.device().index() != index || !coversItsStorage(tensor)) return false;
    claims.push_back({&blockOf(tensor.storage()), written ? Access::Write : Access::Read});
    owners.push_back(Context::retain(*claims.back().block));
  }
  c10::Device device = pairedDevice(index);
  const Stream stream = context.currentStream(index);
  if (device.is_cpu()) device = c10::kCPU; // whose index is the cache's alone
  return context.residency().updateThere(claims, stream, [&](const std::vector<void*>& addresses) {
    std::vector<at::Tensor> there;
    for (std::size_t k = 0; k < operands.size(); ++k) there.push_back(tensorAt(addresses[k], operands[k].tensor, device));
    work(there);
  });
}

} // namespace offload
