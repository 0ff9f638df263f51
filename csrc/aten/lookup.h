// Operations that read rows of a table.
//
// Note [Lookups]
// `embedding`, `embedding_bag`, `index_select` and indexing read as many rows of their first operand as they are given indices, which are on
// the device: the host does not know which. Where these are few, and the GPU has no room for all parameters anyway, their kernel reads
// them where they are, in page-locked host memory: the table never travels, and may be larger than the GPU. Its gradient flows through
// a fetch's node like any other. Where all parameters fit, tables are fetched, and stay. PyTorch's derivatives save no table, with
// one exception that takes a fetch (weights of a bag that want gradients); so nothing is refilled for their backward, and a table in
// place is given up when the operation has been enqueued, whoever holds the tensor then. Functorch's levels take a fetch, too. A graph
// that is compiled has a fetch before the lookup; inductor's have `offload::look_up` instead (torch_offload/compile/lookups.py).
#pragma once

#include "aten/op_traits.h"

#include <cstddef>
#include <optional>

namespace offload {

/// In bytes: what is no larger is fetched, and stays on the GPU before anything else does, in any budget but 0.
constexpr std::size_t kLeastTable = std::size_t{1} << 20;

bool isLookup(const c10::FunctionSchema& schema);

/// At most how many bytes cross the link where a call that looks up reads its first operand in place, which takes some for every piece;
/// none where that isn't known, the operand has gaps, or the call saves it.
std::optional<std::size_t> bytesLookedUp(const OpTraits& traits, const torch::jit::Stack& stack);

/// Whether a table's bytes are better read where they are, by work on `stream`, than fetched, where so many of them are read.
bool isReadInPlace(std::size_t tableBytes, std::size_t reads, Stream stream);

} // namespace offload
