// Work on the host bytes of tensors, at once or while the program goes on: Note [Host jobs].
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace offload {

struct HostOperand {
  at::Tensor tensor; // an offload one
  bool written = false;
};

/// Has `work` done as under leases of these tensors' bytes: before this returns where there is no cache, else maybe later.
/// `work` reads and writes aliases of the tensors (hostAlias()), which share no memory with what others may change meanwhile; it
/// takes no GIL and calls nothing of this library. The tensors' memory stays until it is done. What it throws later the next fetch
/// or lease does.
void doOnHost(const std::vector<HostOperand>& operands, std::function<void()> work);

} // namespace offload
