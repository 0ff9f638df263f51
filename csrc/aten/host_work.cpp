#include "aten/host_work.h"

#include "aten/captured_graph.h"
#include "aten/tensors.h"

#include <ATen/Parallel.h>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

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

// On x86 each thread has its own say on whether denormal numbers are flushed to zero (torch.set_flush_denormal()).
#ifdef __SSE__
unsigned floatMode() {
  return _mm_getcsr() & ~unsigned{_MM_EXCEPT_MASK};
}
void setFloatMode(unsigned mode) {
  _mm_setcsr(mode);
}
#else
unsigned floatMode() {
  return 0;
}
void setFloatMode(unsigned /*mode*/) {}
#endif

/// While one lives a thread computes as another one did when it was asked how.
class FloatMode {
 public:
  explicit FloatMode(unsigned mode) : before_(floatMode()) {
    setFloatMode(mode);
  }
  ~FloatMode() {
    setFloatMode(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  const unsigned before_;
};

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
}

} // namespace offload
