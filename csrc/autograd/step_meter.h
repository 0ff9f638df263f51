// How long a step's forward and backward take, and how much of that the device waits for saved tensors.
#pragma once

#include "core/hidden_share.h"

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace offload {

/// When the device's current stream comes to what is enqueued next; on the CPU, now.
class Moment {
 public:
  /// Never, so far.
  Moment() = default;
  static Moment now(c10::Device device);
  bool isSet() const {
    return !std::holds_alternative<std::monostate>(at_);
  }
  /// Whether it is over, so that secondsSince() may be asked for.
  bool passed() const;
  double secondsSince(const Moment& earlier) const;

 private:
  using Time = std::chrono::steady_clock::time_point;
  std::variant<std::monostate, Time, c10::Event> at_;
};

/// Tells how much of what steps save may go; each step begins with what is saved first after a backward. It may learn that from how
/// long the device waits in them, and never waits itself: it learns from a step once that is over. Its members may be called from
/// any thread.
class StepMeter {
 public:
  /// Ends with the object; the device's waiting in between counts.
  class Wait {
   public:
    Wait(StepMeter* meter, c10::Device device, bool forward);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    StepMeter* const meter_;
    const c10::Device device_;
    const bool forward_;
    Moment begin_;
  };

  /// Of the first step, and if `learns` is false of all, where more need not go for no more to stay than may.
  StepMeter(double share, bool learns) : learns_(learns), share_(share) {}

  struct Plan {
    double share = 1;
    double demanded = 0; // the least
    SavedStep last; // that was learned from
  };

  /// To be called whenever something is saved in a forward, of which so much memory may stay from now on, before a backward is given it,
  /// and behind that.
  void saving(c10::Device device, std::size_t mayStay);
  void asking(c10::Device device);
  void asked(c10::Device device);
  struct Next {
    bool goes = true;
    /// Where they don't because forward ends soon: what may be under way still.
    std::optional<std::size_t> underWay;
  };
  /// Whether these bytes, which are the next that might go and free so much memory, should, as they must where there is no room for it
  /// to stay; and that they did.
  Next take(std::size_t bytes, std::size_t memory, std::size_t room);
  void sent(std::size_t bytes);
  /// None before there is something that was learned from.
  std::optional<Plan> plan() const;

 private:
  struct Step {
    explicit Step(c10::Device of) : device(of) {}

    c10::Device device;
    Moment begin, turn, end;
    std::vector<std::pair<Moment, Moment>> sends, fetches;
    std::size_t upBefore = 0; // what the link has carried ever
    std::size_t downBefore = 0;
    std::size_t memoryBefore = 0; // of the host
    std::size_t memory = 0;
    SavedStep seen;
  };

  bool isWatched(c10::Device device) const;
  void beginStep(c10::Device device, std::size_t mayStay);
  void learn();

  const bool learns_;
  mutable std::mutex mutex_;
  HiddenShare share_;
  int steps_ = 0;
  bool inBackward_ = true; // or nothing has been saved yet
  std::optional<Step> now_; // where this step is watched
  std::optional<Step> before_; // not learned from yet
  std::optional<SavedStep> learned_;
};

} // namespace offload
