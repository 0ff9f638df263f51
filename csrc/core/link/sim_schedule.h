// The queues of the simulation's streams, and the seeded choice of what runs next.
//
// Note [The simulation's schedule]
// - Nothing runs when it is enqueued (unless `maxPending` operations wait already: memory is finite, as real launch queues
//   are). Operations run on the thread that wants to see an effect, for as long as it must wait and no longer.
// - The head of a queue may run when the event that it waits for has happened. Any such head may be next: all legal orders can
//   occur.
// - The caller holds the link's mutex, passes it in, and gets it back. Only the users' code (host tasks and kernels) runs
//   without it. Its stream is busy meanwhile, so that another thread can't run the stream's next operation; it runs other
//   streams, or waits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "core/link/sim_races.h"
#include "core/link/sim_random.h"

namespace offload {

/// How far a thread that waits for an event lets the rest of the simulation run.
enum class SimBias {
  Seeded, ///< one of the others or a mixture, chosen anew for each call
  Late, ///< only what the event needs
  Eager, ///< anything that may run
};

/// One place in a stream at which an event was recorded.
struct Recording {
  Actor stream = hostActor;
  VectorClock clock;
  bool happened = false;
  std::uint64_t when = 0; // how many operations had run by then
};
using RecordingPtr = std::shared_ptr<Recording>;

struct Operation {
  ActionPtr action;
  std::function<void()> effect;
  RecordingPtr awaits = nullptr; ///< The operation may run once this has happened.
  bool usersCode = false;
};

class SimSchedule {
 public:
  using Lock = std::unique_lock<std::mutex>;

  SimSchedule(std::uint64_t seed, SimBias bias, std::size_t maxPending);

  /// Streams are numbered like their actors, in the order of these calls.
  void addStream();
  void enqueue(Lock& lock, Operation operation);
  /// Runs an operation that belongs to no queue.
  void runNow(Lock& lock, Operation operation);

  void runUntil(Lock& lock, const RecordingPtr& recording);
  /// Runs one operation, if one may run.
  bool step(Lock& lock);
  void runAll(Lock& lock);

  SimRandom& random() {
    return random_;
  }
  /// Sequence number of the oldest operation that has not run to its end.
  std::uint64_t oldestPending() const;
  /// A digest of which operations ran, in their order.
  std::uint64_t trace() const {
    return trace_;
  }
  /// How many have begun to run.
  std::uint64_t ran() const {
    return ran_;
  }

 private:
  struct Queue {
    std::deque<Operation> operations; // the head stays here while it runs
    bool busy = false;
  };

  bool runnable(const Queue& queue) const;
  Queue* anyRunnable();
  Queue* neededBy(const Recording* recording);
  void runHead(Lock& lock, Queue& queue);
  void run(Lock& lock, Operation& operation);

  SimRandom random_;
  SimBias bias_;
  std::size_t maxPending_;
  std::size_t pending_ = 0;
  std::uint64_t ran_ = 0;
  std::uint64_t trace_ = 0xcbf29ce484222325U;
  std::deque<Queue> queues_; // by actor; the host's stays empty. A deque, because a busy queue must not move.
  std::condition_variable progress_;
};

} // namespace offload
