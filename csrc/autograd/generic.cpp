// Note [The generic kernel]
// One way for every operation: fetch the offload operands to where it computes, call it again on what was fetched, with PyTorch's
// own derivative, and stash the results where the placement says so. It stands on two keys. On AutogradPrivateUse1 fetch and stash
// are differentiable, so the operation's graph is the plain device's. On PrivateUse1 it serves calls without autograd, and what
// PyTorch's own kernel above has already recorded: operations that write to offload tensors alone.
// Operands inside wrappers (tensor subclasses, functorch) get the kernel that was there before; it unwraps them and comes back.
#include "autograd/generic.h"

#include "aten/fetch.h"
#include "aten/host_kernel.h"
#include "aten/lookup.h"
#include "aten/needless_work.h"
#include "aten/op_traits.h"
#include "aten/refusals.h"
#include "aten/sparse.h"
#include "autograd/lowered.h"
#include "autograd/nodes.h"
#include "autograd/operation_watch.h"
#include "autograd/release_refill.h"
#include "autograd/written.h"
#include "compat/quiet_registration.h"
#include "compat/registration.h"
#include "core/fork_mutex.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>

namespace offload {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

OperationWatch& watch();

std::size_t bytesOf(c10::ArrayRef<c10::IValue> arguments) {
  std::size_t bytes = 0;
  for (const auto& argument : arguments) {
    if (!argument.isTensor() || !argument.toTensor().defined()) continue;
    const at::Tensor& tensor = argument.toTensor();
    bytes += isSparse(tensor) ? partsOf(tensor).values.nbytes() : tensor.nbytes();
  }
  return bytes;
}

// A fetched tensor's storage is but the operand's part. Here all of it travels, and the operand is where it was.
at::Tensor fetchInStorage(const at::Tensor& tensor, c10::Device target) {
  const auto elements = static_cast<std::int64_t>(tensor.storage().nbytes() / tensor.dtype().itemsize());
  if (isCached(target)) countExcess(tensor, tensor.storage().nbytes());
  return fetch(tensor.as_strided({elements}, {1}, 0), target)
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// Who gets a result may write to it, and keep it: one that is an operand, or a view of one (`type_as`, operations of libraries), is not
// the memory that was fetched.
at::Tensor ownOf(const at::Tensor& result) {
  return isFetched(result) ? result.clone() : result;
}

// A table that is read where it is, for one operation.
struct InPlace {
  ~InPlace() {
    if (table.defined()) endInPlace(table);
  }
  at::Tensor table;
};

// What is written to, where that stands behind operands that are read: `out=`, which may be one of these.
c10::SmallVector<std::pair<at::Tensor, ArgumentTraits>, 2> targetsBehind(const OpTraits& traits, Stack& stack) {
  c10::SmallVector<std::pair<at::Tensor, ArgumentTraits>, 2> targets;
  if (traits.effect != Effect::InPlace || traits.arguments.front().written) return targets;
  replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& argument) {
    if (argument.written) targets.emplace_back(tensor, argument);
    return at::Tensor();
  });
  return targets;
}

