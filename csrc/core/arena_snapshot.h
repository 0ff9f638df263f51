// What an Arena's regions consist of, at one moment.
#pragma once

#include "core/arena_ranges.h"

namespace offload {

struct ArenaPiece {
  enum class State : std::uint8_t {
    Allocated,
    Pending, // given back, and a copy still uses it
    Free,
  };
  HostAddress begin = 0;
  std::size_t bytes = 0;
  State state = State::Free;
};

/// The pieces fill it, in order. Those of a slab are its objects.
struct ArenaSegment {
  HostAddress begin = 0;
  std::size_t bytes = 0;
  HostKind kind = HostKind::Pageable;
  std::vector<ArenaPiece> pieces;
};

} // namespace offload
