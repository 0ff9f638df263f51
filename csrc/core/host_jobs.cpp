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

bool HostJobs::Entry::isNext() const {
  return std::all_of(before.begin(), before.end(), [](const EntryPtr& other) { return other->done; });
}

bool HostJobs::submit(const Job& job) noexcept {
  const Lock lock(mutex_);
  ++submitted_;
  if (when_ == When::AtOnce) return false;
  try {
    auto entry = std::make_shared<Entry>(Entry{job, submitted_, {}});
    for (const Block* block : job.blocks) {
      const auto at = last_.try_emplace(block).first; // what is empty is as good as none
      if (at->second) entry->before.push_back(at->second);
    }
    if (when_ == When::Soon && !thread_.joinable()) thread_ = std::thread([this] { work(); });
    entry->place = queue_.insert(queue_.end(), entry);
    for (const Block* block : job.blocks) last_[block] = entry;
  } catch (...) {
    return false; // no memory, or no thread
  }
  changed_.notify_all();
  return true;
}

bool HostJobs::want(const Block& block) {
  const Lock lock(mutex_);
  return mark(block) && when_ == When::Wanted;
}

HostJobs::EntryPtr HostJobs::mark(const Block& block) {
  const auto last = last_.find(&block);
  if (last == last_.end() || !last->second) return nullptr;
  last->second->wanted = true;
  anyWanted_ = true;
  EntryPtr first;
  // Whatever comes before an entry is further in front.
  for (auto at = queue_.rbegin(); at != queue_.rend(); ++at) {
    if (!(*at)->wanted) continue;
    for (const EntryPtr& other : (*at)->before) other->wanted = true;
    first = *at;
  }
  return first;
}

HostJobs::Lock HostJobs::takeTurn() {
  Lock turn(turn_, std::try_to_lock);
  if (!turn.owns_lock()) hostWait([&turn] { turn.lock(); });
  return turn;
}

std::unordered_set<const Block*> HostJobs::pendingBlocks() {
  const Lock lock(mutex_);
  std::unordered_set<const Block*> blocks;
  for (const EntryPtr& entry : queue_) blocks.insert(entry->job.blocks.begin(), entry->job.blocks.end());
  return blocks;
}

void HostJobs::runFor(const Block& block) {
  const Lock turn = takeTurn();
  Lock lock(mutex_);
  while (EntryPtr first = mark(block)) run(lock, std::move(first));
}

void HostJobs::drain() {
  if (when_ == When::Wanted) {
    const Lock turn = takeTurn();
    Lock lock(mutex_);
    const std::uint64_t last = submitted_;
    while (!queue_.empty() && queue_.front()->number <= last) run(lock, queue_.front());
    return;
  }
  std::uint64_t last = 0;
  const auto isDone = [this, &last] {
    return (queue_.empty() || queue_.front()->number > last) && (!busy_ || busy_->number > last);
  };
  {
    const Lock lock(mutex_);
    last = submitted_;
    if (isDone()) return;
  }
  hostWait([&] {
    Lock lock(mutex_);
    changed_.wait(lock, isDone);
  });
}

HostJobStats HostJobs::stats() {
  const Lock lock(mutex_);
  return {submitted_, queue_.size() + (busy_ ? 1 : 0)};
}

// One runs at a time: the thread's, or by turns.
void HostJobs::run(Lock& lock, EntryPtr entry) {
  queue_.erase(entry->place);
  busy_ = entry;
  lock.unlock();
  entry->job.run();
  entry->job.run = nullptr; // what it holds may call the cache when it goes
  entry->job.after.clear();
  lock.lock();
  busy_ = nullptr;
  entry->done = true;
  entry->before.clear();
  for (const Block* block : entry->job.blocks) {
    const auto last = last_.find(block);
    if (last != last_.end() && (last->second == entry || !last->second)) last_.erase(last);
  }
  changed_.notify_all();
}

void HostJobs::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    run(lock, next(lock));
  }
}

HostJobs::EntryPtr HostJobs::next(Lock& lock) {
  const EntryPtr first = queue_.front();
  std::vector<EntryPtr> candidates;
  const auto add = [&](bool wanted) {
    bool any = false;
    for (const EntryPtr& entry : queue_) {
      if (candidates.size() == kMostAsked) break;
      any = any || entry->wanted;
      if (entry->wanted == wanted && entry->isNext()) candidates.push_back(entry);
    }
    return any || candidates.size() == kMostAsked;
  };
  if (anyWanted_) anyWanted_ = add(true);
  add(false);
  lock.unlock();
  const auto found =
      std::find_if(candidates.begin(), candidates.end(), [](const auto& entry) { return !isHeldUp(entry->job); });
  EntryPtr result = found == candidates.end() ? first : *found;
  candidates.clear();
  lock.lock();
  return result;
}

} // namespace offload