// `lower` is the dtype that autocast casts to.
void callFetched(
    const c10::OperatorHandle& op, const OpTraits& traits, const Placement& placement, Stack& stack,
    std::optional<at::ScalarType> lower) {
  const bool hiddenWrites = traits.writesHidden(stack);
  const FetchingFor named(op);
  ReleaseRefill watch(placement.compute);
  std::vector<Written> writes;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 4> fetched;
  const auto targets = targetsBehind(traits, stack);
  const bool looksUp = traits.looksUp && isCached(placement.compute) && !tracing();
  const auto reads = looksUp ? bytesLookedUp(traits, stack) : std::nullopt;
  InPlace inPlace;
  replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& argument) -> at::Tensor {
    if (!isOffload(tensor)) return tensor.is_cuda() && !placement.compute.is_cuda() ? tensor.cpu() : at::Tensor();
    if (traits.countsFromStorage && !argument.written && tensor.has_storage() && !tracing())
      return fetchInStorage(tensor, placement.compute);
    const auto target = std::ranges::find_if(targets, [&](const auto& one) { return one.first.is_same(tensor); });
    const ArgumentTraits& as = target == targets.end() ? argument : target->second;
    const bool written = as.written || (as.hidden && hiddenWrites);
    const auto again = std::ranges::find_if(writes, [&](const Written& one) { return one.source.is_same(tensor); });
    // A list may name one twice, and what is read may be what is written; not where that had nothing to be read.
    if (again != writes.end() && (written || !traits.fills)) return again->work;
    if (argument.table && reads && (inPlace.table = lookUp(tensor, placement.compute, *reads)).defined()) return inPlace.table;
    if (written && isOverwritten(traits, placement, tensor)) { // and isn't read
      writes.push_back({tensor, emptyAs(tensor, placement.compute), as, {}});
      return writes.back().work;
    }
    const bool lowered = lower && !as.written && needsLowering(tensor, *lower);
    // An operation may do with one operand what it doesn't with two that are equal. Where it is differentiated each use has a fetch:
    // the gradients of one would be added up before they meet those of other operations.
    const auto known = std::ranges::find_if(fetched, [&](const auto& one) { return one.first.is_same(tensor); });
    const bool differentiated = tensor.requires_grad() && recordsGraph();
    if (known != fetched.end() && !written && !lowered && !differentiated) return known->second;
    auto value = lowered ? fetchLowered(tensor, placement.compute, *lower) : fetch(tensor, placement.compute);
    if (written) {
      writes.push_back({tensor, workFor(value, tensor), as, {}});
      if (isSparse(writes.back().work)) writes.back().parts = partsOf(writes.back().work);
      return writes.back().work;
    }
    const bool saved = !(argument.table && reads);
    if (saved && !value.key_set().has(DispatchKey::FuncTorchGradWrapper)) watch.add(tensor, value);
    if (!lowered) fetched.emplace_back(tensor, value);
    return value;
  });
  useArgumentsOf(placement.compute.type(), traits, stack);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    // Left early, as non-reentrant checkpointing does by a hook once it has what it wants: the kernel had written by then.
    for (const auto& written : writes) keepWritten(written, placement.compute);
    throw;
  }
  if (!placement.toOffload && !tracing()) replaceResults(traits.results, stack, &ownOf);
  if (watch.watches()) watch.finish(resultTensors(traits.results, stack));
  for (const auto& written : writes) copyBack(written, placement.compute);
  replaceResults(traits.results, stack, [&](const at::Tensor& result) {
    for (const auto& written : writes) {
      if (result.is_same(written.work)) return written.source;
    }
    // Of an operation on CUDA too some results are on the CPU: the state of a generator, sizes of a batch.
    if (!placement.toOffload || (placement.compute.is_cuda() && !result.is_cuda())) return result;
    for (const auto& [source, value] : fetched) {
      if (result.is_same(value)) return source;
    }
    return stash(result, placement.home, placement.compute);
  });
}

void runFetched(const c10::OperatorHandle& op, const OpTraits& traits, Placement placement, Stack& stack) {
  const auto lower = loweredTo(traits, placement.compute.type());
  if (!placement.toOffload || !placement.compute.is_cuda()) return callFetched(op, traits, placement, stack, lower);
  const c10::SmallVector<c10::IValue, 8> arguments(
      stack.end() - static_cast<std::ptrdiff_t>(traits.arguments.size()), stack.end());
  try {
    return callFetched(op, traits, placement, stack, lower);
  } catch (const c10::NotImplementedError&) {
    // The paired device has no kernel for it (integer matmul, say).
    countHostFallback(op, bytesOf(arguments));
  }
  stack.assign(arguments.begin(), arguments.end());
  placement.compute = c10::Device(c10::kCPU);
  callFetched(op, traits, placement, stack, {});
}

