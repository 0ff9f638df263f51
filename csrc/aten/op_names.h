// Operations whose schemas don't tell what the generic kernel has to know of them, by name.
#pragma once

#include <string_view>

namespace offload {

/// Operations that only move values: their results are exact wherever they are made. Not among them: what finds its values by
/// comparing them (`sort`, `nonzero`) or by places that it computes (`upsample_nearest2d`), and derivatives (`select_backward`),
/// which would make a gradient of any size on the host of the one number that backward begins with.
bool onlyMoves(std::string_view name);

/// Writes that are part of a forward pass, which has the device's bits: they are made where a new value would be.
bool writesInForward(std::string_view name);

/// Composite operations that pick an algorithm by the device: taken whole for offload operands alone too.
bool picksByDevice(std::string_view name);

/// What must reach its own kernel: copies between devices, what changes a tensor's memory or its standing with autograd, and
/// factories, which take nothing of their operand but its options.
bool hasItsOwnKernel(std::string_view name);

/// They write to running statistics whenever they are given any: what batch norm over several processes is made of.
bool alwaysUpdatesStatistics(std::string_view name);

} // namespace offload
