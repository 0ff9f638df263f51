// Blocks that are changed in the cache's own memory, and go home behind that.
#include <algorithm>

#include "core_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::uint64_t kSeeds = 20;
constexpr std::size_t kBytes = 1000;

Bytes sum(Bytes one, const Bytes& other) {
  for (std::size_t k = 0; k < one.size(); ++k) one[k] = static_cast<unsigned char>(one[k] + other[k]);
  return one;
}

/// A parameter, what an optimizer keeps of it, and steps that add its gradient to both.
struct Trained {
  explicit Trained(CoreOptions options) : rig(options), stream(rig.sim.createStream(0)) {
    weight = rig.newBlock(pattern(100, kBytes));
    weight->purpose = Purpose::Parameter;
    state = rig.newBlock(Bytes(kBytes, 7));
    truth = pattern(100, kBytes);
    kept = Bytes(kBytes, 7);
  }
  /// As a forward and a backward do: the weight is read, and a gradient made.
  void makeGradient(std::uint64_t tag) {
    {
      const Pin pin = rig.cache.fetch(*weight, {0, kBytes}, stream);
      seen.emplace_back(rig.readOnDevice(stream, pin.data(), kBytes), truth);
    }
    gradient = rig.newBlock(kBytes);
    gradient->purpose = Purpose::Gradient;
    gradient->derivedFrom = weight->data;
    made = pattern(tag, kBytes);
    rig.cache.adopt(*gradient, rig.newResult(stream, made), stream);
  }
  std::vector<Residency::Claim> claims() const {
    return {{weight.get(), Access::Write}, {gradient.get(), Access::Read}, {state.get(), Access::Write}};
  }
  bool step() {
    const bool done = rig.cache.updateThere(claims(), stream, [&](const std::vector<void*>& at) {
      const auto add = [at] {
        for (const std::size_t k : {0, 2}) {
          auto* const target = static_cast<unsigned char*>(at[k]);
          for (std::size_t i = 0; i < kBytes; ++i) {
            target[i] = static_cast<unsigned char>(target[i] + static_cast<const unsigned char*>(at[1])[i]);
          }
        }
      };
      rig.sim.launch(stream, add, {{at[0], kBytes}, {at[1], kBytes}, {at[2], kBytes}}, {{at[0], kBytes}, {at[2], kBytes}});
    });
    if (done) {
      truth = sum(truth, made);
      kept = sum(kept, made);
    }
    return done;
  }
  void check() {
    rig.sim.drain();
    for (const auto& [bytes, value] : seen) EXPECT_EQ(*bytes, value);
    EXPECT_EQ(rig.read(*weight), truth);
    EXPECT_EQ(rig.read(*state), kept);
  }
  std::uint64_t sentHome() {
    return rig.cache.transferStats(0).bytesToHost;
  }

  Rig rig;
  const Stream stream;
  Rig::BlockPtr weight, state, gradient;
  Bytes truth, kept, made;
  std::vector<std::pair<std::shared_ptr<Bytes>, Bytes>> seen;
};

TEST(UpdateThere, StepsGoHomeAndNothingComesBack) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Trained trained(budgetAndSeed(20'000, seed));
    for (std::uint64_t step = 0; step < 6; ++step) {
      trained.makeGradient(step);
      const auto down = trained.rig.cache.transferStats(0).bytesToDevice;
      const auto home = trained.sentHome();
      EXPECT_TRUE(trained.step());
      EXPECT_EQ(trained.rig.cache.transferStats(0).bytesToDevice - down, step == 0 ? kBytes : 0) << "the state, once";
      EXPECT_EQ(trained.sentHome() - home, 2 * kBytes);
      if (step > 1) {
        EXPECT_EQ(trained.rig.cache.stats(0).dirtyBytes, kBytes) << "the gradient, which nobody reads at home";
      }
    }
    trained.check();
  }
}

