// The kernel of every operation that has none of its own here.
#pragma once

#include <cstddef>

namespace offload {

/// Registers the generic kernel for every operation of any namespace that the dispatcher knows and that isn't served yet; how many
/// that were. Once more for what has been defined since; a call of any other operation on an offload tensor does so too.
std::size_t interceptOperations();

/// Puts a kernel above autocast's own for every operation that has one; to be called once, when the first offload tensor is made:
/// a program without one keeps PyTorch's.
void interceptAutocast();

} // namespace offload
