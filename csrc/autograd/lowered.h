// What autocast casts to its lower precision: fetched and cast in one step, so that neither stays on the device for backward.
#pragma once

#include "aten/op_traits.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace offload {

/// What autocast casts the operands of an operation to where it is computed; none where it does not.
std::optional<at::ScalarType> loweredTo(const OpTraits& traits, c10::DeviceType device);

/// Whether an offload operand of such an operation is cast to `dtype` with its fetch.
bool needsLowering(const at::Tensor& operand, at::ScalarType dtype);

/// An offload tensor on a target of fetchTo(), cast to `dtype`; differentiable.
///
/// Note [Casts of one region]
/// PyTorch keeps the cast of a parameter for as long as the outermost autocast region lasts: what is used several times has one
/// cast, and its gradients are added up in the lower precision. Here the copy can't be kept, but the cast's node can: later casts
/// of the same parameter in the region are made anew and have the first one's node.
at::Tensor fetchLowered(const at::Tensor& offload, c10::Device target, at::ScalarType dtype);

} // namespace offload
