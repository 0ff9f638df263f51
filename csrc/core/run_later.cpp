// Work on host bytes that is done while the program goes on: Note [Host jobs].
#include "core/residency.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr std::size_t kMostJobs = 4096; // not done yet
constexpr std::size_t kMostKept = std::size_t{1} << 30; // bytes that nobody but jobs keeps, as far as they have been counted

// By what it writes to first.
Observation workOn(const std::vector<Residency::Claim>& claims) {
  const auto written = std::ranges::find(claims, Access::Write, &Residency::Claim::access);
  const Block& block = *(written != claims.end() ? *written : claims.front()).block;
  return {Activity::HostWork, -1, block.data, block.bytes, block.purpose, block.derivedFrom};
}

} // namespace

void Residency::runLater(std::vector<Claim> claims, std::function<void()> work) {
  const auto audited = audit("runLater");
  hostErrors_.raise();
  if (claims.empty()) return work();
  HostJobs::Job job;
  for (const auto& [block, access] : claims) {
    if (access == Access::Write) {
      prepareForWrite(*block);
    } else if (block->file) {
      block->file->prepare(access);
    }
    job.blocks.push_back(block);
  }
  auto after = std::make_shared<std::vector<Token>>();
  job.run = [this, claims, after, work = std::move(work)]() mutable { runJob(claims, *after, std::move(work)); };
  limitJobs(claims);
  if (claim(claims, job, *after)) return;
  jobs_.drain(); // of those on the same Blocks that came before
  job.run();
  hostErrors_.raise();
}

// All of them at once, or two threads could each wait for what the other has claimed; and with the job, for whoever waits for it to
// find. While a Block is claimed nobody else copies it, so what the claim before has waited for is all that there is to wait for.
// Who holds a lease, or shares the bytes from another process, sees them without asking: for him it must be done at once.
bool Residency::claim(const std::vector<Claim>& claims, HostJobs::Job& job, std::vector<Token>& after) {
  Lock lock(mutex_);
  sendAllHome(lock, job.blocks, true);
  bool seen = false;
  for (const auto& [block, access] : claims) {
    seen = seen || block->leases > 0 || block->shared;
    expectRead(*block);
    block->writers.appendTo(after);
    if (access == Access::Write) block->readers.appendTo(after);
  }
  job.after = after;
  ++claimsMade_;
  for (const auto& [block, access] : claims) {
    ++block->issuing;
    ++block->claims;
    block->writing += access == Access::Write;
  }
  return !seen && jobs_.submit(job);
}

// The newest bytes of all of these, at once, are the host's, and nobody is about to copy any; but for jobs, where that is said.
void Residency::sendAllHome(Lock& lock, std::span<const Block* const> blocks, bool behindJobs) {
  for (bool changed = true; changed;) {
    changed = false;
    for (const Block* block : blocks) {
      if (block->issuing > (behindJobs ? block->claims : 0)) {
        awaitIssued(lock, *block);
        changed = true;
      }
      while (auto dirty = dirtyOf(*block)) {
        writeHome(lock, dirty);
        awaitIssued(lock, *block);
        changed = true;
      }
    }
  }
}

// A program that makes tensors, has the host add them to something and lets go of them may be faster than the host.
void Residency::limitJobs(const std::vector<Claim>& claims) {
  bool tooMany = jobs_.stats().pending >= kMostJobs;
  {
    const Lock lock(mutex_);
    for (const auto& [block, access] : claims) claimedBytes_ += block->bytes;
    if (claimedBytes_ > kMostKept) {
      claimedBytes_ = 0;
      std::size_t kept = 0;
      for (const Block* block : jobs_.pendingBlocks()) {
        // Every claim is an owner's.
        if (block->owners.load(std::memory_order_relaxed) <= block->claims) kept += block->bytes;
      }
      tooMany = tooMany || kept > kMostKept;
    }
  }
  if (tooMany) jobs_.drain();
}

void Residency::runJob(const std::vector<Claim>& claims, const std::vector<Token>& after, std::function<void()> work) noexcept {
  const auto within = options_.observer != nullptr ? options_.observer->enterHostWork() : nullptr;
  try {
    for (const Token& token : after) token.wait();
    for (const auto& [block, access] : claims) link_.hostAccess(block->data, block->bytes, access);
    const auto span = observe(workOn(claims));
    work();
  } catch (const std::exception& error) {
    hostErrors_.keep(error.what());
  }
  for (const auto& [block, access] : claims) {
    if (access == Access::Write) markWritten(*block);
  }
  {
    const Lock lock(mutex_);
    for (const auto& [block, access] : claims) {
      block->writers.prune();
      block->readers.prune();
      --block->issuing;
      --block->claims;
      block->writing -= access == Access::Write;
    }
  }
  issued_.notify_all();
  for (const auto& [block, access] : claims) goOnAhead(*block);
  work = nullptr; // what it keeps may go, and Slots with it
}

} // namespace offload
