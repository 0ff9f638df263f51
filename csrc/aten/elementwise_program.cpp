#include "aten/elementwise_program.h"

#include "aten/device_work.h"
#include "aten/float_mode.h"
#include "aten/tensors.h"
#include "core/error.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace offload {
namespace {

// Elements [begin, begin + count) of dense memory, in the order in which they lie there.
at::Tensor pieceOf(const at::Tensor& dense, std::int64_t begin, std::int64_t count) {
  auto piece = tensorOver(dense.storage(), dense.device().type(), dense, dense.storage_offset() + begin);
  piece.unsafeGetTensorImpl()->set_sizes_contiguous(count);
  return piece;
}

} // namespace

ElementwiseProgram::ElementwiseProgram(
    std::size_t operands, std::vector<c10::ScalarType> temporaries, std::vector<ElementwiseStep> steps)
    : operands_(operands), temporaries_(std::move(temporaries)), steps_(std::move(steps)), written_(operands, false) {
  for (const ElementwiseStep& step : steps_) {
    const auto& arguments = step.op.schema().arguments();
    TORCH_CHECK(
        step.arguments.size() == arguments.size(), "offload: a step of an elementwise program gives ", step.arguments.size(),
        " arguments to ", step.op.schema().name(), ", which takes ", arguments.size(), ".");
    bool writes = false;
    for (const auto& [argument, source] : step.registers) {
      TORCH_CHECK(
          argument < arguments.size() && source < operands_ + temporaries_.size(), "offload: a step of ",
          step.op.schema().name(), " takes a register that there is not.");
      if (arguments[argument].alias_info() == nullptr || !arguments[argument].alias_info()->isWrite()) continue;
      writes = true;
      if (source < operands_) written_[source] = true;
    }
    TORCH_CHECK(writes, "offload: a step of ", step.op.schema().name(), " writes to no register.");
    plain_.push_back({plain_.size(), {}});
  }
}

namespace {

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  if (!one.is_alias_of(other)) return false;
  const Extent a = extentOf(one);
  const Extent b = extentOf(other);
  return a.begin < b.end && b.begin < a.end;
}

} // namespace

bool ElementwiseProgram::fits(const std::vector<at::Tensor>& operands) {
  if (operands.empty()) return true;
  const auto alike = [&first = operands.front()](const at::Tensor& operand) {
    return isOffload(operand) && operand.layout() == c10::kStrided && operand.has_storage() && !operand.is_conj() &&
        !operand.is_neg() && !operand.unsafeGetTensorImpl()->is_python_dispatch() && operand.sizes() == first.sizes() &&
        operand.strides() == first.strides() && operand.is_non_overlapping_and_dense();
  };
  const auto apart = [&operands](const at::Tensor& operand) {
    return std::ranges::none_of(
        operands, [&operand](const at::Tensor& other) { return &other != &operand && overlap(operand, other); });
  };
  return std::ranges::all_of(operands, alike) && std::ranges::all_of(operands, apart);
}

void ElementwiseProgram::run(
    std::shared_ptr<const ElementwiseProgram> program, const std::vector<at::Tensor>& operands, std::int64_t pieceElements) {
  const std::size_t wanted = program->operands_;
  TORCH_CHECK(
      operands.size() == wanted && pieceElements > 0 && fits(operands), "offload: an elementwise program takes ", wanted,
      " dense offload tensors of one size and strides, and pieces of at least one element; it was given ", operands.size(),
      " tensors, the first of shape ", operands.empty() ? at::IntArrayRef() : operands.front().sizes(), ", and pieces of ",
      pieceElements, ".");
  if (operands.empty()) return;
  const std::vector<bool>& written = program->written_;
  std::vector<HostOperand> named;
  for (std::size_t k = 0; k < wanted; ++k) named.push_back({operands[k], written[k]});
  const auto bumpVersions = [&] {
    for (std::size_t k = 0; k < wanted; ++k) {
      if (written[k]) operands[k].unsafeGetTensorImpl()->bump_version();
    }
  };
  bool there = false;
  try {
    there = doOnDevice(named, [&program](const auto& tensors) { program->runThere(tensors); });
  } catch (...) {
    bumpVersions(); // some of it may have been done
    throw;
  }
  if (!there) {
    std::vector<at::Tensor> aliases;
    for (const at::Tensor& operand : operands) aliases.push_back(hostAlias(operand));
    doOnHost(named, [program, aliases = std::move(aliases), pieceElements] { program->runPieces(aliases, pieceElements); });
  }
  bumpVersions();
}

void ElementwiseProgram::prepare(const std::vector<c10::ScalarType>& types) {
  TORCH_CHECK(prepared_.empty(), "offload: an elementwise program is prepared once.");
  if (steps_.empty()) return;
  std::vector<at::Tensor> operands;
  for (const c10::ScalarType type : types) operands.push_back(at::zeros({1}, type));
  runPieces(operands, 1);
  std::vector<c10::ScalarType> all = types;
  all.insert(all.end(), temporaries_.begin(), temporaries_.end());
  if (!std::ranges::all_of(all, [&all](c10::ScalarType type) { return type == all.front(); })) return;
  std::vector<Part> parts;
  for (std::size_t k = 0; k < steps_.size(); ++k) {
    const VectorStep vector = vectorStep(steps_[k], all.front());
    const bool goesOn = vector.kernel != nullptr && !parts.empty() && !parts.back().vectors.empty();
    if (!goesOn) parts.push_back({k, {}});
    if (vector.kernel != nullptr) parts.back().vectors.push_back(vector);
  }
  prepared_ = std::move(parts);
  preparedFor_ = types;
}

