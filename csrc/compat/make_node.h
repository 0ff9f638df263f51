// Makes autograd nodes under every supported PyTorch: older ones count their owners by shared_ptr, newer ones within the node.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace offload::compat {

template <class NodeType>
auto makeNode() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, NodeType>) {
    return c10::make_intrusive<NodeType>();
  } else {
    // PyTorch's deleter takes long graphs apart without recursion; it is looked up where it exists only.
    return std::shared_ptr<NodeType>(new NodeType(), [](auto* node) { deleteNode(node); });
  }
}

} // namespace offload::compat
