// The other process of a random program. Included by fuzz_program.h.
#pragma once

#include "fuzz_program.h"

namespace offload::core_test {

inline void Program::makeShared(Model& model) {
  model.block = rig_.newSharedBlock(rig_.arena.share(model.bytes.size(), Born::Host));
  model.other = std::make_shared<OtherProcess>(*model.block->shared);
  model.known = false;
}

/// Moves a Block to shared memory, or lets the other process use it.
inline void Program::meet() {
  Model& with = model();
  if (with.other) return choices_.oneIn("otherReads", 2) ? otherReads(with) : otherWrites(with);
  if (with.beingWritten()) return;
  HostLease from = rig_.cache.lease(*with.block, Access::Read);
  rig_.sim.hostAccess(from.data(), with.bytes.size(), Access::Read);
  Model moved;
  moved.bytes = with.bytes;
  makeShared(moved);
  std::memcpy(moved.block->data, from.data(), with.bytes.size()); // which nobody else knows of yet
  moved.known = with.known;
  from = {};
  letGo(std::exchange(with, std::move(moved)));
}

/// Every call of ours has left its bytes there.
inline void Program::otherReads(const Model& from) {
  check(!from.known || from.other->sees(from.bytes), "another process read other bytes");
}

/// Who doesn't tell it when his copies are done finds either value, or some of both, in what he has fetched, and never later.
inline void Program::otherWrites(Model& to) {
  rig_.link.fail(0);
  if (choices_.oneIn("drains", 2) || !to.known) {
    rig_.cache.drain(false);
  } else {
    for (const auto& expected : to.copying) expected->reset();
  }
  to.copying.clear();
  const Range part = range(to);
  const Bytes bytes = value(part.bytes);
  to.other->write(bytes, part.begin);
  to.set(part, bytes);
  ++writesOfOthers_;
}

} // namespace offload::core_test
