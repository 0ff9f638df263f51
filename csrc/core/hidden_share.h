// Which share of the bytes that a step saves can cross the link while the device computes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace offload {

/// What one step was seen to do. Times are in seconds; exposed is the part in which the device waited for saved bytes.
struct SavedStep {
  double forward = 0;
  double forwardExposed = 0;
  double backward = 0;
  double backwardExposed = 0;
  std::size_t candidates = 0; // bytes that might have gone
  std::size_t late = 0; // and those that would still have been under way at the end of forward
  std::size_t sent = 0; // those that went
  bool forced = false; // more had to go than by the share
  std::size_t up = 0; // bytes that the link carried home in forward, whatever they were
  std::size_t down = 0; // and to the device in backward
};

/// Note [The hidden share]
/// The first steps best send everything, which needs the least memory. A step in which the device waited for the link tells how much too
/// much that was: while it waited, the link carried what the next step had better keep. A step that didn't wait raises the share a
/// little, up to halfway to what is held to be too much: the share that was, or a little more than was hidden then. So where nothing
/// changes, it closes in on the largest share that is hidden. Where a step waits after some that didn't, the share falls back to
/// theirs, as the step may just have stumbled; a second one in a row tells. What is held to be too much is forgotten after a while,
/// as programs change.
///
/// Where no more than so many bytes may stay, what a step saves beyond must go, whatever that costs. It is spread evenly too, by how much
/// the last step has saved; where this one saves more, the rest of it goes as it comes. A step that had to send more than the share
/// tells nothing of what is hidden where it waited, and else that all it sent is.
///
/// What would leave with the end of forward frees nothing by then, and is in the way of what backward wants first. So the last of
/// what a step saves stays, by how much the step before it has saved: as much as would be under way then, but no more than
/// an eighth; meanwhile what was sent before may leave. Where more has to go than is hidden nothing stays for that: the link should
/// carry something all the time. Not thread safe.
class HiddenShare {
 public:
  /// `first` is the share of the first step.
  explicit HiddenShare(double first = 1) : share_(first) {}
  /// From 0 to 1.
  double share() const {
    return std::max(share_, demanded_);
  }
  /// The least share by which no more stays than may.
  double demanded() const {
    return demanded_;
  }
  /// Whether more of this step had to go than by what is held to be hidden.
  bool forced() const {
    return forced_;
  }
  /// A step begins. `underWay` is how much may be sent and not have left: 0 if that is not to be looked at. `mayStay` is how much may
  /// stay on the device.
  void begin(std::size_t underWay = 0, std::size_t mayStay = SIZE_MAX);
  enum class Next { Goes, Stays, Late };
  /// Of these bytes, which are the next that might go; `memory` is what their going frees, which may be more, and `room` how much may
  /// stay still. Those that go are spread evenly, and begin anew in each step.
  Next take(std::size_t bytes, std::size_t memory, std::size_t room = SIZE_MAX);
  /// How much of this step would still have been sent.
  std::size_t left() const;
  void learn(const SavedStep& step);

 private:
  double share_;
  double demanded_ = 0;
  double tooMuch_ = 2; // the least share that is held to be: none
  double proved_ = -1; // the largest share that is known to be hidden: none
  bool waited_ = false; // in the last step
  double due_ = 0;
  bool sent_ = false; // in this step
  std::size_t offered_ = 0; // in this step
  std::size_t expected_ = 0; // as many as the last one offered
  std::size_t memory_ = 0; // that was offered in this step
  std::size_t late_ = 0; // of what is expected, the last that stays
  bool forced_ = false;
  int learned_ = 0;
};

} // namespace offload
