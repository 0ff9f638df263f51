// What an Observer is told, and when.
#include "core_rig.h"

#include <chrono>
#include <mutex>
#include <set>
#include <thread>

namespace offload {
namespace {

using namespace core_test;

/// Writes down what it is told. Every call asks the cache for its statistics, which would never return if a lock were held.
class Log final : public Observer {
 public:
  struct Ended final : Span {
    explicit Ended(Log& l) : log(l) {}
    ~Ended() override {
      log.look();
      const std::lock_guard lock(log.mutex);
      --log.open;
    }
    Log& log;
  };

  std::unique_ptr<Span> begin(const Observation& observation) noexcept override {
    look();
    const std::lock_guard lock(mutex);
    seen.push_back(observation);
    if (!recording) return nullptr;
    mostOpen = std::max(mostOpen, ++open);
    return std::make_unique<Ended>(*this);
  }
  void look() const {
    if (cache == nullptr) return;
    const ResidencyStats now = cache->stats(0);
    const std::lock_guard lock(mutex);
    stats = now;
  }
  std::vector<Observation> of(Activity activity) const {
    const std::lock_guard lock(mutex);
    std::vector<Observation> found;
    for (const Observation& one : seen) {
      if (one.activity == activity) found.push_back(one);
    }
    return found;
  }
  std::size_t bytesOf(Activity activity) const {
    std::size_t bytes = 0;
    for (const Observation& one : of(activity)) bytes += one.bytes;
    return bytes;
  }

  mutable std::mutex mutex; // host work may be done by a thread
  const Residency* cache = nullptr;
  bool recording = true;
  int open = 0;
  int mostOpen = 0;
  std::vector<Observation> seen;
  mutable ResidencyStats stats;
};

constexpr auto kWhen = {HostJobs::When::AtOnce, HostJobs::When::Wanted, HostJobs::When::Soon};

CoreOptions watchedBy(Observer& observer, HostJobs::When when) {
  CoreOptions options;
  options.cache.hostJobs = when;
  options.cache.observer = &observer;
  return options;
}

struct ObservedRig {
  explicit ObservedRig(std::uint64_t seed, std::size_t budget = 0) : rig(options(seed, budget, log)) {
    log.cache = &rig.cache;
  }
  static CoreOptions options(std::uint64_t seed, std::size_t budget, Log& log) {
    CoreOptions options{{.seed = seed}};
    options.cache.budgetBytes = budget;
    options.cache.observer = &log;
    return options;
  }
  Log log; // outlives the cache
  Rig rig;
};

void expect(const std::vector<Observation>& seen, const Block& block, Extent extent, Purpose purpose) {
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].host, static_cast<std::byte*>(block.data) + extent.begin);
  EXPECT_EQ(seen[0].bytes, extent.bytes());
  EXPECT_EQ(seen[0].purpose, purpose);
}

TEST(Observer, AMissAHitAndAnEviction) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    ObservedRig observed(seed);
    Rig& rig = observed.rig;
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(pattern(1, 1000));
    block->purpose = Purpose::Parameter;
    observed.log.seen.clear();
    rig.cache.fetch(*block, {100, 900}, stream);
    expect(observed.log.of(Activity::Fetch), *block, {100, 900}, Purpose::Parameter);
    EXPECT_EQ(observed.log.of(Activity::Fetch)[0].device, 0);
    rig.cache.fetch(*block, {200, 300}, stream);
    expect(observed.log.of(Activity::Hit), *block, {200, 300}, Purpose::Parameter);
    EXPECT_TRUE(observed.log.of(Activity::Evict).empty());
    rig.cache.emptyCache(0);
    expect(observed.log.of(Activity::Evict), *block, {100, 900}, Purpose::Parameter);
    EXPECT_EQ(observed.log.seen.size(), 3U);
    EXPECT_EQ(observed.log.open, 0);
  }
}

