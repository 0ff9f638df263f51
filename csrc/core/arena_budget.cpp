#include "core/arena_budget.h"

#include <algorithm>

namespace offload {
namespace {

// Our own bytes are counted at once; what others take in this time is not seen.
constexpr auto kFresh = std::chrono::milliseconds(50);

std::size_t minus(std::size_t from, std::size_t what) {
  return from - std::min(from, what);
}

std::size_t plus(std::size_t one, std::size_t two) {
  return two > SIZE_MAX - one ? SIZE_MAX : one + two;
}

} // namespace

bool ArenaBudget::stale() const {
  return !read_ || std::chrono::steady_clock::now() - *read_ > kFresh;
}

void ArenaBudget::refresh(const MemoryLimits& memory, Before before) {
  memory_ = memory;
  lockedThen_ = minus(before.settled, left_ - before.left);
  read_ = std::chrono::steady_clock::now();
}

std::size_t ArenaBudget::room(Bound bound) const {
  switch (bound) {
    case Bound::Setting:
      return minus(setting_, locked_);
    case Bound::Total:
      return minus(memory_.total / 100 * 85, locked_);
    case Bound::Available:
      return minus(minus(plus(memory_.available, lockedThen_), memory_.total / 20), locked_);
    case Bound::Driver:
      return minus(refused_, plus(locked_, refused_ < SIZE_MAX ? 1 : 0));
  }
  return 0;
}

std::size_t ArenaBudget::room() const {
  return std::min({room(Bound::Setting), room(Bound::Total), room(Bound::Available), room(Bound::Driver)});
}

void ArenaBudget::add(std::size_t bytes) {
  locked_ += bytes;
  unsettled_ += bytes;
}

void ArenaBudget::settle(std::size_t bytes) {
  unsettled_ -= bytes;
}

void ArenaBudget::leave(std::size_t bytes) {
  unsettled_ += bytes;
  left_ += bytes;
}

void ArenaBudget::remove(std::size_t bytes) {
  locked_ -= bytes;
  unsettled_ -= bytes;
}

void ArenaBudget::refuse(std::size_t bytes) {
  refused_ = std::min(refused_, locked_ + bytes);
}

void ArenaBudget::forget() {
  refused_ = SIZE_MAX;
  read_.reset();
}

std::size_t ArenaBudget::most() const {
  return plus(memory_.total, memory_.swap);
}

std::string ArenaBudget::refusal(std::size_t bytes) const {
  Bound least = Bound::Setting;
  for (const Bound bound : {Bound::Total, Bound::Available, Bound::Driver}) {
    if (room(bound) < room(least)) least = bound;
  }
  const std::string total = std::to_string(memory_.total);
  auto why = [&]() -> std::string {
    switch (least) {
      case Bound::Setting:
        return "the limit that was set is " + std::to_string(setting_) + "; raise TORCH_OFFLOAD_PINNED_LIMIT";
      case Bound::Total:
        return "85 % of the " + total + " bytes of memory of this machine or container is the most; give it more";
      case Bound::Available:
        return "the " + std::to_string(memory_.available) + " bytes available (of " + total +
            ") leave no room; free host memory, or give this machine or container more";
      case Bound::Driver:
        break;
    }
    return "the system or the driver refused to lock " + std::to_string(minus(refused_, locked_)) +
        " more; free tensors, or raise the limit of the system or container on locked memory";
  };
  return "offload: " + std::to_string(bytes) +
      " bytes of host memory could not be page-locked and are pageable, which makes copies to and from them slower: " +
      std::to_string(locked_) + " bytes are page-locked, and " + why() + ".";
}

} // namespace offload
