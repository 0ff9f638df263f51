// What an Arena's regions consist of.
#include "arena_rig.h"

namespace offload {
namespace {

using namespace core_test;
using State = ArenaPiece::State;

std::size_t bytesIn(const std::vector<ArenaSegment>& segments, State state) {
  std::size_t bytes = 0;
  for (const ArenaSegment& segment : segments) {
    for (const ArenaPiece& piece : segment.pieces) bytes += piece.state == state ? piece.bytes : 0;
  }
  return bytes;
}

const ArenaPiece& pieceAt(const std::vector<ArenaSegment>& segments, const void* data) {
  for (const ArenaSegment& segment : segments) {
    for (const ArenaPiece& piece : segment.pieces) {
      if (piece.begin == reinterpret_cast<HostAddress>(data)) return piece;
    }
  }
  throw Error("no piece begins there");
}

// The pieces of a segment fill it, in order, and all segments are what is reserved.
void expectWhole(const Arena& arena) {
  std::size_t reserved = 0;
  const auto segments = arena.snapshot();
  for (const ArenaSegment& segment : segments) {
    HostAddress at = segment.begin;
    for (const ArenaPiece& piece : segment.pieces) {
      ASSERT_EQ(piece.begin, at);
      at += piece.bytes;
    }
    ASSERT_EQ(at, segment.begin + segment.bytes);
    reserved += segment.bytes;
  }
  ASSERT_EQ(reserved, arena.stats().reserved);
  ASSERT_EQ(bytesIn(segments, State::Allocated), arena.stats().allocated);
}

TEST(ArenaSnapshot, TellsWhatIsAllocatedPendingAndFree) {
  ArenaRig rig;
  EXPECT_TRUE(rig.arena.snapshot().empty());
  void* const large = rig.arena.allocate(20000).data;
  void* const small = rig.arena.allocate(1000).data;
  void* const gone = rig.arena.allocate(24000).data;
  expectWhole(rig.arena);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), large).bytes, 20480U);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), small).bytes, 1024U); // an object of a slab
  rig.sim.launch(rig.stream, [] {}, {}, {});
  rig.link.answer = false;
  rig.arena.free(gone, {rig.pool.record(rig.stream)});
  expectWhole(rig.arena);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), gone).state, State::Pending);
  EXPECT_EQ(bytesIn(rig.arena.snapshot(), State::Pending), 24064U);
  rig.arena.free(small, {});
  expectWhole(rig.arena);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), large).state, State::Allocated);
  rig.link.answer.reset();
  rig.sim.drain();
  rig.arena.free(large, {});
  rig.arena.trim();
  EXPECT_TRUE(rig.arena.snapshot().empty());
}

TEST(ArenaSnapshot, ObjectsOfASlabAreFreeOneByOne) {
  ArenaRig rig;
  std::vector<void*> objects;
  for (int k = 0; k < 8; ++k) objects.push_back(rig.arena.allocate(512).data);
  rig.arena.free(objects[3], {});
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), objects[3]).state, State::Free);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), objects[3]).bytes, 512U);
  EXPECT_EQ(pieceAt(rig.arena.snapshot(), objects[4]).state, State::Allocated);
  expectWhole(rig.arena);
}

TEST(ArenaSnapshot, IsWholeAfterEveryCallOfARandomProgram) {
  ArenaRig rig;
  SimRandom random(1);
  std::vector<void*> held;
  for (int step = 0; step < 500; ++step) {
    if (held.empty() || random.oneIn(2)) {
      held.push_back(rig.arena.allocate(1 + random.below(random.oneIn(2) ? 3000 : 60000)).data);
    } else {
      const auto at = static_cast<std::ptrdiff_t>(random.below(held.size()));
      std::vector<Token> pending;
      if (random.oneIn(3)) pending.push_back(rig.pool.record(rig.stream));
      rig.arena.free(held[static_cast<std::size_t>(at)], std::move(pending));
      held.erase(held.begin() + at);
    }
    ASSERT_NO_FATAL_FAILURE(expectWhole(rig.arena)) << "step " << step;
  }
}

} // namespace
} // namespace offload
