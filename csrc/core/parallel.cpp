#include "core/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace offload {
namespace {

constexpr std::chrono::seconds kStay{1};

struct Job {
  const std::function<void()>& work;
  std::size_t open; // how many more threads may join
  std::size_t active = 0;
};

class Crew {
 public:
  void run(std::size_t others, const std::function<void()>& work) {
    Job job{work, others};
    hire(announce(job));
    work();
    std::unique_lock lock(mutex_);
    if (job.open > 0) std::erase(jobs_, &job);
    left_.wait(lock, [&] { return job.active == 0; });
  }

 private:
  // How many more threads it takes.
  std::size_t announce(Job& job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(&job);
    const std::size_t here = std::min(idle_, job.open);
    for (std::size_t i = 0; i < here; ++i) came_.notify_one();
    return job.open - here;
  }

  void hire(std::size_t count) {
    try {
      for (; count > 0; --count) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // Those that there are do it.
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      const bool called = came_.wait_for(lock, kStay, [&] { return !jobs_.empty(); });
      --idle_;
      if (!called) return;
      Job& job = *jobs_.front();
      if (--job.open == 0) jobs_.pop_front();
      ++job.active;
      lock.unlock();
      job.work();
      lock.lock();
      if (--job.active == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::condition_variable left_;
  std::deque<Job*> jobs_; // that threads may still join
  std::size_t idle_ = 0;
};

// Never destroyed, as its threads may be waiting when the process ends. A forked child has none of the threads, and maybe a mutex that
// is locked for ever, so it gets a Crew of its own.
Crew& crew() {
  struct Owned {
    pid_t process;
    Crew crew;
  };
  static std::atomic<Owned*> current{nullptr};
  const pid_t process = getpid();
  Owned* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->process != process) {
    auto* const fresh = new Owned{process, {}};
    if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return fresh->crew;
    delete fresh;
  }
  return found->crew;
}

} // namespace

void inParallel(std::size_t threads, const std::function<void()>& work) {
  if (threads < 2) return work();
  crew().run(threads - 1, work);
}

} // namespace offload