// What operands inside wrappers are left to is their class, which computes on whatever it finds inside. Autograd takes it that an
// operand's gradient comes from where the operand is.
void bringGradientsHome(const OpTraits& traits, const Placement& placement, Stack& stack) {
  if (placement.toOffload || !recordsGraph()) return;
  bool subclass = false;
  replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& /*argument*/) {
    subclass = subclass || (isOffload(tensor) && isWrapper(tensor));
    return at::Tensor();
  });
  if (!subclass) return;
  replaceTensors(traits, stack, [&](const at::Tensor& tensor, const ArgumentTraits& argument) {
    const bool goes = isOffload(tensor) && tensor.requires_grad() && !argument.written;
    return goes ? withGradientFrom(tensor, placement.compute) : at::Tensor();
  });
}

// Of `_to_copy`: whether it widens values of one byte, which is how packed weights are unpacked. On the device, only what is packed
// has to travel. Values of float8 that an integer can't have are another one's on each device.
bool unpacks(const OpTraits& traits, const Stack& stack) {
  const auto arguments = torch::jit::last(stack, traits.arguments.size());
  const auto to = arguments[1].toOptional<at::ScalarType>();
  const auto from = arguments[0].toTensor().scalar_type();
  if (!to || from == at::kBool || c10::elementSize(from) != 1 || c10::elementSize(*to) == 1) return false;
  return !c10::isFloatingType(from) || !c10::isIntegralType(*to, true);
}

// A copy that changes devices has a kernel of its own, and so has a cast of what was born on the host, unless it unpacks.
bool convertsElsewhere(const OpTraits& traits, const Operands& operands, const Stack& stack) {
  if (!traits.convertsDevice) return false;
  return traits.leavesDevice(stack) || !(operands.deviceBorn || (unpacks(traits, stack) && !HostScope::active()));
}

// A cast that is made here was born on the device, or is a new value.
Effect placedEffect(const OpTraits& traits, const Stack& stack) {
  return traits.convertsDevice || traits.adds(stack) ? Effect::NewValue : traits.effect;
}

void decideBirths(const OpTraits& traits, Stack& stack, Born born) {
  replaceTensors(traits, stack, [born](const at::Tensor& tensor, const ArgumentTraits& argument) {
    if (argument.written && isOffload(tensor)) decideBirth(tensor, born);
    return at::Tensor();
  });
}

void runBelowAutograd(const c10::OperatorHandle& op, const OpTraits& traits, const Operands& operands, Stack& stack) {
  Placement placement = place(operands, placedEffect(traits, stack));
  if (operands.targetUndecided && !traits.fills)
    decideBirths(traits, stack, placement.toOffload && isCached(placement.compute) ? Born::Device : Born::Host);
  if (traits.effect == Effect::InPlace && placement.toOffload && !op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    placement.compute = pairedDevice(placement.home.index()); // where alone there is a kernel for it
  }
  if (traits.effect == Effect::InPlace && !isCached(placement.compute)) {
    runOnHost(op, traits, stack, [&placement](const at::Tensor& result) {
      return placement.toOffload ? stash(result, placement.home, placement.compute) : result;
    });
  } else {
    runFetched(op, traits, placement, stack);
  }
}

Placement placeAboveAutograd(const Operands& operands, Effect effect) {
  if (effect == Effect::Movement && operands.requiresGrad && recordsGraph()) effect = Effect::NewValue;
  return place(operands, effect);
}

/// The kernel that offload tensors would have without ours: that of a backend which nobody has beside CUDA.
///
/// PyTorch keeps a note of each one that it has ever given out, and takes it under no lock: so it is asked once, and by one thread at a
/// time. Kernels of an operation that was defined `late` may come and go; there it is asked at every call.
class KernelBelow {
 public:
  KernelBelow(DispatchKey key, bool late) : key_(key), late_(late) {}

  void callBoxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    std::shared_ptr<const c10::SafeKernelFunction> kernel;
    {
      static ForkMutex mutex(ForkRank::Other);
      const std::lock_guard lock(mutex);
      if (!known_ || late_) known_ = std::make_shared<const c10::SafeKernelFunction>(op.getComputedKernelForDispatchKey(key_));
      kernel = known_;
    }
    kernel->callBoxed(op, keys, stack);
  }

 private:
  const DispatchKey key_;
  const bool late_;
  mutable std::shared_ptr<const c10::SafeKernelFunction> known_;
};

