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
  const auto memory = static_cast<double>(std::exchange(memory_, 0));
  const auto most = static_cast<double>(mayStay);
  const auto expected = static_cast<double>(expected_);
  demanded_ = memory > most ? 1 - most / memory : 0;
  forced_ = demanded_ > share_;
  late_ = 0;
  if (forced_ || share_ <= 0) return; // what is sent is more than the link can hide: it should not rest
  const double stay = memory > 0 ? std::max(0.0, most / memory - (1 - share_)) : 1; // as a part, beside what stays by the share
  late_ = static_cast<std::size_t>(
      std::min({static_cast<double>(underWay) / share_, kMostLate * expected, stay / share_ * expected}));
}

std::size_t HiddenShare::left() const {
  return static_cast<std::size_t>(share() * static_cast<double>(expected_ - std::min(offered_, expected_)));
}

HiddenShare::Next HiddenShare::take(std::size_t bytes, std::size_t memory, std::size_t room) {
  offered_ += bytes;
  memory_ += memory;
  if (share() >= 1) return Next::Goes;
  const bool mayStay = memory <= room;
  if (mayStay && offered_ <= expected_ && expected_ - offered_ < late_) return Next::Late;
  due_ += share() * static_cast<double>(bytes);
  const bool due = due_ >= static_cast<double>(bytes);
  if (!due && mayStay) return Next::Stays;
  if (!due) forced_ = true;
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
    if (step.forced)
      share_ = std::clamp(part(static_cast<double>(step.sent), static_cast<double>(step.candidates)), share_, 1.0);
    proved_ = std::max(proved_, share_);
    share_ = std::max(share_, std::min(kGrowth * share_ + kLeastGrowth, halfway));
    return;
  }
  if (step.forced) return;
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
