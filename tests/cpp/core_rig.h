// What the tests of core share: an Arena and a Residency over the simulated link, and Blocks that go back by themselves.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "core/error.h"
#include "core/link/fault_link.h"
#include "core/link/sim_link.h"
#include "core/residency.h"

namespace offload::core_test {

using Bytes = std::vector<unsigned char>;

/// A value of its own for each `tag`, in which no two places of a few hundred bytes look alike.
inline Bytes pattern(std::uint64_t tag, std::size_t bytes) {
  SimRandom random(tag);
  Bytes out(bytes);
  for (auto& byte : out) {
    byte = static_cast<unsigned char>(random.next());
  }
  return out;
}

inline ArenaOptions smallRegions() {
  ArenaOptions options;
  options.sharedRegionBytes = 1 << 16;
  options.ownRegionBytes = 1 << 15;
  options.validate = true;
  return options;
}

/// Without a budget, unless a test asks for one; every call of every test is followed by a walk of all invariants.
inline ResidencyOptions ringOnly() {
  ResidencyOptions options;
  options.budgetBytes = 0;
  options.lookInterval = {};
  options.validate = true;
  return options;
}

struct CoreOptions {
  SimOptions sim{};
  ResidencyOptions cache = ringOnly();
  ArenaOptions arena = smallRegions();
};

inline CoreOptions budgetAndSeed(std::size_t budget, std::uint64_t seed = 0) {
  CoreOptions options{{.seed = seed}};
  options.cache.budgetBytes = budget;
  return options;
}

template <class OuterLink = FaultLink>
struct BasicRig {
  explicit BasicRig(CoreOptions options = {})
      : sim(options.sim), link(sim), arena(&link, options.arena), cache(link, options.cache) {}

  /// Gives a Block's memory back the way that the glue does.
  struct Return {
    BasicRig* rig;
    void operator()(Block* block) const {
      auto pending = rig->cache.forget(*block);
      if (block->shared) {
        rig->arena.keepAlive(std::move(block->shared), std::move(pending));
      } else if (block->file) {
        rig->arena.keepAlive(block->file, std::move(pending));
      } else {
        rig->arena.free(block->data, std::move(pending));
      }
      delete block;
    }
  };
  using BlockPtr = std::unique_ptr<Block, Return>;

  BlockPtr newBlock(std::size_t bytes, Born born = Born::Host, bool locked = true) {
    const HostRange range = arena.allocate(bytes, locked);
    const BlockKind kind = range.pinned ? BlockKind::Pinned : BlockKind::Pageable;
    return {new Block(range.data, bytes, kind, born, 0), Return{this}};
  }
  BlockPtr newBlock(const Bytes& value) {
    BlockPtr block = newBlock(value.size());
    write(*block, value);
    return block;
  }
  BlockPtr fileBlock(std::shared_ptr<File> file, std::uint64_t offset, std::size_t bytes) {
    auto part = std::make_shared<FileBytes>(std::move(file), offset, bytes);
    auto* block = new Block(part->data(), bytes, BlockKind::Foreign, Born::Host, 0);
    block->file = std::move(part);
    return {block, Return{this}};
  }

  BlockPtr newSharedBlock(std::shared_ptr<SharedMemory> memory) {
    BlockPtr block(new Block(memory->data(), memory->bytes(), BlockKind::Shared, memory->born(), 0), Return{this});
    block->seenVersion = memory->version();
    block->shared = std::move(memory);
    return block;
  }
  BlockPtr newSharedBlock(const Bytes& value) {
    BlockPtr block = newSharedBlock(arena.share(value.size(), Born::Host));
    write(*block, value);
    return block;
  }

  void write(Block& block, const Bytes& value, std::size_t at = 0) {
    const HostLease lease = cache.lease(block, Access::Write);
    std::byte* const host = static_cast<std::byte*>(lease.data()) + at;
    sim.hostAccess(host, value.size(), Access::Write);
    std::memcpy(host, value.data(), value.size());
  }
  Bytes read(Block& block) {
    const HostLease lease = cache.lease(block, Access::Read);
    sim.hostAccess(lease.data(), block.bytes, Access::Read);
    const auto* const host = static_cast<const unsigned char*>(lease.data());
    return {host, host + block.bytes};
  }

  /// Enqueues a kernel that copies `bytes` device bytes into what is returned, for when the simulation has been drained.
  std::shared_ptr<Bytes> readOnDevice(Stream stream, const void* device, std::size_t bytes) {
    auto seen = std::make_shared<Bytes>(bytes);
    sim.launch(stream, [=] { std::memcpy(seen->data(), device, bytes); }, {{device, bytes}}, {});
    return seen;
  }
  void writeOnDevice(Stream stream, void* device, const Bytes& value) {
    const auto body = [=] { std::copy(value.begin(), value.end(), static_cast<unsigned char*>(device)); };
    sim.launch(stream, body, {}, {{device, value.size()}});
  }
  /// Device memory that a kernel fills with `value`; it belongs to somebody else, as a tensor's does.
  DeviceBuffer newResult(Stream stream, const Bytes& value) {
    void* const data = sim.allocate(value.size(), stream);
    writeOnDevice(stream, data, value);
    ++owned;
    return {data, value.size(), stream, std::shared_ptr<void>(data, [this, stream](void* memory) {
              sim.free(memory, stream);
              --owned;
            })};
  }
  void order(Stream first, Stream second) {
    const Event event = sim.createEvent(first.device);
    sim.record(event, first);
    sim.wait(second, event);
    sim.destroyEvent(event);
  }

  /// Destroyed when the Arena and the Residency have been: by then all of theirs is given back.
  struct NothingLeft {
    const SimLink& sim;
    const OuterLink& link;
    const bool& lost;
    const bool& mayKeep;
    std::uint64_t*& failures;
    ~NothingLeft() {
      if (failures != nullptr) *failures = link.failures();
      EXPECT_EQ(sim.reports(), std::vector<std::string>());
      if (lost) return;
      const LinkUse left = link.use();
      EXPECT_EQ(left.streams, 0);
      EXPECT_EQ(left.events, 0);
      EXPECT_TRUE(left.lockedBytes == 0 || (mayKeep && link.failures() > 0)) << left.lockedBytes;
      for (int device = 0; device < sim.deviceCount(); ++device) EXPECT_EQ(sim.bytesInUse(device), 0U);
    }
  };

  std::atomic<int> owned{0}; // buffers of newResult() that have not been released
  bool lost = false; // set where the device is lost for good: what it can't vouch for is kept
  bool mayKeep = false; // page-locked bytes, where a call that fails leaves it open whether they are still used
  std::uint64_t* failuresAtTheEnd = nullptr; // where to tell how many calls failed, the destructors' included
  SimLink sim;
  OuterLink link;
  NothingLeft nothingLeft{sim, link, lost, mayKeep, failuresAtTheEnd};
  Arena arena;
  Residency cache;
};
using Rig = BasicRig<>;

/// Every test of order runs with each of these.
inline constexpr std::uint64_t kSeeds = 100;

} // namespace offload::core_test
