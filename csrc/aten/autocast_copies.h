// Copies of weights on the host in the dtype that autocast casts them to, so that half the bytes travel.
#pragma once

#include "aten/host_work.h"

#include <optional>

namespace offload {

/// Note [Copies for autocast]
/// Autocast casts a weight on the device, after all of its bytes have travelled. With copies a weight of fp32 is cast on the host
/// instead, once for each value that it has, and what travels is the copy. The copy goes with the weight's Block and carries the
/// version of that Block that it was made of; whoever wants it asks for the Block's version, which waits for the jobs on it. Where the
/// copy is behind, or there is none yet, the weight is fetched as ever and another copy is made meanwhile, as a job on the host. What
/// updates weights in jobs has the copies made anew right behind each. So no fetch waits for a cast but one that comes sooner than it.
///
/// There are none of weights of less than `leastBytes`, which stay on the device in any budget; of bytes that other processes share,
/// which may change unseen, or that a file backs; while a mode sees each operation, as what it sees in a checkpoint's forward it must
/// see again; of what a CUDA graph captures, whose replays read what the weight then holds; and where optimizers step on the GPU, which
/// keep the weights there.

/// Whether there are any, and of how many bytes a weight is at least.
void setAutocastCopies(bool kept, std::size_t leastBytes);
bool autocastCopies();

/// The copy of an offload tensor, with its sizes and strides, on a target of fetchTo(). Undefined where there is none of its newest value.
at::Tensor fetchCopy(const at::Tensor& offload, c10::Device target, at::ScalarType dtype);

/// Has a copy made of a weight, if there is to be one.
void makeCopy(const at::Tensor& offload, c10::Device target, at::ScalarType dtype);

/// Has the copies of what these write to made anew; to be called once that has been submitted.
void renewCopies(const std::vector<HostOperand>& operands);

} // namespace offload
