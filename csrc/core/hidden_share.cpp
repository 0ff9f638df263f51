#include "core/hidden_share.h"

#include <utility>

namespace offload {
namespace {

constexpr double kUnnoticed = 0.01; // of a forward's or backward's time
constexpr double kGrowth = 1.05;
constexpr double kLeastGrowth = 0.005;
constexpr double kMostLate = 0.125; // of what a step is to send
constexpr int kRemembered = 8; // steps that were learned from

double part(double exposed, double whole) {
  return whole > 0 ? std::clamp(exposed / whole, 0.0, 1.0) : 0;
}

} // namespace

// Steps that are alike send the same, so that their memory is the same; but steps that are too short to send anything add up.
void HiddenShare::begin(std::size_t underWay, std::size_t mayStay) {
  if (std::exchange(sent_, false)) due_ = 0;
  expected_ = std::exchange(offered_, 0);
  underWay_ = underWay;
  demanded_ = 0;
  if (expected_ <= mayStay) return;
  const auto expected = static_cast<double>(expected_);
  const auto most = static_cast<double>(mayStay);
  // What is late stays too.
  const double late = std::min({static_cast<double>(underWay) / (1 - most / expected), kMostLate * expected, most});
  demanded_ = 1 - (most - late) / (expected - late);
}

std::size_t HiddenShare::left() const {
  return static_cast<std::size_t>(share() * static_cast<double>(expected_ - std::min(offered_, expected_)));
}

HiddenShare::Next HiddenShare::take(std::size_t bytes, bool mayStay) {
  offered_ += bytes;
  if (share() >= 1) return Next::Goes;
  const double most = std::min(static_cast<double>(underWay_), kMostLate * share() * static_cast<double>(expected_));
  if (mayStay && offered_ <= expected_ && static_cast<double>(left()) < most) return Next::Late;
  due_ += share() * static_cast<double>(bytes);
  if (mayStay && due_ < static_cast<double>(bytes)) return Next::Stays;
  due_ -= static_cast<double>(bytes);
  sent_ = true;
  return Next::Goes;
}

void HiddenShare::learn(const SavedStep& step) {
  if (step.candidates == 0) return;
  if (++learned_ % kRemembered == 0) tooMuch_ = 2;
  const double forward = part(step.forwardExposed, step.forward);
  const double backward = part(step.backwardExposed, step.backward);
  if (std::max(forward, backward) <= kUnnoticed) {
    const double halfway = tooMuch_ > 1 ? 1 : (share_ + tooMuch_) / 2;
    waited_ = false;
    share_ = std::max(share_, step.demanded);
    proved_ = std::max(proved_, share_);
    share_ = std::max(share_, std::min(kGrowth * share_ + kLeastGrowth, halfway));
    return;
  }
  if (step.demanded > share_) return;
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