TEST(Observer, AGradientSaysWhoseItIs) {
  ObservedRig observed(0, 1 << 20);
  Rig& rig = observed.rig;
  const Stream stream = rig.sim.createStream(0);
  const auto weight = rig.newBlock(pattern(1, 1000));
  auto gradient = rig.newBlock(1000);
  gradient->purpose = Purpose::Gradient;
  gradient->derivedFrom = weight->data;
  rig.cache.adopt(*gradient, rig.newResult(stream, pattern(2, 1000)), stream);
  rig.cache.fetch(*gradient, {0, 500}, stream);
  rig.read(*gradient);
  const DeviceBuffer result = rig.newResult(stream, pattern(3, 100));
  rig.cache.store(*gradient, {0, 100}, result.data, stream);
  rig.cache.fetch(*gradient, {0, 500}, stream);
  gradient.reset();
  for (const Activity each :
       {Activity::Hit, Activity::Fetch, Activity::WriteBack, Activity::Store, Activity::Wait, Activity::Evict}) {
    const auto seen = observed.log.of(each);
    ASSERT_FALSE(seen.empty()) << static_cast<int>(each);
    for (const Observation& one : seen) EXPECT_EQ(one.derivedFrom, weight->data) << static_cast<int>(each);
  }
  rig.cache.fetch(*weight, {0, 1000}, stream);
  EXPECT_EQ(observed.log.seen.back().derivedFrom, nullptr);
}

TEST(Observer, AnEvictionSaysWhatItsBlockWas) {
  ObservedRig observed(0);
  Rig& rig = observed.rig;
  const Stream stream = rig.sim.createStream(0);
  auto block = rig.newBlock(pattern(1, 1000));
  const void* const host = block->data;
  { const Pin pin = rig.cache.fetch(*block, {0, 1000}, stream); }
  block.reset();
  ASSERT_EQ(observed.log.of(Activity::Evict).size(), 1U);
  EXPECT_EQ(observed.log.of(Activity::Evict)[0].host, host);
  EXPECT_EQ(observed.log.of(Activity::Evict)[0].bytes, 1000U);
}

TEST(Observer, HostWorkAndWhoWaitsForIt) {
  for (const auto when : kWhen) {
    Log log;
    Rig rig(watchedBy(log, when));
    log.cache = &rig.cache;
    const Stream stream = rig.sim.createStream(0);
    const auto read = rig.newBlock(pattern(1, 500));
    const auto written = rig.newBlock(pattern(2, 1000));
    written->purpose = Purpose::Parameter;
    log.seen.clear();
    rig.cache.runLater({{read.get(), Access::Read}, {written.get(), Access::Write}}, [&log, when] {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (when == HostJobs::When::Soon && log.of(Activity::Wait).empty() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
    });
    rig.cache.fetch(*written, {0, 1000}, stream);
    expect(log.of(Activity::HostWork), *written, {0, 1000}, Purpose::Parameter);
    EXPECT_EQ(log.of(Activity::HostWork)[0].device, -1);
    EXPECT_EQ(log.of(Activity::Wait).size(), when == HostJobs::When::AtOnce ? 0U : 1U);
    rig.cache.runLater({{read.get(), Access::Read}}, [] {});
    rig.cache.drain(false);
    EXPECT_EQ(log.of(Activity::HostWork).back().host, read->data);
    EXPECT_EQ(log.open, 0);
  }
}

TEST(Observer, WhoeverDoesHostWorkIsWithinIt) {
  struct Within final : Observer {
    struct Entered final : Span {
      explicit Entered(std::set<std::thread::id>& t) : threads(t) {
        threads.insert(std::this_thread::get_id());
      }
      ~Entered() override {
        threads.erase(std::this_thread::get_id());
      }
      std::set<std::thread::id>& threads;
    };
    std::unique_ptr<Span> begin(const Observation&) noexcept override {
      return nullptr;
    }
    std::unique_ptr<Span> enterHostWork() noexcept override {
      return std::make_unique<Entered>(threads);
    }
    std::set<std::thread::id> threads;
  };
  for (const auto when : kWhen) {
    Within within;
    Rig rig(watchedBy(within, when));
    const auto block = rig.newBlock(pattern(2, 1000));
    bool seen = false;
    rig.cache.runLater({{block.get(), Access::Write}}, [&] { seen = within.threads.contains(std::this_thread::get_id()); });
    rig.cache.drain(false);
    EXPECT_TRUE(seen);
    EXPECT_TRUE(within.threads.empty());
  }
}

TEST(Observer, EveryCopyOfABatchIsTold) {
  Log log;
  CoreOptions options;
  options.cache.ringBytes = 16'000;
  options.cache.batchLeast = 0;
  options.cache.observer = &log;
  Rig rig(options);
  log.cache = &rig.cache;
  const Stream stream = rig.sim.createStream(0);
  std::vector<Rig::BlockPtr> blocks;
  for (std::uint64_t k = 0; k < 24; ++k) blocks.push_back(rig.newBlock(pattern(k, 1000)));
  for (int step = 0; step < 3; ++step) {
    if (step == 2) log.seen.clear();
    for (const auto& block : blocks) rig.cache.fetch(*block, {0, 1000}, stream);
  }
  EXPECT_EQ(log.of(Activity::Hit).size(), 24U);
  EXPECT_EQ(log.of(Activity::Prefetch).size(), 24U);
  EXPECT_EQ(log.bytesOf(Activity::Prefetch), 24'000U);
  std::set<const void*> places;
  for (const Observation& one : log.of(Activity::Prefetch)) places.insert(one.host);
  EXPECT_EQ(places.size(), 24U);
  EXPECT_EQ(log.open, 0);
  EXPECT_EQ(log.mostOpen, 1) << "ranges do not contain one another";
}

TEST(Observer, ResultsGoHomeAndTheHostWaits) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    ObservedRig observed(seed, 1 << 20);
    Rig& rig = observed.rig;
    const Stream stream = rig.sim.createStream(0);
    const auto block = rig.newBlock(1000);
    block->purpose = Purpose::Activation;
    rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
    EXPECT_TRUE(observed.log.of(Activity::WriteBack).empty());
    EXPECT_EQ(rig.read(*block), pattern(1, 1000));
    expect(observed.log.of(Activity::WriteBack), *block, {0, 1000}, Purpose::Activation);
    expect(observed.log.of(Activity::Wait), *block, {0, 1000}, Purpose::Activation);
    EXPECT_EQ(rig.read(*block), pattern(1, 1000));
    EXPECT_EQ(observed.log.of(Activity::Wait).size(), 1U); // nothing was in the way of the second one
    const DeviceBuffer result = rig.newResult(stream, pattern(2, 100));
    rig.cache.store(*block, {300, 400}, result.data, stream);
    expect(observed.log.of(Activity::Store), *block, {300, 400}, Purpose::Activation);
    EXPECT_EQ(observed.log.open, 0);
  }
}