// PyTorch traces some operations (convolutions, cells of recurrent networks) in parts, and alone of these it is still tracing when their
// kernels are called. A fetch between the parts would be traced, too: the graph is to have the operand, which is fetched when it runs.
bool runInTracedParts(const c10::OperatorHandle& op, Stack* stack) {
  if (!torch::jit::tracer::isTracing() || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Tracer)) return false;
  const bool hasParts = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
  if (hasParts) op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  return hasParts;
}

class AutogradKernel final : public c10::OperatorKernel {
 public:
  AutogradKernel(std::shared_ptr<const OpTraits> traits, bool late)
      : traits_(std::move(traits)), late_(late), below_(DispatchKey::AutogradHPU, late) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (watch().isBehind()) watch().catchUp();
    const Operands operands = traits_->operands(*stack);
    if (!operands.offload) return below_.callBoxed(op, keys, stack);
    if (runInTracedParts(op, stack)) return;
    if (operands.wrapped) {
      // Of a composite one the parts come by.
      const bool recorded = operands.foreign && operands.requiresGrad && !traits_->composite;
      if (recorded && traits_->effect != Effect::InPlace)
        bringGradientsHome(*traits_, place(operands, traits_->effect), *stack);
      return below_.callBoxed(op, keys, stack);
    }
    if (convertsElsewhere(*traits_, operands, *stack)) return below_.callBoxed(op, keys, stack);
    // Its parts are intercepted. A write is made whole where its target was born, not in parts here and there.
    const bool late = late_ && op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    // Activations stay on the GPU, whatever their type is taken from. What is on the CPU beside it goes where the other one is.
    const bool goes =
        traits_->goesToOther && operands.cpu && !operands.cuda && pairedDevice(operands.index).is_cuda() && !tracing();
    const bool whole = (operands.foreign && !goes) || (traits_->effect == Effect::InPlace && !late);
    if ((traits_->takenApart(*stack) || late) && !whole) return below_.callBoxed(op, keys, stack);
    const Placement placement = placeAboveAutograd(operands, placedEffect(*traits_, *stack));
    // PyTorch's own kernel records the derivative of a write and bumps the version; the write itself follows on PrivateUse1.
    // Beside tensors of the device that computes it is written on what is fetched; while tracing always, as the fake tensors below see
    // two devices.
    const bool fetched = isCached(placement.compute) || recordsGraph() || tracing();
    if (traits_->effect == Effect::InPlace && (placement.toOffload || !fetched)) {
      // A composite one has none, and is traced in its parts.
      const bool recorded = recordsGraph() && operands.requiresGrad;
      if (!traits_->composite || tracing() || recorded || anyHasMore(*traits_, *stack))
        return below_.callBoxed(op, keys, stack);
      return runBelowAutograd(op, *traits_, operands, *stack);
    }
    runFetched(op, *traits_, placement, *stack);
  }

 private:
  const std::shared_ptr<const OpTraits> traits_;
  const bool late_;
  const KernelBelow below_;
};

// Autocast casts what is on its own device only. So offload operands beside others are fetched above it, once there are any: then its
// own kernel casts all operands by its own lists, on the device. Offload operands alone have no key of its, and are fetched below.
class AutocastKernel final : public c10::OperatorKernel {
 public:
  AutocastKernel(const c10::OperatorHandle& op, DispatchKey key)
      : traits_(op), below_(op.getComputedKernelForDispatchKey(key)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const Operands operands = traits_.operands(*stack);
    if (!operands.offload || operands.wrapped || traits_.effect == Effect::InPlace) {
      return below_.callBoxed(op, keys, stack);
    }
    runFetched(op, traits_, placeAboveAutograd(operands, placedEffect(traits_, *stack)), *stack);
  }

 private:
  const OpTraits traits_;
  const c10::SafeKernelFunction below_;
};

