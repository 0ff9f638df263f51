// The one state of the process: which Link there is, the Arena and the Residency on it, and the Blocks of storages.
#pragma once

#include "core/arena.h"
#include "core/fork_mutex.h"
#include "core/host_accounts.h"
#include "core/link/fault_link.h"
#include "core/residency.h"

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

namespace offload {

inline constexpr c10::DeviceType kOffload = c10::DeviceType::PrivateUse1;

/// What computes on offload tensors.
enum class Backend {
  Host, // nothing beside the CPU: operations run on the host bytes in place
  Cuda,
  Sim, // the simulated link; CPU tensors play CUDA's part
};

struct Settings {
  std::string link = "auto"; // "auto", "cuda", "sim" or "none"
  std::uint64_t seed = 0; // of the simulation
  int simDevices = 1; // that it plays
  std::optional<std::size_t> ringBytes; // none: chosen from the device's memory
  std::string budget = "auto"; // as budgetOf() reads it
  std::size_t pinnedLimit = SIZE_MAX;
  bool evictAtUnpin = false;
  bool prefetch = true;
  bool poison = false;
  std::chrono::microseconds copyDelay{0};
  bool validate = false;
  std::optional<HostJobs::When> hostJobs; // none: soon, and as late as may be where the link is simulated, which repeats itself
  std::optional<std::uint64_t> fault; // the call of the Link that fails; 0 none, but one may be chosen later

  /// From TORCH_OFFLOAD_LINK, _SEED, _SIM_DEVICES, _RING_BYTES, _BUDGET, _PINNED_LIMIT, _EVICT, _PREFETCH, _POISON, _COPY_DELAY_US,
  /// _VALIDATE, _HOST_JOBS and _FAULT.
  static Settings fromEnvironment();
};

class Context {
 public:
  /// Made at first use and never destroyed: tensors may outlive every static. Throws in a child of fork() whose parent used it.
  static Context& get();
  /// Calls `task` once, when the Context is made.
  static void atFirstUse(std::function<void()> task);
  /// Null before first use; for what must not create one (statistics, deleters, exit).
  static Context* ifCreated() noexcept;
  /// Whether there is one that this process may use: not in a child of fork() for which get() throws.
  static bool inUse() noexcept;

  Backend backend() const noexcept {
    return backend_;
  }
  /// The type of the tensors that a fetch for computing gives: CUDA, or CPU.
  c10::DeviceType computeType() const noexcept {
    return backend_ == Backend::Cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  }
  /// Whether fetches go through the cache; otherwise they are aliases of the host bytes.
  bool hasCache() const noexcept {
    return residency_ != nullptr;
  }
  Residency& residency() const noexcept {
    return *residency_;
  }
  Arena& arena() const noexcept {
    return *arena_;
  }
  Link* link() const noexcept {
    return faults_ ? faults_.get() : link_.get();
  }
  /// What fails calls of the Link; null unless TORCH_OFFLOAD_FAULT is set.
  FaultLink* faults() const noexcept {
    return faults_.get();
  }
  /// Memory of a device that fetches go to; 0 where there is no cache.
  std::size_t deviceBytes() const noexcept {
    return deviceBytes_;
  }
  /// The stream that work of the calling thread goes to now.
  Stream currentStream(c10::DeviceIndex index) const;

  /// Host memory for a storage of `offload:index`. The DataPtr owns the Block.
  c10::DataPtr newBlock(
      std::size_t bytes, c10::DeviceIndex index, Born born, Purpose purpose = Purpose::Temporary, bool locked = true);
  /// The same over memory of somebody else, which `owner` keeps alive.
  c10::DataPtr foreignBlock(
      void* data, std::size_t bytes, c10::DeviceIndex index, std::shared_ptr<void> owner, Purpose purpose = Purpose::Temporary);
  /// The same over memory of several processes.
  c10::DataPtr sharedBlock(std::shared_ptr<SharedMemory> memory, c10::DeviceIndex index, Purpose purpose = Purpose::Temporary);
  /// One more owner of a Block, which lives until all have gone: a storage may get another one while something reads the old.
  static c10::DataPtr retain(Block& block);
  /// For one who has been counted as an owner already.
  static c10::DataPtr owned(Block& block);
  /// The same over bytes of a file.
  c10::DataPtr fileBlock(std::shared_ptr<FileBytes> file, std::size_t bytes, c10::DeviceIndex index);

  /// The Block whose host bytes begin at an address; null if there is none.
  Block* blockAt(const void* data) const;
  struct BlockInfo {
    std::size_t bytes;
    Purpose purpose;
  };
  /// All Blocks, by where their host bytes begin.
  std::unordered_map<const void*, BlockInfo> blocks() const;
  /// Host bytes of all Blocks, whoever's memory it is, and what they are for.
  HostAccounts& accounts() noexcept {
    return accounts_;
  }
  const HostAccounts& accounts() const noexcept {
    return accounts_;
  }

  /// Takes the right to read or to write host bytes; an empty lease where there is nothing to keep true. Throws Error where the
  /// bytes are a file's that has changed.
  HostLease lease(Block& block, Access access) const;

  /// Waits for every copy; `close` at interpreter exit, after which nothing touches the device any more.
  void drain(bool close) const;

  /// Whether its context is a Block.
  static bool ownsBlock(const c10::DataPtr& data) noexcept {
    return data.get_deleter() == &deleteBlock;
  }

 private:
  explicit Context(const Settings& settings);
  HostRange allocate(std::size_t bytes, bool locked);
  c10::DataPtr listed(Block* block);
  static void deleteBlock(void* context) noexcept;

  Backend backend_ = Backend::Host;
  std::unique_ptr<Link> link_;
  std::unique_ptr<FaultLink> faults_;
  std::size_t deviceBytes_ = 0;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Residency> residency_;
  mutable ForkMutex blocksMutex_{ForkRank::Blocks};
  std::unordered_map<const void*, Block*> blocks_;
  HostAccounts accounts_;
};

/// The number of devices `offload:i`: one for each CUDA device, at least one; on the simulated link as many as that plays. Does
/// not touch the GPU.
c10::DeviceIndex deviceCount() noexcept;

/// The Block behind an offload storage; an error for a storage of any other device.
Block& blockOf(const c10::StorageImpl& storage);
inline Block& blockOf(const c10::Storage& storage) {
  return blockOf(*storage.unsafeGetStorageImpl());
}

} // namespace offload
