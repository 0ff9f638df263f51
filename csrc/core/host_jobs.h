// Host work that takes long, done while the program goes on.
//
// Note [Host jobs]
// An optimizer's step takes the host milliseconds for each parameter, and the thread that calls it could give the device work
// meanwhile. So it is a job, which has a claim to the Blocks that it reads and writes (Residency::runLater): whoever wants one of
// these waits for the job, and has it done next. Nobody sees any bytes before they are what they would be had the job been done at
// once, and a fetch of a weight waits for its own update alone.
//
// Of the jobs that nothing holds up any more, as a gradient on its way home does, what somebody waits for is done first, and then
// what was submitted first. Where all are held up, that is what was submitted first.
#pragma once

#include "core/token.h"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
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
    std::vector<const Block*> blocks;
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
  /// Somebody is about to wait for a job on this Block: what he has to do for it himself, if anything.
  std::function<void()> want(const Block& block);
  /// Waits for all that has been submitted.
  void drain();
  HostJobStats stats();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Entry {
    Job job;
    bool wanted = false;
  };
  using Queue = std::list<std::shared_ptr<Entry>>;

  void work();
  std::shared_ptr<Entry> next(Lock& lock);

  const When when_;
  std::mutex mutex_; // never held across a call of the Link, nor while a job runs or goes
  std::condition_variable changed_;
  Queue queue_;
  bool busy_ = false;
  std::uint64_t submitted_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

} // namespace offload
