// Tensors from files.
#pragma once

#include "aten/tensors.h"

#include <utility>

namespace offload {

/// A contiguous tensor on `device` whose bytes are those of `file` from `offset` on, read when they are used: Note [File-backed
/// Blocks]. An error where the file is shorter than that, or `offset` is not a multiple of an element's size.
at::Tensor fileTensor(
    const std::shared_ptr<File>& file, std::uint64_t offset, at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

/// Reads contiguous offload tensors, each from its offset in `file`, straight into their host bytes. Drops the GIL.
void readTensors(const File& file, const std::vector<std::pair<std::uint64_t, at::Tensor>>& tensors);

} // namespace offload
