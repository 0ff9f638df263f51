// What host bytes are for.
#pragma once

#include <array>
#include <cstddef>

namespace offload {

/// Note [Whose bytes]
/// Every Block has one purpose, and it only rises, in this order. What is found out about a storage comes in any order (a module
/// takes over a tensor that some operation made; an optimizer's state turns up in its dictionary after the step that made it), and
/// whichever it is, the Block ends with the same purpose.
///   Temporary   all that nothing below applies to
///   Activation  the result of an operation
///   Optimizer   the state of an optimizer
///   Gradient    made by a backward pass
///   Parameter   a parameter or buffer of a module, or a leaf that requires gradients
enum class Purpose : unsigned char { Temporary, Activation, Optimizer, Gradient, Parameter };

inline constexpr std::array kPurposes{
    Purpose::Parameter, Purpose::Gradient, Purpose::Optimizer, Purpose::Activation, Purpose::Temporary};

constexpr const char* nameOf(Purpose purpose) {
  constexpr std::array names{"temporary", "activation", "optimizer", "gradient", "parameter"};
  return names[static_cast<std::size_t>(purpose)];
}

} // namespace offload