std::size_t ElementwiseProgram::vectorSteps() const {
  std::size_t count = 0;
  for (const Part& part : prepared_) count += part.vectors.size();
  return count;
}

void ElementwiseProgram::runPieces(const std::vector<at::Tensor>& aliases, std::int64_t pieceElements) const {
  const std::int64_t elements = aliases.front().numel();
  const std::int64_t pieces = (elements + pieceElements - 1) / pieceElements;
  const bool asPrepared =
      std::ranges::equal(aliases, preparedFor_, {}, [](const at::Tensor& alias) { return alias.scalar_type(); });
  const std::vector<Part>& parts = asPrepared ? prepared_ : plain_;
  // Whoever is done takes the next piece: of a job beside other work, one core may get half of the time that another does.
  std::atomic<std::int64_t> next{0};
  const std::int64_t threads = std::min<std::int64_t>(pieces, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&, mode = floatMode()](std::int64_t /*begin*/, std::int64_t /*end*/) {
    const FloatMode asCalled(mode); // whichever thread takes an element
    const at::AutoDispatchBelowADInplaceOrView belowAutograd;
    const auto memory = withKeptTemporaries(aliases, pieceElements);
    for (std::int64_t piece = next++; piece < pieces; piece = next++) {
      const std::int64_t from = piece * pieceElements;
      runPiece(parts, memory, from, std::min(pieceElements, elements - from));
    }
  });
}

// All memory is there before the first step, or none has been done.
void ElementwiseProgram::runThere(const std::vector<at::Tensor>& tensors) const {
  const std::int64_t elements = tensors.front().numel();
  const std::int64_t pieceElements = std::min(elements, kDevicePieceElements);
  const at::AutoDispatchBelowADInplaceOrView belowAutograd;
  std::vector<at::Tensor> memory;
  try {
    memory = withTemporaries(tensors, pieceElements);
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory(OutOfMemory::Where::Device, 0, error.what_without_backtrace());
  }
  for (std::int64_t from = 0; from < elements; from += pieceElements) {
    runPiece(plain_, memory, from, std::min(pieceElements, elements - from));
  }
}

std::vector<at::Tensor> ElementwiseProgram::withTemporaries(
    const std::vector<at::Tensor>& operands, std::int64_t elements) const {
  std::vector<at::Tensor> memory = operands;
  for (const c10::ScalarType type : temporaries_) {
    memory.push_back(at::empty({elements}, operands.front().options().dtype(type)));
  }
  return memory;
}

// The same on the host, in memory that the thread keeps for the next parameter: what malloc gets from the system costs a page fault
// every 4 KiB, some hundred microseconds for a parameter.
std::vector<at::Tensor> ElementwiseProgram::withKeptTemporaries(
    const std::vector<at::Tensor>& operands, std::int64_t elements) const {
  thread_local std::vector<at::Tensor> kept; // bytes
  if (elements > kPieceElements) return withTemporaries(operands, elements);
  std::vector<at::Tensor> memory = operands;
  for (const c10::ScalarType type : temporaries_) {
    const std::size_t number = memory.size() - operands.size();
    const auto bytes = elements * static_cast<std::int64_t>(c10::elementSize(type));
    if (number == kept.size()) kept.emplace_back();
    if (!kept[number].defined() || kept[number].numel() < bytes) kept[number] = at::empty({bytes}, at::kByte);
    memory.push_back(kept[number].narrow(0, 0, bytes).view(type));
  }
  return memory;
}

void ElementwiseProgram::runPiece(
    const std::vector<Part>& parts, const std::vector<at::Tensor>& memory, std::int64_t from, std::int64_t count) const {
  const auto begin = [&](std::size_t number) { return number < operands_ ? from : 0; };
  const std::size_t elementBytes = memory.front().element_size(); // of all registers, where vector kernels work on them
  std::vector<std::byte*> addresses;
  for (std::size_t k = 0; k < memory.size() && &parts == &prepared_; ++k) {
    auto* const data = static_cast<std::byte*>(memory[k].mutable_data_ptr());
    addresses.push_back(data + static_cast<std::size_t>(begin(k)) * elementBytes);
  }
  std::vector<at::Tensor> registers(memory.size()); // those that an operation needs
  torch::jit::Stack stack;
  for (const Part& part : parts) {
    if (!part.vectors.empty()) {
      runVectorSteps(part.vectors, addresses, static_cast<std::size_t>(count), elementBytes);
      continue;
    }
    const ElementwiseStep& step = steps_[part.step];
    stack = step.arguments;
    for (const auto& [argument, source] : step.registers) {
      if (!registers[source].defined()) registers[source] = pieceOf(memory[source], begin(source), count);
      stack[argument] = registers[source];
    }
    step.op.callBoxed(&stack);
  }
}

} // namespace offload
