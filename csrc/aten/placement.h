// The placement rule: where an operation computes and where its result lives.
//
// Note [The placement rule]
// Compute happens where the activations are; offload tensors follow. A tensor with dims on CUDA, or else on the CPU, decides, and
// the result stays there. Among offload tensors alone a new value is made on the paired device, what merely moves values is made
// where the operand was born, and what is changed in place is changed where it was born. Where something was born never changes,
// so no result depends on what the cache holds. Zeros, ones and memory without a value are born with the first value that is written
// to them: on the device where one of its operands was, if it isn't drawn at random. A movement whose gradient is asked for counts as
// a new value: backward adds what was read more than once, and sums have the device's bits. Within an optimizer's step, or
// torch_offload.on_host(), all of this is on the host. 0-dim tensors count as nothing beside tensors with dims, unless they are
// written to.
#pragma once

#include "aten/context.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace offload {

/// Whether what the offload tensor holds was first made on a device. Not for wrappers, which hold nothing themselves.
bool isBornOnDevice(const at::Tensor& offload);

/// Whether its first value will decide where it was born. Not that of parameters, buffers and optimizers' state, which are the host's.
bool isUndecided(const at::Tensor& offload);
/// Where that was made; nothing where it is decided.
void decideBirth(const at::Tensor& offload, Born born);

/// Whether elements share memory, as those of unfold() do; what is expanded counts as one. A copy of such a view has them apart, and
/// what is written to one of them there is not seen by the others.
bool overlapsItself(const at::Tensor& tensor);

/// What an operation is given, as far as the rule asks.
struct Operands {
  bool offload = false; // any offload tensor
  bool deviceBorn = false; // any whose Block was born on a device
  bool targetDeviceBorn = false; // one that is written to
  bool targetHostBorn = false;
  bool targetUndecided = false;
  bool writesInference = false; // to a tensor of inference mode, outside of it
  bool drawn = false; // the values are random
  std::optional<c10::Device> plainTarget; // of a tensor elsewhere that is
  bool requiresGrad = false; // any operand, wherever it lives
  bool wrapped = false; // subclasses on offload, and functorch's wrappers, which only the kernel below can open
  std::optional<c10::Device> cuda; // of a CUDA tensor with dims
  std::optional<c10::Device> cudaScalar; // of a 0-dim CUDA tensor
  bool hostGenerator = false; // a generator that draws on the host
  bool cpu = false; // a CPU tensor with dims
  bool foreign = false; // any tensor that isn't on offload
  bool offloadDims = false; // an offload tensor with dims
  c10::DeviceIndex index = 0; // of the first offload tensor

  void add(const at::Tensor& tensor, bool written, bool out);
};

/// Whether it is of a subclass that holds other tensors; not those with which PyTorch traces.
bool isWrapper(const at::Tensor& tensor);
/// Tells one from the other. Called once, while the module loads.
void setWrapperTest(bool (*test)(const at::Tensor& subclass));

struct Placement {
  c10::Device compute; // a target of fetchTo()
  bool toOffload; // results are offload tensors
  c10::Device home; // which offload device, then
};

enum class Effect {
  NewValue,
  Movement, // values are moved, none is computed
  InPlace, // writes to an operand
};

/// Only for operands with an offload tensor among them.
Placement place(const Operands& operands, Effect effect);

/// While one lives, operations of this thread on offload tensors alone run on the host.
class HostScope {
 public:
  static bool active() noexcept;
  static void enter() noexcept;
  static void leave() noexcept;
};

/// Whether torch.compile, torch.export or make_fx is tracing on this thread: tensors then have no memory.
bool tracing();

} // namespace offload
