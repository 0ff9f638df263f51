// What the cache does, as ranges of PyTorch's profiler.
#pragma once

#include "core/block.h"
#include "core/observer.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace offload {

/// Note [Ranges]
/// Each activity of the cache is a user's range (at::RecordFunction), which torch.profiler, its NVTX output and every other callback
/// see like those of torch.profiler.record_function: "offload::fetch layers.0.weight [16384 B]". A gradient is "gradient of
/// layers.0.weight", a copy for autocast "copy of layers.0.weight". Where a tensor has no name its purpose stands there. What a profiler can't write, quotes and all
/// beyond printable ASCII, is percent-encoded in names (torch_offload/_names.py). A copy that is enqueued within a range carries its name
/// on the GPU's time line too; of copies that are enqueued at once all carry the last one's. While nothing records, all of this is one question to a thread-local.
Observer& activityRanges();

/// From now on whatever this library's thread does is seen by whoever looks at the calling thread now; false: by nobody, once what it
/// is doing is done.
void lookAtHostWork(bool look);

/// Names the bytes of an offload tensor until its storage goes; `replace` says what becomes of a name that they have.
void nameTensor(const at::Tensor& tensor, const std::string& name, bool replace);
/// Before the Block's memory is used for another one.
void forgetNames(const Block& block) noexcept;

} // namespace offload
