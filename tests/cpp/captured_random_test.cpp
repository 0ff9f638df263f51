// Random programs with graphs: whatever was done to a Block before a replay is what the replay reads.
#include "fuzz_seeds.h"
#include "graph_rig.h"

namespace offload {
namespace {

using namespace core_test;

constexpr std::size_t kBytes = 600;

class Program {
 public:
  explicit Program(std::uint64_t seed) : random_(seed), rig_(options(seed)) {
    for (int k = 0; k < 5; ++k) {
      truths_.push_back(newValue());
      blocks_.push_back(rig_.newBlock(truths_.back()));
    }
    for (int k = 0; k < 3; ++k) {
      streams_.push_back(rig_.sim.createStream(0));
      capture();
    }
  }

  ~Program() {
    rig_.cache.finishJobs(); // which keep no Block, here
  }

  void run() {
    for (int step = 0; step < 60; ++step) doOne();
    check();
  }

 private:
  struct Graph {
    std::unique_ptr<Reader> reader;
    std::vector<std::size_t> reads;
    std::vector<Bytes> expected; // of the last replay; none before the first
  };

  static CoreOptions options(std::uint64_t seed) {
    SimRandom random(seed + 1'000'000);
    CoreOptions options;
    options.sim.seed = seed;
    options.cache.ringBytes = 1 + random.below(5'000);
    options.cache.budgetBytes = random.below(4) * 2'500; // half of it for held copies of some 900 bytes
    options.cache.poison = random.oneIn(2);
    options.cache.hostJobs = random.oneIn(2) ? HostJobs::When::Wanted : HostJobs::When::Soon;
    return options;
  }

  std::size_t any() {
    return random_.below(blocks_.size());
  }
  Bytes newValue() {
    return pattern(++values_, kBytes);
  }

  void capture() {
    Graph graph{std::make_unique<Reader>(rig_), {}, {}};
    std::vector<Block*> blocks;
    for (std::uint64_t count = 1 + random_.below(6); count > 0; --count) {
      graph.reads.push_back(any());
      blocks.push_back(blocks_[graph.reads.back()].get());
    }
    graph.reader->capture(blocks);
    graphs_.push_back(std::move(graph));
  }

  void doOne() {
    const std::size_t k = any();
    Block& block = *blocks_[k];
    const Stream stream = streams_[random_.below(streams_.size())];
    switch (random_.below(8)) {
      case 0:
        rig_.write(block, truths_[k] = newValue());
        return;
      case 1:
        truths_[k] = newValue();
        rig_.cache.runLater(
            {{&block, Access::Write}}, [at = block.data, value = truths_[k]] { std::memcpy(at, value.data(), kBytes); });
        return;
      case 2:
        rig_.cache.adopt(block, rig_.newResult(stream, truths_[k] = newValue()), stream);
        return;
      case 3: {
        const DeviceBuffer result = rig_.newResult(stream, truths_[k] = newValue());
        rig_.cache.store(block, {0, kBytes}, result.data, stream);
        return;
      }
      case 4: {
        const Pin pin = rig_.cache.fetch(block, {0, kBytes}, stream);
        eager_.emplace_back(rig_.readOnDevice(stream, pin.data(), kBytes), truths_[k]);
        return;
      }
      case 5:
        if (random_.oneIn(8)) return anew();
        if (random_.oneIn(4)) rig_.cache.emptyCache(0);
        return;
      default:
        replay(graphs_[random_.below(graphs_.size())], stream);
        if (random_.oneIn(3)) check();
    }
  }

  void replay(Graph& graph, Stream stream) {
    graph.expected.clear();
    for (const std::size_t k : graph.reads) graph.expected.push_back(truths_[k]);
    graph.reader->replay(stream);
  }

  // A graph goes while its replay may be under way, and another comes.
  void anew() {
    check(); // what it saw is not of interest any more, but where it goes to lives in it
    graphs_.erase(graphs_.begin() + static_cast<std::ptrdiff_t>(random_.below(graphs_.size())));
    capture();
  }

  void check() {
    rig_.sim.drain();
    for (const Graph& graph : graphs_) {
      for (std::size_t k = 0; k < graph.expected.size(); ++k) EXPECT_EQ(*graph.reader->seen[k], graph.expected[k]);
    }
    for (const auto& [seen, expected] : eager_) EXPECT_EQ(*seen, expected);
    eager_.clear();
  }

  SimRandom random_;
  GraphRig rig_;
  std::uint64_t values_ = 0;
  std::vector<Bytes> truths_;
  std::vector<GraphRig::BlockPtr> blocks_;
  std::vector<Stream> streams_;
  std::vector<Graph> graphs_;
  std::vector<std::pair<std::shared_ptr<Bytes>, Bytes>> eager_;
};

TEST(Fuzz, CapturedGraphs) {
  const auto [first, end] = seeds(kDefaultSeeds / 2);
  for (std::uint64_t seed = first; seed < end && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(
        "OFFLOAD_FUZZ_FIRST=" + std::to_string(seed) +
        " OFFLOAD_FUZZ_SEEDS=1 offload_core_tests --gtest_filter=Fuzz.CapturedGraphs");
    Program(seed).run();
  }
}

} // namespace
} // namespace offload