TEST(UpdateThere, WhatIsNotThereAndFindsNoRoomIsLeftToTheHost) {
  for (const std::size_t budget : {0U, 2'999U}) {
    Trained trained(budgetAndSeed(budget));
    trained.makeGradient(1);
    const auto before = trained.rig.cache.stats(0).fetches;
    EXPECT_FALSE(trained.step());
    EXPECT_EQ(trained.rig.cache.stats(0).fetches, before);
    trained.check();
  }
}

TEST(UpdateThere, WhatSomebodyElseUsesIsLeftToTheHost) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  {
    const Pin pin = trained.rig.cache.fetch(*trained.weight, {0, kBytes}, trained.stream);
    EXPECT_FALSE(trained.step());
  }
  {
    const HostLease lease = trained.rig.cache.lease(*trained.state, Access::Read);
    EXPECT_FALSE(trained.step());
  }
  EXPECT_TRUE(trained.step());
  trained.check();
}

TEST(UpdateThere, WhatTheHostWroteIsFetchedAnew) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  EXPECT_TRUE(trained.step());
  trained.truth = pattern(5, kBytes);
  trained.rig.write(*trained.weight, trained.truth);
  EXPECT_TRUE(trained.step());
  trained.check();
}

TEST(UpdateThere, WorkThatFindsNoMemoryChangesNothing) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  EXPECT_TRUE(trained.step());
  const auto version = trained.weight->version;
  const auto home = trained.sentHome();
  EXPECT_FALSE(trained.rig.cache.updateThere(
      trained.claims(), trained.stream, [](const auto&) { throw OutOfMemory(OutOfMemory::Where::Device, 1, "no memory"); }));
  EXPECT_EQ(trained.weight->version, version);
  EXPECT_EQ(trained.sentHome(), home);
  trained.check();
}

TEST(UpdateThere, WorkThatFailsIsToldAndWhatItWroteIsNotLost) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  const auto fail = [&](const std::vector<void*>& at) {
    trained.rig.writeOnDevice(trained.stream, at[0], Bytes(kBytes, 3));
    throw Error("it failed");
  };
  EXPECT_THROW(trained.rig.cache.updateThere(trained.claims(), trained.stream, fail), Error);
  trained.truth = Bytes(kBytes, 3);
  trained.check();
}

TEST(UpdateThere, WritesWaitForReadersOnOtherStreams) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Trained trained(budgetAndSeed(20'000, seed));
    const Stream other = trained.rig.sim.createStream(0);
    for (std::uint64_t step = 0; step < 4; ++step) {
      trained.makeGradient(step);
      {
        const Pin pin = trained.rig.cache.fetch(*trained.weight, {0, kBytes}, other);
        trained.seen.emplace_back(trained.rig.readOnDevice(other, pin.data(), kBytes), trained.truth);
      }
      EXPECT_TRUE(trained.step());
    }
    trained.check();
  }
}

