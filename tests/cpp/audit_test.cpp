// The walk of all invariants: that it finds what is broken, and that it is taken after a call.
#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 1000;

/// What the walk says of a cache in which `damage` has been done to a Block with a Slot that nothing pins.
std::string foundAfter(const std::function<void(Block&, Slot&)>& damage, const std::function<void(Block&, Slot&)>& mend) {
  Rig rig;
  const auto block = rig.newBlock(pattern(1, kBytes));
  rig.cache.fetch(*block, {0, kBytes}, rig.sim.createStream(0));
  Slot& slot = *block->slots.at(0);
  damage(*block, slot);
  std::string found;
  try {
    rig.cache.validate();
  } catch (const Error& error) {
    found = error.what();
  }
  mend(*block, slot);
  rig.cache.validate();
  return found;
}

TEST(Audit, FindsWhatIsBroken) {
  const auto keep = std::make_shared<std::shared_ptr<Slot>>();
  EXPECT_NE(foundAfter([](Block& b, Slot&) { b.hostVersion += 1; }, [](Block& b, Slot&) { b.hostVersion -= 1; }), "");
  EXPECT_NE(foundAfter([](Block& b, Slot&) { b.version += 1; }, [](Block& b, Slot&) { b.version -= 1; }), "");
  EXPECT_NE(foundAfter([](Block&, Slot& s) { s.pins += 1; }, [](Block&, Slot& s) { s.pins -= 1; }), "");
  EXPECT_NE(foundAfter([](Block&, Slot& s) { s.buffer.bytes += 1; }, [](Block&, Slot& s) { s.buffer.bytes -= 1; }), "");
  EXPECT_NE(
      foundAfter([](Block&, Slot& s) { s.share = Share::Staying; }, [](Block&, Slot& s) { s.share = Share::Passing; }), "");
  EXPECT_NE(
      foundAfter([](Block&, Slot& s) { s.state = SlotState::Dirty; }, [](Block&, Slot& s) { s.state = SlotState::Clean; }), "");
  EXPECT_NE(foundAfter([](Block&, Slot& s) { s.extent.end += 8; }, [](Block&, Slot& s) { s.extent.end -= 8; }), "");
  EXPECT_NE(foundAfter([](Block& b, Slot&) { b.issuing -= 1; }, [](Block& b, Slot&) { b.issuing += 1; }), "");
  EXPECT_NE(foundAfter([](Block&, Slot& s) { s.device = 1; }, [](Block&, Slot& s) { s.device = 0; }), "");
  EXPECT_NE(
      foundAfter(
          [keep](Block& b, Slot&) {
            *keep = b.slots[0];
            b.slots.clear();
          },
          [keep](Block& b, Slot&) { b.slots.push_back(std::exchange(*keep, nullptr)); }),
      "");
  EXPECT_EQ(foundAfter([](Block&, Slot&) {}, [](Block&, Slot&) {}), "");
}

TEST(AuditDeathTest, EndsTheProcessAfterTheCallThatBrokeSomething) {
  Rig rig;
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(pattern(1, kBytes));
  rig.cache.fetch(*block, {0, kBytes}, stream);
  EXPECT_DEATH(
      {
        block->hostVersion += 1;
        rig.cache.fetch(*block, {0, kBytes}, stream);
      },
      "host bytes are newer than the newest.*after fetch");
}

TEST(Audit, TokensOfASetAreInOrder) {
  SimLink sim;
  const Stream stream = sim.createStream(0);
  EventPool pool(sim);
  TokenSet set;
  for (int i = 0; i < 5; ++i) set.add(pool.record(stream));
  set.add(pool.defer(stream));
  EXPECT_TRUE(set.isOrdered());
  EXPECT_EQ(set.all().size(), 1U);
}

} // namespace
} // namespace offload
