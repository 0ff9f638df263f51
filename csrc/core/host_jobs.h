// Host work that takes long, done while the program goes on.
//
// Note [Host jobs]
// An optimizer's step takes the host milliseconds for each parameter, and the thread that calls it could give the device work
// meanwhile. So it is a job, which has a claim to the Blocks that it reads and writes (Residency::runLater): whoever wants one of
// these waits for the job, and has it done next. Nobody sees any bytes before they are what they would be had the job been done at
// once, and a fetch of a weight waits for its own update alone.
//
// Jobs that share a Block are done in the order in which they were submitted. Of those whose turn it is and that nothing holds up any
// more, as a gradient on its way home does, what somebody waits for comes first, and then what was submitted first. Where all are
// held up, that is what was submitted first.
#pragma once

#include "core/token.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace offload {

struct Block;

struct HostJobStats {
  std::uint64_t submitted = 0;
  std::size_t pending = 0; // or being done
};

class HostJobs {
 public:
  struct Job {
    std::vector<Token> after; // what holds it up; to wait for that is `run`'s affair
    std::vector<const Block*> blocks; // that it reads or writes
    std::function<void()> run; // throws nothing, and waits for no other job
  };

  enum class When {
    AtOnce, // by who submits it
    Wanted, // by who waits for it: for tests, the latest that may be
    Soon, // by a thread
  };

  explicit HostJobs(When when) : when_(when) {}
  /// Does what is left.
  ~HostJobs();
  HostJobs(const HostJobs&) = delete;
  HostJobs& operator=(const HostJobs&) = delete;

  /// False where the caller is to do it, at once. Makes no call of the Link.
  bool submit(const Job& job) noexcept;
  /// Somebody is about to wait for the jobs on this Block, and for those before them. True where he has to do them himself: runFor().
  [[nodiscard]] bool want(const Block& block);
  void runFor(const Block& block);
  /// Waits for all that has been submitted by now.
  void drain();
  /// Of the Blocks of jobs that are not done, each once.
  std::unordered_set<const Block*> pendingBlocks();
  HostJobStats stats();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Entry {
    Job job;
    std::uint64_t number; // as it was submitted
    std::vector<std::shared_ptr<Entry>> before; // with which it shares a Block; cleared when it is done
    bool wanted = false;
    bool done = false;
    std::list<std::shared_ptr<Entry>>::iterator place{}; // in the queue, until it is being done

    bool isNext() const;
  };
  using EntryPtr = std::shared_ptr<Entry>;

  void work();
  EntryPtr next(Lock& lock);
  /// Marks what is wanted; the one of it that was submitted first.
  EntryPtr mark(const Block& block);
  void run(Lock& lock, EntryPtr entry);
  /// Not before whoever has it, who may need the GIL, gives it back.
  Lock takeTurn();

  const When when_;
  std::mutex mutex_; // never held across a call of the Link, nor while a job runs or goes
  std::condition_variable changed_;
  std::mutex turn_; // whose runFor() or drain() it is
  std::list<EntryPtr> queue_; // as they were submitted
  std::unordered_map<const Block*, EntryPtr> last_; // of those that are not done
  bool anyWanted_ = false; // of the queue, or there was
  EntryPtr busy_; // the one that is being done
  std::uint64_t submitted_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace offload