TEST(Observer, ARefusedWriteBackAlsoEnds) {
  ObservedRig observed(0, 1 << 20);
  Rig& rig = observed.rig;
  const Stream stream = rig.sim.createStream(0);
  const auto block = rig.newBlock(1000);
  rig.cache.adopt(*block, rig.newResult(stream, pattern(1, 1000)), stream);
  rig.link.fail(1);
  EXPECT_ANY_THROW(rig.read(*block));
  EXPECT_EQ(observed.log.open, 0);
  EXPECT_EQ(rig.read(*block), pattern(1, 1000));
}

// The events are what the statistics count, whether a span is taken or not.
TEST(Observer, TellsOfEveryCopy) {
  for (const bool recording : {true, false}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      ObservedRig observed(seed, seed % 2 == 0 ? 0 : 6000);
      observed.log.recording = recording;
      Rig& rig = observed.rig;
      SimRandom random(seed);
      const Stream stream = rig.sim.createStream(0);
      rig.cache.setRingBytes(4000);
      std::vector<Rig::BlockPtr> blocks;
      for (std::uint64_t k = 0; k < 6; ++k) blocks.push_back(rig.newBlock(pattern(k, 1000)));
      for (int step = 0; step < 60; ++step) {
        Block& block = *blocks[random.below(blocks.size())];
        switch (random.below(4)) {
          case 0:
            rig.cache.adopt(block, rig.newResult(stream, pattern(1, 1000)), stream);
            break;
          case 1:
            rig.read(block);
            break;
          default:
            rig.cache.fetch(block, {0, 1000}, stream);
        }
      }
      blocks.clear();
      rig.cache.emptyCache(0);
      const TransferStats moved = rig.cache.transferStats(0);
      const ResidencyStats stats = rig.cache.stats(0);
      EXPECT_EQ(observed.log.of(Activity::Prefetch).size(), stats.prefetches);
      EXPECT_EQ(observed.log.of(Activity::Fetch).size() + stats.prefetches, moved.copiesToDevice);
      EXPECT_EQ(observed.log.bytesOf(Activity::Fetch) + observed.log.bytesOf(Activity::Prefetch), moved.bytesToDevice);
      EXPECT_EQ(observed.log.of(Activity::WriteBack).size(), moved.copiesToHost);
      EXPECT_EQ(observed.log.bytesOf(Activity::WriteBack), moved.bytesToHost);
      EXPECT_EQ(observed.log.of(Activity::Hit).size(), stats.hits);
      EXPECT_EQ(observed.log.of(Activity::Evict).size(), stats.evictions);
      EXPECT_GT(stats.hits, 0U);
      EXPECT_EQ(observed.log.open, 0);
    }
  }
}

} // namespace
} // namespace offload
