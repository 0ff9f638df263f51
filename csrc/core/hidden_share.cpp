#include "core/hidden_share.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr double kUnnoticed = 0.01; // of a forward's or backward's time
constexpr double kGrowth = 1.05;
constexpr double kLeastGrowth = 0.005;
constexpr int kRemembered = 8; // steps that were learned from

double part(double exposed, double whole) {
  return whole > 0 ? std::clamp(exposed / whole, 0.0, 1.0) : 0;
}

} // namespace

bool HiddenShare::take(std::size_t bytes) {
  if (share_ >= 1) return true;
  due_ += share_ * static_cast<double>(bytes);
  if (due_ < static_cast<double>(bytes)) return false;
  due_ -= static_cast<double>(bytes);
  return true;
}

void HiddenShare::learn(const SavedStep& step) {
  if (step.candidates == 0) return;
  if (++learned_ % kRemembered == 0) tooMuch_ = 2;
  const double forward = part(step.forwardExposed, step.forward);
  const double backward = part(step.backwardExposed, step.backward);
  if (std::max(forward, backward) <= kUnnoticed) {
    const double halfway = tooMuch_ > 1 ? 1 : (share_ + tooMuch_) / 2;
    waited_ = false;
    proved_ = std::max(proved_, share_);
    share_ = std::max(share_, std::min(kGrowth * share_ + kLeastGrowth, halfway));
    return;
  }
  const double before = share_;
  if (!std::exchange(waited_, true) && proved_ >= 0) {
    share_ = std::min(share_, proved_);
    if (before > share_) tooMuch_ = std::min(tooMuch_, before);
    return;
  }
  proved_ = -1;
  const double exposed = std::max(forward * static_cast<double>(step.up), backward * static_cast<double>(step.down));
  const double hidden = std::max(0.0, static_cast<double>(step.sent) - exposed);
  share_ = std::min(share_, hidden / static_cast<double>(step.candidates));
  tooMuch_ = std::min({tooMuch_, before, kGrowth * share_ + kLeastGrowth});
}

} // namespace offload
