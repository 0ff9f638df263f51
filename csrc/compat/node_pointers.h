// Autograd's nodes and who owns them, under every supported PyTorch: older ones count owners by shared_ptr, newer ones within the
// node.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace offload::compat {

using NodePointer = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

/// A node that others own; null once nobody does.
class WeakNode {
 public:
  WeakNode() = default;
  explicit WeakNode(const NodePointer& node) : weak_(node) {}
  NodePointer lock() const {
    return weak_.lock();
  }

 private:
  template <class Pointer>
  struct WeakOf;
  template <class NodeType>
  struct WeakOf<std::shared_ptr<NodeType>> {
    using Type = std::weak_ptr<NodeType>;
  };
  template <class NodeType>
  struct WeakOf<c10::intrusive_ptr<NodeType>> {
    using Type = c10::weak_intrusive_ptr<NodeType>;
  };
  typename WeakOf<NodePointer>::Type weak_{NodePointer()};
};

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
