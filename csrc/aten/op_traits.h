// What the generic kernel has to know of an operation, read off its schema once.
#pragma once

#include "aten/placement.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace offload {

enum class ArgumentKind { Tensor, TensorList, OptionalTensorList, Generator, Device, Other };

struct ArgumentTraits {
  ArgumentKind kind = ArgumentKind::Other;
  bool written = false; // by the schema
  bool out = false; // `out=`: may be resized
  bool hidden = false; // written though the schema doesn't say so: batch norm's running statistics
  bool table = false; // of an operation that looks up
  bool sizes = false; // of packed sequences: on the CPU wherever the values are
};

/// Of what changes tensors of floating-point numbers element by element, and fails on none that have one dtype and one size.
enum class Update {
  None, // any other operation
  OfAny,
  OfOptimizer, // an optimizer's step
};

struct OpTraits {
  explicit OpTraits(const c10::OperatorHandle& op);

  std::vector<ArgumentTraits> arguments;
  std::size_t results = 0;
  Effect effect = Effect::NewValue;
  Update update = Update::None;
  bool composite = false; // made of operations that are intercepted too
  bool decomposes = false; // of offload operands alone its parts give what the device gives
  bool convertsDevice = false; // its Device argument says where the result lives
  bool goesToOther = false; // its second operand says where, and as what: type_as
  bool draws = false; // random numbers
  bool countsWrites = false; // in versions, which tensors of inference mode don't have
  bool fills = false; // a tensor with one number
  bool contracts = false; // tensors of a list, as an equation says
  bool looksUp = false; // reads rows of its first operand: Note [Lookups]
  bool countsFromStorage = false; // its offset is one into the operand's storage, of which it may read all
  int trainingArgument = -1; // a bool that says whether hidden writes happen
  bool updatesStatistics = false; // or, without one, they always do
  bool lowersOnCuda = false; // autocast casts its operands to the lower precision there
  bool lowersOnCpu = false;
  int accumulateArgument = -1; // a bool that says whether a movement adds what comes to one place

  Operands operands(const torch::jit::Stack& stack) const;
  bool writesHidden(const torch::jit::Stack& stack) const;
  /// Whether a call with offload operands alone is left to its parts: all of an operation that decomposes, and a contraction of one
  /// tensor, which is a view of it or a sum.
  bool takenApart(const torch::jit::Stack& stack) const;
  /// Whether a movement is called so that it computes.
  bool adds(const torch::jit::Stack& stack) const;
  /// Of one that converts devices: whether its Device argument names another than its operand's. Then it is a copy between them.
  bool leavesDevice(const torch::jit::Stack& stack) const;

 private:
  bool isTrue(int argument, const torch::jit::Stack& stack) const;
};

/// Whether the generic kernel serves an operation at all.
bool isInterceptable(const c10::OperatorHandle& op);

/// Calls `each(tensor, traits)` for every tensor among the arguments, those in lists included, undefined ones not. What it returns
/// takes the tensor's place; an undefined tensor leaves it.
void replaceTensors(
    const OpTraits& traits, torch::jit::Stack& stack,
    c10::function_ref<at::Tensor(const at::Tensor&, const ArgumentTraits&)> each);

/// The same for the results on top of the stack.
void replaceResults(std::size_t count, torch::jit::Stack& stack, c10::function_ref<at::Tensor(const at::Tensor&)> each);
std::vector<at::Tensor> resultTensors(std::size_t count, const torch::jit::Stack& stack);

} // namespace offload