class BackendKernel final : public c10::OperatorKernel {
 public:
  BackendKernel(std::shared_ptr<const OpTraits> traits, bool late)
      : traits_(std::move(traits)), below_(DispatchKey::HPU, late), composed_(DispatchKey::AutogradHPU, late) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const Operands operands = traits_->operands(*stack);
    if (runInTracedParts(op, stack)) return;
    // In inference mode a composite operation comes here first, and so does a cast.
    if (convertsElsewhere(*traits_, operands, *stack)) {
      return below_.callBoxed(op, keys, stack);
    }
    const bool whole = operands.foreign || traits_->effect == Effect::InPlace;
    if (traits_->takenApart(*stack) && !whole) return composed_.callBoxed(op, keys, stack);
    runBelowAutograd(op, *traits_, operands, *stack);
  }

 private:
  const std::shared_ptr<const OpTraits> traits_;
  const KernelBelow below_;
  const KernelBelow composed_;
};

// Compressed and nested tensors elsewhere are operands beside offload ones as any are; in a call with autograd they are served above.
void layoutFallback(const c10::OperatorHandle& op, Stack* stack) {
  const OpTraits traits(op);
  const Operands operands = traits.operands(*stack);
  const auto& name = op.schema().name();
  const bool makes = op.hasKernelForDispatchKey(DispatchKey::BackendSelect);
  const bool copies = name.starts_with("offload::") || name.starts_with("aten::_copy_from");
  if (!operands.offload || !operands.foreign || makes || copies) refuseLayoutOf(op, *stack);
  refuseNested(op, *stack, traits.effect == Effect::InPlace, operands.requiresGrad && at::GradMode::is_enabled());
  runBelowAutograd(op, traits, operands, *stack);
}

// For operations that were defined later and are called before the watch has caught up.
void backendFallback(const c10::OperatorHandle& op, Stack* stack) {
  watch().catchUp();
  const OpTraits traits(op);
  runBelowAutograd(op, traits, traits.operands(*stack), *stack);
}

template <class Kernel, class... Arguments>
c10::KernelFunction boxed(Arguments&&... arguments) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::forward<Arguments>(arguments)...));
}

OperationWatch::Kernels kernelsFor(const c10::OperatorHandle& op, bool late) {
  if (!isInterceptable(op)) return {};
  auto traits = std::make_shared<const OpTraits>(op);
  OperationWatch::Kernels kernels;
  if (late || op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::Autograd)) {
    kernels.emplace_back(DispatchKey::AutogradPrivateUse1, boxed<AutogradKernel>(traits, late));
  }
  kernels.emplace_back(DispatchKey::PrivateUse1, boxed<BackendKernel>(traits, late));
  if (op.hasKernelForDispatchKey(DispatchKey::SparseCPU) && !op.hasKernelForDispatchKey(DispatchKey::SparsePrivateUse1)) {
    kernels.emplace_back(DispatchKey::SparsePrivateUse1, boxed<BackendKernel>(traits, late));
  }
  // Where there is a kernel for nested tensors, PyTorch takes the composite one beside operands of another backend.
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
      op.hasKernelForDispatchKey(DispatchKey::NestedTensorCPU)) {
    kernels.emplace_back(DispatchKey::NestedTensorPrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&layoutFallback>());
  }
  return kernels;
}

OperationWatch& watch() {
  static auto* instance = new OperationWatch(&kernelsFor);
  return *instance;
}

} // namespace

std::size_t interceptOperations() {
  return watch().catchUp();
}

void interceptAutocast() {
  const compat::QuietRegistration quiet;
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>(); // as long as the dispatcher
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const auto key : {DispatchKey::AutocastCUDA, DispatchKey::AutocastCPU}) {
      if (!op->hasKernelForDispatchKey(key) || op->isKernelFallthroughKernel(key)) continue;
      auto kernel = boxed<AutocastKernel>(*op, key);
      registered->push_back(dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "torch_offload"));
    }
  }
}

// Autocast's work for offload tensors is done by the device that they are fetched to.
OFFLOAD_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

OFFLOAD_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&backendFallback>());
}

OFFLOAD_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&layoutFallback>());
}

OFFLOAD_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&layoutFallback>());
}

OFFLOAD_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&backendFallback>());
}

} // namespace offload
