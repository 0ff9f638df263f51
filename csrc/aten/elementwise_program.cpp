#include "aten/elementwise_program.h"

#include "aten/context.h"
#include "aten/tensors.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace offload {
namespace {

// One for each Block; to write where any of its operands is written to.
std::vector<Residency::Claim> claimsOf(const std::vector<at::Tensor>& operands, const std::vector<bool>& written) {
  std::vector<Residency::Claim> claims;
  for (std::size_t k = 0; k < operands.size(); ++k) {
    if (operands[k].storage().nbytes() == 0) continue;
    Block& block = blockOf(operands[k].storage());
    auto claim = std::ranges::find(claims, &block, &Residency::Claim::block);
    if (claim == claims.end()) claim = claims.insert(claim, {&block, Access::Read});
    if (written[k]) claim->access = Access::Write;
  }
  return claims;
}

// Elements [begin, begin + count) of dense memory, in the order in which they lie there.
at::Tensor pieceOf(const at::Tensor& dense, std::int64_t begin, std::int64_t count) {
  auto piece = tensorOver(dense.storage(), c10::kCPU, dense, dense.storage_offset() + begin);
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
  }
}

bool ElementwiseProgram::fits(const std::vector<at::Tensor>& operands) {
  return std::all_of(operands.begin(), operands.end(), [&operands](const at::Tensor& operand) {
    const at::Tensor& first = operands.front();
    return isOffload(operand) && operand.layout() == c10::kStrided && operand.has_storage() && !operand.is_conj() &&
        !operand.is_neg() && !operand.unsafeGetTensorImpl()->is_python_dispatch() && operand.sizes() == first.sizes() &&
        operand.strides() == first.strides() && operand.is_non_overlapping_and_dense();
  });
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
  const auto claims = claimsOf(operands, written);
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& operand : operands) aliases.push_back(hostAlias(operand));
  Context& context = Context::get();
  if (context.hasCache()) {
    auto owners = std::make_shared<std::vector<c10::DataPtr>>();
    for (const auto& claim : claims) owners->push_back(Context::retain(*claim.block));
    context.residency().runLater(
        claims, [program, aliases, owners, pieceElements] { program->runPieces(aliases, pieceElements); });
  } else {
    std::vector<HostLease> leases;
    for (const auto& [block, access] : claims) leases.push_back(context.lease(*block, access));
    program->runPieces(aliases, pieceElements);
  }
  for (std::size_t k = 0; k < wanted; ++k) {
    if (written[k]) operands[k].unsafeGetTensorImpl()->bump_version();
  }
}

void ElementwiseProgram::runPieces(const std::vector<at::Tensor>& aliases, std::int64_t pieceElements) const {
  const std::int64_t elements = aliases.front().numel();
  const std::int64_t pieces = (elements + pieceElements - 1) / pieceElements;
  at::parallel_for(0, pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView belowAutograd;
    std::vector<at::Tensor> memory = aliases;
    for (const c10::ScalarType type : temporaries_) memory.push_back(at::empty({pieceElements}, type));
    std::vector<at::Tensor> registers(memory.size());
    torch::jit::Stack stack;
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t from = piece * pieceElements;
      const std::int64_t count = std::min(pieceElements, elements - from);
      for (std::size_t k = 0; k < memory.size(); ++k) registers[k] = pieceOf(memory[k], k < operands_ ? from : 0, count);
      for (const ElementwiseStep& step : steps_) {
        stack = step.arguments;
        for (const auto& [argument, source] : step.registers) stack[argument] = registers[source];
        step.op.callBoxed(&stack);
      }
    }
  });
}

} // namespace offload
