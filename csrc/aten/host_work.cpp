#include "aten/host_work.h"

#include "aten/autocast_copies.h"
#include "aten/captured_graph.h"
#include "aten/float_mode.h"
#include "aten/tensors.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace offload {
namespace {

// One for each Block; to write where any of the operands is written to.
std::vector<Residency::Claim> claimsOf(const std::vector<HostOperand>& operands) {
  std::vector<Residency::Claim> claims;
  for (const auto& [tensor, written] : operands) {
    if (tensor.storage().nbytes() == 0) continue;
    Block& block = blockOf(tensor.storage());
    auto claim = std::ranges::find(claims, &block, &Residency::Claim::block);
    if (claim == claims.end()) claim = claims.insert(claim, {&block, Access::Read});
    if (written) claim->access = Access::Write;
  }
  return claims;
}

} // namespace

void doOnHost(const std::vector<HostOperand>& operands, std::function<void()> work) {
  Context& context = Context::get();
  if (!operands.empty()) refuseHostAccessInCapture(operands.front().tensor.device().index());
  const auto claims = claimsOf(operands);
  if (!context.hasCache()) {
    std::vector<HostLease> leases;
    for (const auto& [block, access] : claims) leases.push_back(context.lease(*block, access));
    return work();
  }
  auto owners = std::make_shared<std::vector<c10::DataPtr>>();
  for (const auto& claim : claims) owners->push_back(Context::retain(*claim.block));
  const auto later = [owners = std::move(owners), work = std::move(work), mode = floatMode(), threads = at::get_num_threads()] {
    if (at::get_num_threads() != threads) at::set_num_threads(threads); // which each thread learns once
    const FloatMode asSubmitted(mode);
    work();
  };
  context.residency().runLater(claims, later);
  renewCopies(operands);
}

} // namespace offload
