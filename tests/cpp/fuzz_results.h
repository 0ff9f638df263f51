// What kernels of a random program write: results, and in place. Included by fuzz_program.h.
#pragma once

#include "fuzz_program.h"

namespace offload::core_test {

inline void Program::adopt() {
  adopt(model());
}

inline void Program::store() {
  Model& to = model();
  if (to.beingWritten()) return;
  const Range part = range(to);
  const Stream producer = stream();
  const Bytes result = value(part.bytes);
  const DeviceBuffer borrowed = rig_.newResult(producer, result);
  const bool knewTheRest = std::exchange(to.known, false) || part.bytes == to.bytes.size();
  rig_.cache.store(*to.block, {part.begin, part.begin + part.bytes}, borrowed.data, producer);
  to.known = knewTheRest;
  to.set(part, result);
  if (choices_.oneIn("writesAgain", 2)) {
    rig_.writeOnDevice(producer, borrowed.data, value(part.bytes));
  }
}

/// The model of the Block whose newest bytes a Pin shows.
inline std::vector<Model>::iterator Program::sourceOf(const Held& held) {
  Block* const block = rig_.cache.retainSource(held.pin);
  if (block != nullptr) --block->owners;
  return std::ranges::find(models_, block, [](const Model& model) { return model.block.get(); });
}

inline bool Program::isShownElsewhere(const Held& held) const {
  const auto* const begin = static_cast<const std::byte*>(held.pin.data());
  return std::ranges::any_of(pins_, [&](const Held& other) {
    const auto* const data = static_cast<const std::byte*>(other.pin.data());
    return &other != &held && data < begin + held.bytes && begin < data + other.bytes;
  });
}

/// What was fetched is changed where it is and comes home, as by a function of the user's; but not where it has been written since.
inline void Program::changeInPlace() {
  const auto held = pick();
  if (held == pins_.end() || isShownElsewhere(*held)) return;
  const auto found = sourceOf(*held);
  if (found != models_.end() && (found->beingWritten() || found->other)) return;
  const Stream on = held->streams.front();
  for (int k = 0; k < 3; ++k) rig_.order(streams_[static_cast<std::size_t>(3 * on.device + k)], on);
  rig_.cache.beforeChange(held->pin, on);
  const Bytes result = value(held->bytes);
  rig_.writeOnDevice(on, held->pin.data(), result);
  for (const Stream other : held->streams) {
    if (other != on) rig_.order(on, other);
  }
  held->expected = std::make_shared<std::optional<Bytes>>(result);
  const bool known = found != models_.end() && std::exchange(found->known, false);
  rig_.cache.bringHome(held->pin, on);
  if (found == models_.end()) return;
  found->known = known;
  found->set({held->begin, held->bytes}, result);
  ++changedInPlace_;
}

/// The memory of a result whose Block is gone, where nobody else sees it.
inline void Program::takeBack() {
  const std::size_t index = choices_.below("block", models_.size());
  Model& from = models_[index];
  if (from.lease || from.foreign || from.other) return;
  const Stream on = stream();
  const Stream other = streamOf(on.device);
  const Bytes result = value(from.bytes.size());
  from.known = false;
  rig_.cache.adopt(*from.block, rig_.newResult(on, result), on);
  from.bytes = result;
  from.known = true;
  Pin pin = rig_.cache.fetch(*from.block, {0, result.size()}, choices_.oneIn("elsewhere", 4) ? other : on);
  Pin second;
  if (choices_.oneIn("othersRead", 2)) {
    second = rig_.cache.fetch(*from.block, {0, result.size()}, other);
    const void* const seen = second.data();
    rig_.sim.launch(
        other, [=, this] { check(std::memcmp(seen, result.data(), result.size()) == 0, "a kernel read other bytes"); },
        {{seen, result.size()}}, {});
  }
  if (choices_.oneIn("theyLetGo", 2)) second = {};
  forget(index);
  void* const data = pin.data();
  const auto owner = rig_.cache.takeBack(pin, on);
  if (!owner) return;
  check(!pin, "a Pin still holds what was taken back");
  rig_.writeOnDevice(on, data, value(result.size()));
  ++takenBack_;
}

} // namespace offload::core_test
