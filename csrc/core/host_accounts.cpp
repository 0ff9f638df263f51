#include "core/host_accounts.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

bool isParameter(const Block& block) {
  return block.file || block.purpose.load(std::memory_order_relaxed) == Purpose::Parameter;
}

void enter(AccountStats& account, std::size_t bytes) {
  account.bytes += bytes;
  account.bytesPeak = std::max(account.bytesPeak, account.bytes);
  ++account.count;
  account.countPeak = std::max(account.countPeak, account.count);
  account.bytesEver += bytes;
  ++account.countEver;
}

void leave(AccountStats& account, std::size_t bytes) {
  account.bytes -= bytes;
  --account.count;
}

} // namespace

AccountStats& HostAccounts::of(const Block& block) {
  if (block.countsAsFile) return stats_.files;
  return stats_.purposes[static_cast<std::size_t>(block.purpose.load(std::memory_order_relaxed))];
}

// Has a place for every device of a Block that is open.
std::size_t& HostAccounts::parametersOn(int device) {
  const auto index = static_cast<std::size_t>(device);
  if (index >= parameters_.size()) parameters_.resize(index + 1);
  return parameters_[index];
}

void HostAccounts::add(const Block& block) {
  enter(of(block), block.bytes);
  if (isParameter(block)) parametersOn(block.device) += block.bytes;
}

void HostAccounts::remove(const Block& block) noexcept {
  leave(of(block), block.bytes);
  if (isParameter(block)) parametersOn(block.device) -= block.bytes;
}

void HostAccounts::open(Block& block) {
  const std::lock_guard lock(mutex_);
  parametersOn(block.device);
  block.countsAsFile = block.file && block.file->inFile();
  if (!block.countsAsFile) enter(stats_.all, block.bytes);
  add(block);
  history_.add(block, false);
}

void HostAccounts::close(const Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  if (!block.countsAsFile) leave(stats_.all, block.bytes);
  remove(block);
  history_.add(block, true);
}

void HostAccounts::claim(Block& block, Purpose purpose) {
  if (block.purpose.load(std::memory_order_relaxed) >= purpose) return;
  const std::lock_guard lock(mutex_);
  if (block.purpose.load(std::memory_order_relaxed) >= purpose) return; // another thread was first
  AccountStats& before = of(block);
  remove(block);
  before.bytesEver -= block.bytes;
  --before.countEver;
  block.purpose.store(purpose, std::memory_order_relaxed);
  add(block);
}

void HostAccounts::written(Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(block.countsAsFile, false)) return;
  leave(stats_.files, block.bytes);
  enter(stats_.all, block.bytes);
  enter(of(block), block.bytes);
}

AccountsStats HostAccounts::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

std::size_t HostAccounts::parameterBytes(int device) const {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<std::size_t>(device);
  return index < parameters_.size() ? parameters_[index] : 0;
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
