// What a random program does next. Included by fuzz_program.h.
#pragma once

#include <array>

#include "fuzz_program.h"

namespace offload::core_test {

// What comes next; by name, so that it stays the same in kept programs.
inline std::string_view Program::draw(SimRandom& random) const {
  if (batches_ && models_.size() < 4 * kMostBlocks) return "addBlock";
  if (models_.empty() || (models_.size() < kMostBlocks && random.oneIn(8))) return "addBlock";
  if (shared_ && random.oneIn(4)) return "meet";
  if (saved_ && random.oneIn(2)) return std::array{"giveUpLeaving", "fetchAhead", "save", "save"}[random.below(4)];
  if (jobs_ && random.oneIn(3)) return "writeLater";
  if (updates_ && random.oneIn(2)) return std::array{"updateThere", "updateThere", "changeThere"}[random.below(3)];
  if (ordered_ && !random.oneIn(batches_ ? 20 : 5)) return "fetchNext";
  switch (random.below(32)) {
    case 0 ... 7:
      return "fetch";
    case 8 ... 10:
      return "read";
    case 11:
      return "readInPlace";
    case 12 ... 15:
      return "drop";
    case 16 ... 17:
      return "adopt";
    case 18 ... 20:
      return "store";
    case 21 ... 22:
      return "hostRead";
    case 23 ... 25:
      return "hostWrite";
    case 26:
      return "holdLease";
    case 27:
      return std::array{"alsoUse", "fetchAhead", "changeInPlace", "takeBack"}[random.below(4)];
    case 28:
      return "forget";
    case 29:
      return "giveUp";
    case 30:
      return "setRing";
    default:
      return random.oneIn(2) ? "changeBehindItsBack" : "trim";
  }
}

} // namespace offload::core_test
