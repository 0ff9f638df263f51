#include "core/host_accounts.h"

#include <algorithm>

namespace offload {
namespace {

void add(AccountStats& account, std::size_t bytes) {
  account.bytes += bytes;
  account.bytesPeak = std::max(account.bytesPeak, account.bytes);
  ++account.count;
  account.countPeak = std::max(account.countPeak, account.count);
  account.bytesEver += bytes;
  ++account.countEver;
}

void remove(AccountStats& account, std::size_t bytes) {
  account.bytes -= bytes;
  --account.count;
}

} // namespace

AccountStats& HostAccounts::of(const Block& block) {
  if (block.file) return stats_.files;
  return stats_.purposes[static_cast<std::size_t>(block.purpose.load(std::memory_order_relaxed))];
}

void HostAccounts::open(const Block& block) {
  const std::lock_guard lock(mutex_);
  if (!block.file) add(stats_.all, block.bytes);
  add(of(block), block.bytes);
  history_.add(block, false);
}

void HostAccounts::close(const Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  if (!block.file) remove(stats_.all, block.bytes);
  remove(of(block), block.bytes);
  history_.add(block, true);
}

void HostAccounts::claim(Block& block, Purpose purpose) {
  if (block.purpose.load(std::memory_order_relaxed) >= purpose) return;
  const std::lock_guard lock(mutex_);
  if (block.purpose.load(std::memory_order_relaxed) >= purpose) return; // another thread was first
  AccountStats& before = of(block);
  remove(before, block.bytes);
  before.bytesEver -= block.bytes;
  --before.countEver;
  block.purpose.store(purpose, std::memory_order_relaxed);
  add(of(block), block.bytes);
}

AccountsStats HostAccounts::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void HostAccounts::recordHistory(std::size_t most) {
  const std::lock_guard lock(mutex_);
  most > 0 ? history_.restart(most) : history_.stop();
}

std::vector<BlockEvent> HostAccounts::history() const {
  const std::lock_guard lock(mutex_);
  return {history_.events().begin(), history_.events().end()};
}

void HostAccounts::resetPeaks() {
  each([](AccountStats& account) {
    account.bytesPeak = account.bytes;
    account.countPeak = account.count;
  });
}

void HostAccounts::resetEver() {
  each([](AccountStats& account) {
    account.bytesEver = account.bytes;
    account.countEver = account.count;
  });
}

void HostAccounts::each(void (*reset)(AccountStats&)) {
  const std::lock_guard lock(mutex_);
  reset(stats_.all);
  reset(stats_.files);
  for (AccountStats& account : stats_.purposes) reset(account);
}

} // namespace offload