TEST(UpdateThere, AJobOfTheHostComesFirst) {
  CoreOptions options = budgetAndSeed(20'000);
  options.cache.hostJobs = HostJobs::When::Wanted;
  Trained trained(options);
  trained.makeGradient(1);
  EXPECT_TRUE(trained.step());
  auto* const host = static_cast<unsigned char*>(trained.weight->data);
  trained.rig.cache.runLater({{trained.weight.get(), Access::Write}}, [host] { std::fill(host, host + kBytes, 9); });
  trained.truth = Bytes(kBytes, 9);
  EXPECT_FALSE(trained.step());
  trained.check();
  EXPECT_TRUE(trained.step());
  trained.check();
}

TEST(UpdateThere, WhatThePytorchAllocatorTakesBackIsNotLost) {
  Trained trained(budgetAndSeed(20'000));
  for (std::uint64_t step = 0; step < 4; ++step) {
    trained.makeGradient(step);
    EXPECT_TRUE(trained.step());
    trained.rig.sim.drain();
    EXPECT_GE(trained.rig.cache.relieve(0, 0, 1 << 20, 1 << 20), 2 * kBytes) << "parameter and state are Clean";
  }
  trained.check();
}

// Its maker, or a tensor that shares it, may have kept it.
TEST(UpdateThere, MemoryOfSomebodyElseIsNotChanged) {
  Rig rig(budgetAndSeed(20'000));
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(kBytes, Born::Device);
  rig.cache.adopt(*block, rig.newResult(stream, Bytes(kBytes, 5)), stream);
  EXPECT_EQ(rig.read(*block), Bytes(kBytes, 5)); // which leaves it Clean
  EXPECT_FALSE(rig.cache.updateThere({{block.get(), Access::Write}}, stream, [](const auto&) {}));
}

TEST(UpdateThere, WhatIsRefusedMovesNothing) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  const Pin pin = trained.rig.cache.fetch(*trained.weight, {0, kBytes}, trained.stream);
  const auto down = trained.rig.cache.transferStats(0).bytesToDevice;
  EXPECT_FALSE(trained.step());
  EXPECT_EQ(trained.rig.cache.transferStats(0).bytesToDevice, down) << "the state, for nothing";
}

// What a function of the user's has written on one stream is there for a step on another one.
TEST(UpdateThere, WhatWasBroughtHomeElsewhereComesFirst) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Rig rig(budgetAndSeed(20'000, seed));
    const Stream one = rig.sim.createStream(0);
    const Stream other = rig.sim.createStream(0);
    const auto gradient = rig.newBlock(pattern(1, kBytes));
    const auto weight = rig.newBlock(Bytes(kBytes, 0));
    {
      const Pin pin = rig.cache.fetch(*gradient, {0, kBytes}, one);
      rig.writeOnDevice(one, pin.data(), pattern(2, kBytes));
      rig.cache.bringHome(pin, one);
    }
    const auto copy = [&](const std::vector<void*>& at) {
      const auto body = [at] { std::memcpy(at[0], at[1], kBytes); };
      rig.sim.launch(other, body, {{at[1], kBytes}}, {{at[0], kBytes}});
    };
    EXPECT_TRUE(rig.cache.updateThere({{weight.get(), Access::Write}, {gradient.get(), Access::Read}}, other, copy));
    const Pin pin = rig.cache.fetch(*gradient, {0, kBytes}, rig.sim.createStream(0));
    rig.sim.drain();
    EXPECT_EQ(rig.read(*weight), pattern(2, kBytes));
  }
}

// It goes home before the next one does, and what it had of the budget is its own again.
TEST(UpdateThere, AWeightKeepsItsPlace) {
  Rig rig(budgetAndSeed(3'000));
  const Stream stream = rig.sim.createStream(0);
  std::vector<Rig::BlockPtr> weights;
  for (std::uint64_t k = 0; k < 3; ++k) {
    weights.push_back(rig.newBlock(pattern(k, kBytes)));
    rig.cache.fetch(*weights.back(), {0, kBytes}, stream);
  }
  const auto state = rig.newBlock(Bytes(kBytes, 1));
  rig.cache.fetchAhead(*state, {0, kBytes}, stream); // into the ring
  const auto nothing = [](const auto&) {};
  EXPECT_FALSE(rig.cache.updateThere({{weights[0].get(), Access::Write}, {state.get(), Access::Write}}, stream, nothing));
  const auto hits = rig.cache.stats(0).hits;
  for (const auto& weight : weights) rig.cache.fetch(*weight, {0, kBytes}, stream);
  EXPECT_EQ(rig.cache.stats(0).hits, hits + 3);
}

TEST(UpdateThere, AGradientThatTheHostReadsStillGoesHomeAtOnce) {
  Trained trained(budgetAndSeed(20'000));
  for (std::uint64_t step = 0; step < 4; ++step) {
    trained.makeGradient(step);
    EXPECT_EQ(trained.rig.cache.stats(0).dirtyBytes, 0U);
    EXPECT_EQ(trained.rig.read(*trained.gradient), trained.made); // as a log does
    EXPECT_TRUE(trained.step());
  }
  trained.check();
}

TEST(UpdateThere, WithoutMemoryItIsNotTriedAgainBeforeThereIsAnotherPlan) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  int asked = 0;
  const auto work = [&](const std::vector<void*>& at) {
    if (++asked == 1) throw OutOfMemory(OutOfMemory::Where::Device, 100, "no memory");
    trained.rig.writeOnDevice(trained.stream, at[0], Bytes(kBytes, 3));
    trained.rig.writeOnDevice(trained.stream, at[2], Bytes(kBytes, 4));
  };
  EXPECT_FALSE(trained.rig.cache.updateThere(trained.claims(), trained.stream, work));
  EXPECT_FALSE(trained.rig.cache.updateThere(trained.claims(), trained.stream, work));
  EXPECT_EQ(asked, 1);
  trained.check();
  trained.rig.cache.setBudget(30'000);
  EXPECT_TRUE(trained.rig.cache.updateThere(trained.claims(), trained.stream, work));
  trained.truth = Bytes(kBytes, 3);
  trained.kept = Bytes(kBytes, 4);
  trained.check();
}

TEST(UpdateThere, PassesThatRepeatMakeNoOtherPlanWhateverTheBudget) {
  for (const std::size_t budget : {std::size_t{20'000}, SIZE_MAX}) {
    Trained trained(budgetAndSeed(budget));
    const auto other = trained.rig.newBlock(pattern(2, kBytes));
    const auto pass = [&] {
      trained.rig.cache.fetch(*trained.weight, {0, kBytes}, trained.stream);
      trained.rig.cache.fetch(*other, {0, kBytes}, trained.stream);
    };
    for (int k = 0; k < 4; ++k) pass();
    trained.makeGradient(1);
    int asked = 0;
    for (int k = 0; k < 4; ++k) {
      trained.rig.cache.updateThere(trained.claims(), trained.stream, [&](const auto&) {
        ++asked;
        throw OutOfMemory(OutOfMemory::Where::Device, 100, "no memory");
      });
      pass();
    }
    EXPECT_EQ(asked, 1) << "a budget of " << budget;
    EXPECT_EQ(trained.rig.cache.budget(0), budget);
    trained.check();
  }
}

TEST(UpdateThere, WhatItUsesIsNotTakenBackMeanwhile) {
  Trained trained(budgetAndSeed(20'000));
  trained.makeGradient(1);
  const bool done = trained.rig.cache.updateThere(trained.claims(), trained.stream, [&](const std::vector<void*>& at) {
    EXPECT_EQ(trained.rig.cache.relieve(0, 0, 1 << 20, 1 << 20), 0U);
    trained.rig.cache.emptyCache(0);
    trained.rig.writeOnDevice(trained.stream, at[0], Bytes(kBytes, 3));
    trained.rig.writeOnDevice(trained.stream, at[2], Bytes(kBytes, 4));
  });
  EXPECT_TRUE(done);
  trained.truth = Bytes(kBytes, 3);
  trained.kept = Bytes(kBytes, 4);
  trained.check();
}

TEST(UpdateThere, EveryCallOfTheLinkMayFail) {
  for (std::uint64_t fault = 1; fault < 200; ++fault) {
    Trained trained(budgetAndSeed(20'000));
    trained.makeGradient(1);
    EXPECT_TRUE(trained.step());
    trained.makeGradient(2);
    trained.rig.link.fail(fault);
    bool done = false;
    try {
      done = trained.step();
    } catch (const Error&) {
      // Nothing has been enqueued.
    }
    const bool failed = trained.rig.link.failures() > 0;
    trained.rig.link.fail(0);
    trained.check();
    trained.makeGradient(3);
    EXPECT_TRUE(trained.step());
    trained.check();
    if (!failed && done) return;
  }
  ADD_FAILURE() << "it never succeeds";
}

} // namespace
} // namespace offload
