#include "aten/file_tensors.h"

#include "core/host_wait.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBody.h>
#include <c10/util/strides.h>

namespace offload {
namespace {

constexpr std::size_t kThreads = 16;

void requireInside(const File& file, std::uint64_t offset, std::size_t bytes) {
  TORCH_CHECK(
      offset <= file.bytes() && bytes <= file.bytes() - offset, "offload: ", bytes, " bytes from byte ", offset, " of ",
      file.path(), " were asked for, which has ", file.bytes(), ".");
}

} // namespace

at::Tensor fileTensor(
    const std::shared_ptr<File>& file, std::uint64_t offset, at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  device = withIndex(device);
  const auto strides = c10::contiguous_strides(sizes);
  const std::size_t item = c10::elementSize(type);
  const std::size_t bytes = at::detail::computeStorageNbytes(sizes, strides, item);
  requireInside(*file, offset, bytes);
  TORCH_CHECK(
      offset % item == 0, "offload: elements of ", item, " bytes can't be used where they are, at byte ", offset, " of ",
      file->path(), "; read them into memory.");
  if (bytes == 0) return emptyOffload(sizes, strides, type, device, Born::Host);
  auto data = Context::get().fileBlock(std::make_shared<FileBytes>(file, offset, bytes), bytes, device.index());
  return offloadTensor(std::move(data), sizes, strides, type);
}

void readTensors(const File& file, const std::vector<std::pair<std::uint64_t, at::Tensor>>& tensors) {
  std::vector<HostLease> leases;
  std::vector<FilePart> parts;
  for (const auto& [offset, tensor] : tensors) {
    TORCH_CHECK(isOffload(tensor) && tensor.is_contiguous(), "offload: only contiguous offload tensors are read from files.");
    if (tensor.numel() == 0) continue;
    const Extent extent = existingExtentOf(tensor);
    requireInside(file, offset, extent.bytes());
    leases.push_back(leaseOf(tensor, Access::Write));
    auto* const bytes = static_cast<std::byte*>(const_cast<void*>(tensor.storage().data()));
    parts.push_back({offset, bytes + extent.begin, extent.bytes()});
  }
  hostWait([&] { file.read(parts, kThreads); });
}

} // namespace offload
