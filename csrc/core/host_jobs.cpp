#include "core/host_jobs.h"

#include "core/host_wait.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr std::size_t kMostAsked = 16; // jobs, whether something holds them up

bool isHeldUp(const HostJobs::Job& job) noexcept {
  try {
    return !std::all_of(job.after.begin(), job.after.end(), [](const Token& token) { return token.done(); });
  } catch (...) {
    return false; // it will find out why
  }
}

} // namespace

HostJobs::~HostJobs() {
  drain();
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool HostJobs::submit(const Job& job) noexcept {
  const Lock lock(mutex_);
  ++submitted_;
  if (when_ == When::AtOnce) return false;
  try {
    if (when_ == When::Soon && !thread_.joinable()) thread_ = std::thread([this] { work(); });
    queue_.push_back(std::make_shared<Entry>(Entry{job}));
  } catch (...) {
    return false; // no memory, or no thread
  }
  changed_.notify_all();
  return true;
}

std::function<void()> HostJobs::want(const Block& block) {
  const Lock lock(mutex_);
  const auto at = std::find_if(queue_.begin(), queue_.end(), [&block](const auto& entry) {
    const auto& blocks = entry->job.blocks;
    return std::find(blocks.begin(), blocks.end(), &block) != blocks.end();
  });
  if (at == queue_.end()) return {};
  (*at)->wanted = true;
  if (when_ == When::Soon) return {};
  std::function<void()> run = std::move((*at)->job.run);
  queue_.erase(at);
  return run;
}

void HostJobs::drain() {
  if (when_ == When::Wanted) {
    for (;;) {
      std::shared_ptr<Entry> first;
      {
        const Lock lock(mutex_);
        if (queue_.empty()) return;
        first = std::move(queue_.front());
        queue_.pop_front();
      }
      first->job.run();
    }
  }
  const auto isIdle = [this] { return queue_.empty() && !busy_; };
  {
    const Lock lock(mutex_);
    if (isIdle()) return;
  }
  hostWait([&] {
    Lock lock(mutex_);
    changed_.wait(lock, isIdle);
  });
}

HostJobStats HostJobs::stats() {
  const Lock lock(mutex_);
  return {submitted_, queue_.size() + (busy_ ? 1 : 0)};
}

// The thread's: nobody else takes what is queued.
void HostJobs::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::shared_ptr<Entry> entry = next(lock);
    queue_.remove(entry);
    busy_ = true;
    lock.unlock();
    entry->job.run();
    entry.reset();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

std::shared_ptr<HostJobs::Entry> HostJobs::next(Lock& lock) {
  const auto first = queue_.front();
  std::vector<std::shared_ptr<Entry>> candidates;
  for (const bool wanted : {true, false}) {
    for (const auto& entry : queue_) {
      if (entry->wanted == wanted && candidates.size() < kMostAsked) candidates.push_back(entry);
    }
  }
  lock.unlock();
  const auto found =
      std::find_if(candidates.begin(), candidates.end(), [](const auto& entry) { return !isHeldUp(entry->job); });
  auto result = found == candidates.end() ? first : *found;
  candidates.clear();
  lock.lock();
  return result;
}

} // namespace offload
