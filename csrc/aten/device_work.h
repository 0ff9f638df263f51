// Work on tensors where the cache holds them, as an optimizer's step may be.
#pragma once

#include "aten/host_work.h"

namespace offload {

/// Whether doOnDevice() ever does anything.
void setWorkOnDevice(bool may);
bool mayWorkOnDevice();

/// Has `work` enqueue what changes these tensors on the device that they are paired with, given tensors over the same bytes there;
/// before it has, it may throw offload::OutOfMemory. What it writes to goes home behind it. False where it can't be: see
/// Residency::updateThere().
bool doOnDevice(
    const std::vector<HostOperand>& operands, const std::function<void(const std::vector<at::Tensor>& there)>& work);

} // namespace offload
