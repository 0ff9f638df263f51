// What random programs know of their Blocks and Slots, and the other side of memory that is shared between processes.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <optional>

#include "batch_rig.h"

namespace offload::core_test {

using ProgramRig = BasicRig<BatchLink>;

/// What programs have done that others never do.
struct Done {
  std::size_t batches = 0;
  std::size_t writesOfOthers = 0;
  std::size_t updates = 0;
  std::size_t changedInPlace = 0;
  std::size_t takenBack = 0;
  std::size_t readInPlace = 0;
  void add(const Done& more) {
    batches += more.batches;
    writesOfOthers += more.writesOfOthers;
    updates += more.updates;
    changedInPlace += more.changedInPlace;
    takenBack += more.takenBack;
    readInPlace += more.readInPlace;
  }
};

struct Range {
  std::size_t begin;
  std::size_t bytes;
};

/// Has mapped the memory of a Block for itself and has no cache, as a process without a GPU. It tells of its writes by the shared
/// header alone, and the simulation knows nothing of it.
class OtherProcess {
 public:
  explicit OtherProcess(const SharedMemory& memory)
      : memory_(SharedMemory::open(dup(memory.descriptor()))),
        block_(memory_->data(), memory_->bytes(), BlockKind::Shared, memory_->born(), 0) {
    block_.shared = memory_;
  }

  void write(const Bytes& value, std::size_t at) {
    const HostLease lease = HostLease::uncached(block_, Access::Write);
    std::memcpy(static_cast<std::byte*>(lease.data()) + at, value.data(), value.size());
  }
  bool sees(const Bytes& value) {
    const HostLease lease = HostLease::uncached(block_, Access::Read);
    return value.size() == block_.bytes && std::memcmp(lease.data(), value.data(), value.size()) == 0;
  }

 private:
  const std::shared_ptr<SharedMemory> memory_;
  Block block_;
};

struct Model {
  ProgramRig::BlockPtr block;
  Bytes bytes;
  bool known = true; // not after a failure has left the bytes unspecified
  std::shared_ptr<void> foreign; // memory that is not the Arena's
  std::shared_ptr<OtherProcess> other; // of shared memory
  /// What is expected of Slots whose copies from shared memory may be under way.
  std::vector<std::shared_ptr<std::optional<Bytes>>> copying{};
  HostLease lease;
  Access access = Access::Read;

  bool beingWritten() const {
    return lease && access == Access::Write;
  }
  void set(Range part, const Bytes& value) {
    std::copy(value.begin(), value.end(), bytes.begin() + static_cast<std::ptrdiff_t>(part.begin));
    known = known || part.bytes == bytes.size();
  }
  Bytes at(Range part) const {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(part.begin);
    return {begin, begin + static_cast<std::ptrdiff_t>(part.bytes)};
  }
};

struct Held {
  Pin pin;
  std::shared_ptr<std::optional<Bytes>> expected;
  std::size_t bytes;
  std::vector<Stream> streams;
  std::size_t begin = 0; // within the Block
};

} // namespace offload::core_test
