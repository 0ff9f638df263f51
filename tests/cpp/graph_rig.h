// Graphs over the simulated link that read Blocks, and what they saw.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core_rig.h"
#include "graph_link.h"

namespace offload::core_test {

using GraphRig = BasicRig<GraphLink>;

struct Blocks {
  Blocks(GraphRig& rig, int count, std::size_t bytes) {
    for (int k = 0; k < count; ++k) {
      owned.push_back(rig.newBlock(pattern(static_cast<std::uint64_t>(k), bytes)));
      all.push_back(owned.back().get());
    }
  }
  std::vector<GraphRig::BlockPtr> owned;
  std::vector<Block*> all;
};

/// A graph that reads Blocks one after the other, and what it saw last.
struct Reader {
  explicit Reader(GraphRig& over) : rig(over) {}

  void begin() {
    rig.link.begin(stream);
    fetches = rig.cache.beginCapture(stream, [this](Block& block) {
      ++kept[&block];
      return std::shared_ptr<void>(&block, [this](void* gone) { --kept[static_cast<Block*>(gone)]; });
    });
  }
  void capture(const std::vector<Block*>& blocks) {
    begin();
    for (Block* block : blocks) read(*block);
    end();
  }
  void read(Block& block) {
    const Pin pin = rig.cache.fetch(block, {0, block.bytes}, stream);
    readFrom(pin.data(), block.bytes);
  }
  void readFrom(const void* data, std::size_t bytes) {
    seen.push_back(std::make_shared<Bytes>(bytes));
    rig.link.launch(stream, [to = seen.back(), data, bytes] { std::memcpy(to->data(), data, bytes); }, {{data, bytes}}, {});
  }
  void end() {
    graph = rig.link.end();
    if (fetches) rig.cache.endCapture(*fetches);
  }
  void replay(Stream on) {
    rig.cache.beginReplay(*fetches, on);
    const std::shared_ptr<void> ends(this, [this, on](void*) { rig.cache.endReplay(*fetches, on); });
    rig.link.replay(*graph, on);
  }

  /// What the last replay saw are the patterns with these tags, in the order of the reads; the rig has been drained.
  void expect(const std::vector<int>& tags) const {
    ASSERT_EQ(seen.size(), tags.size());
    for (std::size_t k = 0; k < tags.size(); ++k) EXPECT_EQ(*seen[k], pattern(tags[k], seen[k]->size())) << "read " << k;
  }
  void replayAndExpect(const std::vector<int>& tags) {
    replay(stream);
    rig.sim.drain();
    expect(tags);
  }

  GraphRig& rig;
  Stream stream = rig.sim.createStream(0);
  std::map<Block*, int> kept;
  std::vector<std::shared_ptr<Bytes>> seen;
  std::shared_ptr<CapturedFetches> fetches;
  std::shared_ptr<GraphLink::Graph> graph;
};

} // namespace offload::core_test
