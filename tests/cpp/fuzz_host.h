// What the host does in a random program, and what is done in the cache in its place. Included by fuzz_program.h.
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

/// A kernel reads host bytes where they are.
inline void Program::readInPlace() {
  Model& from = model();
  if (from.beingWritten()) return;
  const Range part = range(from);
  const Stream on = stream();
  const DeviceLease lease = rig_.cache.leaseToDevice(*from.block, {part.begin, part.begin + part.bytes}, on, part.bytes);
  if (!lease) return;
  auto expected = std::make_shared<std::optional<Bytes>>();
  if (from.known) *expected = from.at(part);
  if (from.other) from.copying.push_back(expected);
  auto body = [this, data = lease.data(), expected] {
    const auto& bytes = *expected;
    check(!bytes || std::memcmp(data, bytes->data(), bytes->size()) == 0, "a kernel read other host bytes");
  };
  rig_.sim.launch(on, std::move(body), {{lease.data(), part.bytes}}, {});
  ++readInPlace_;
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

/// Some of one Block becomes that of another, with some bytes of its own behind it.
inline void Program::writeLater() {
  Model& to = model("to");
  const Model& from = model("from");
  if (to.lease || from.lease) return;
  Block* const target = to.block.get();
  Block* const source = from.block.get();
  const std::size_t taken = choices_.below("taken", 1 + std::min(to.bytes.size(), from.bytes.size()));
  const Bytes own = value(choices_.below("own", 1 + to.bytes.size() - taken));
  std::vector<Residency::Claim> claims{{target, Access::Write}};
  if (source != target) claims.push_back({source, Access::Read});
  rig_.cache.runLater(claims, [this, target, source, taken, own] {
    rig_.sim.hostAccess(source->data, taken, Access::Read);
    rig_.sim.hostAccess(target->data, taken + own.size(), Access::Write);
    auto* const host = static_cast<unsigned char*>(target->data);
    std::memmove(host, source->data, taken);
    std::copy(own.begin(), own.end(), host + taken);
  });
  to.set({0, taken}, from.at({0, taken}));
  to.set({taken, own.size()}, own);
}

/// Some of one Block becomes that of another where the cache has both, or may; whatever fails, all of it is done or nothing.
inline void Program::updateThere() {
  Model& to = model("to");
  const Model& from = model("from");
  if (!from.known || !to.known) return;
  const Stream on = stream();
  const std::size_t taken = choices_.below("taken", 1 + std::min(to.bytes.size(), from.bytes.size()));
  const Bytes own = value(to.bytes.size() - taken);
  std::vector<Residency::Claim> claims{{to.block.get(), Access::Write}};
  if (&from != &to) claims.push_back({from.block.get(), Access::Read});
  const bool done = rig_.cache.updateThere(claims, on, [&](const std::vector<void*>& at) {
    if (choices_.oneIn("refuses", 64)) throw OutOfMemory(OutOfMemory::Where::Device, 1, "no memory");
    auto* const target = static_cast<unsigned char*>(at.front());
    const auto body = [target, source = at.back(), taken, own] {
      std::memmove(target, source, taken);
      std::copy(own.begin(), own.end(), target + taken);
    };
    rig_.sim.launch(on, body, {{at.back(), taken}}, {{target, taken + own.size()}});
  });
  if (!done) return;
  to.set({0, taken}, from.at({0, taken}));
  to.set({taken, own.size()}, own);
  ++updatesDone_;
}

/// A part becomes new where the cache has the whole, and nobody else is using it.
inline void Program::changeThere() {
  Model& to = model("to");
  if (!to.known) return;
  const Stream on = stream();
  const Range part = range(to);
  const Bytes own = value(part.bytes);
  const bool done = rig_.cache.changeThere(*to.block, on, [&](void* data, void* /*owner*/) {
    if (choices_.oneIn("refuses", 16)) return false;
    rig_.writeOnDevice(on, static_cast<std::byte*>(data) + part.begin, own);
    return true;
  });
  if (!done) return;
  check(!to.beingWritten(), "what is leased was changed");
  to.set(part, own);
  ++changedInPlace_;
}

inline void Program::holdLease() {
  Model& of = model();
  if (of.lease) {
    of.lease = {};
    return;
  }
  of.access = choices_.oneIn("reads", 2) ? Access::Read : Access::Write;
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
