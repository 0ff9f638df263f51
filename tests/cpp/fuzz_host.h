// What the host does in a random program. Included by fuzz_program.h.
#pragma once

#include "fuzz_program.h"

namespace offload::core_test {

inline void Program::readHost(const Model& from, Range part) {
  const auto* const host = static_cast<const unsigned char*>(from.block->data) + part.begin;
  rig_.sim.hostAccess(host, part.bytes, Access::Read);
  check(!from.known || std::memcmp(host, from.bytes.data() + part.begin, part.bytes) == 0, "the host read other bytes");
}

inline void Program::writeUnder(Model& to, Range part) {
  const Bytes bytes = value(part.bytes);
  auto* const host = static_cast<unsigned char*>(to.block->data) + part.begin;
  rig_.sim.hostAccess(host, part.bytes, Access::Write);
  std::copy(bytes.begin(), bytes.end(), host);
  to.set(part, bytes);
}

inline void Program::writeHost(Model& to, Range part) {
  const HostLease lease = rig_.cache.lease(*to.block, Access::Write);
  writeUnder(to, part);
}

inline void Program::hostRead() {
  Model& from = model();
  if (from.lease) return readHost(from, range(from));
  const HostLease lease = rig_.cache.lease(*from.block, Access::Read);
  readHost(from, range(from));
}

inline void Program::hostWrite() {
  Model& to = model();
  const Range part = range(to);
  return to.beingWritten() ? writeUnder(to, part) : writeHost(to, part);
}

inline void Program::holdLease() {
  Model& of = model();
  if (of.lease) {
    of.lease = {};
    return;
  }
  of.access = random_.oneIn(2) ? Access::Read : Access::Write;
  of.lease = rig_.cache.lease(*of.block, of.access);
}

inline void Program::changeBehindItsBack() {
  Model& to = model();
  if (to.beingWritten()) return;
  rig_.cache.drain(false);
  const HostLease lease = rig_.cache.lease(*to.block, Access::Read);
  writeUnder(to, range(to));
  rig_.cache.markWritten(*to.block);
}

} // namespace offload::core_test
