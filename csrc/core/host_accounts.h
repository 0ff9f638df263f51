// How many host bytes there are of each purpose.
#pragma once

#include "core/block_history.h"
#include "core/fork_mutex.h"

#include <vector>

namespace offload {

struct AccountStats {
  std::size_t bytes = 0;
  std::size_t bytesPeak = 0;
  std::size_t count = 0; // of Blocks
  std::size_t countPeak = 0;
  /// Of all that there has been since resetEver(). What is gone is the difference to what there is.
  std::size_t bytesEver = 0;
  std::size_t countEver = 0;
};

struct AccountsStats {
  const AccountStats& of(Purpose purpose) const noexcept {
    return purposes[static_cast<std::size_t>(purpose)];
  }

  AccountStats all; // but for files
  AccountStats files; // Blocks that are bytes of files, until somebody writes to them
  std::array<AccountStats, kPurposes.size()> purposes;
};

/// Every Block is on one account from open() to close(). At any moment those of the purposes add up to all there is. A Block that is claimed
/// moves as it is: the peak of the account that it leaves keeps what it has been, because it was counted there, while of all that has
/// been it counts where it came to be. So these add up, too. The first write to a Block of a file is another matter: it takes memory
/// then, so it goes from the files and comes to its purpose.
class HostAccounts {
 public:
  void open(Block& block);
  void close(const Block& block) noexcept;
  /// Raises the purpose of an open Block; nothing where it is no lower. Does not wait for the device.
  void claim(Block& block, Purpose purpose);
  /// An open Block has memory of its own from now on, and is its file's no more. Calls nobody.
  void written(Block& block) noexcept;

  AccountsStats stats() const;
  /// Of the parameters and files, of Blocks on one device, as there are now.
  std::size_t parameterBytes(int device) const;
  /// Makes every peak the current value.
  void resetPeaks();
  /// What there is now is all that there has been.
  void resetEver();

  /// Keeps the last `most` events from now on, or, with 0, ends that; see BlockHistory.
  void recordHistory(std::size_t most);
  std::vector<BlockEvent> history() const;

 private:
  AccountStats& of(const Block& block);
  std::size_t& parametersOn(int device);
  void add(const Block& block);
  void remove(const Block& block) noexcept;
  void each(void (*reset)(AccountStats&));

  mutable ForkMutex mutex_{ForkRank::Accounts};
  AccountsStats stats_;
  std::vector<std::size_t> parameters_; // bytes, by device
  BlockHistory history_;
};

} // namespace offload
