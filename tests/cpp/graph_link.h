// Graphs over the simulated link: what is enqueued on a captured stream is kept, and enqueued anew by every replay.
//
// As with CUDA, a stream becomes part of a capture when it waits for an event that was recorded in it, and all of them must have
// been joined when it ends. What CUDA refuses fails the test.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "core/link/fault_link.h"
#include "core/link/sim_link.h"

namespace offload::core_test {

class GraphLink : public FaultLink {
 public:
  explicit GraphLink(SimLink& sim) : FaultLink(sim), sim_(sim) {}
  ~GraphLink() override {
    for (Stream stream : streams_) sim_.destroyStream(stream);
    for (Event event : events_) sim_.destroyEvent(event);
  }

  struct Graph {
    Stream origin;
    /// What one replay does, given which stream and which event plays which part.
    struct Part {
      std::map<void*, Stream> streams;
      std::map<Event, Event> events;
    };
    std::vector<std::function<void(Part&)>> operations;
    std::map<void*, std::map<void*, int>> known; // by stream: how much of each stream it comes behind
    std::map<Event, std::map<void*, int>> recorded;
  };

  void begin(Stream stream) {
    const Lock lock(mutex_);
    ASSERT_EQ(current_, nullptr);
    current_ = std::make_unique<Graph>();
    current_->origin = stream;
    current_->known[stream.handle];
    ++id_;
  }
  std::shared_ptr<Graph> end() {
    const Lock lock(mutex_);
    auto& origin = current_->known[current_->origin.handle];
    for (const auto& [stream, known] : current_->known) {
      const auto own = known.find(stream);
      EXPECT_TRUE(own == known.end() || origin[stream] >= own->second) << "a stream was not joined";
    }
    for (const auto& [event, known] : current_->recorded) ofGraphs_.insert(event);
    return std::shared_ptr<Graph>(std::move(current_));
  }
  void replay(const Graph& graph, Stream stream) {
    const Lock lock(mutex_);
    Graph::Part part;
    part.streams[graph.origin.handle] = stream;
    const Event before = newEvent(stream.device);
    sim_.record(before, stream);
    for (const auto& [handle, known] : graph.known) {
      if (handle == graph.origin.handle) continue;
      streams_.push_back(part.streams[handle] = sim_.createStream(stream.device));
      sim_.wait(streams_.back(), before);
    }
    for (const auto& [event, known] : graph.recorded) part.events[event] = newEvent(stream.device);
    for (const auto& operation : graph.operations) operation(part);
  }
  /// A kernel that reads and writes these bytes.
  void launch(Stream stream, std::function<void()> body, std::vector<MemoryRange> reads, std::vector<MemoryRange> writes) {
    const Lock lock(mutex_);
    enqueue(stream, [=, this](Stream on) { sim_.launch(on, body, reads, writes); });
  }

  /// To the device, by replays too, since the last call.
  int copiesSince() {
    const Lock lock(mutex_);
    return std::exchange(copies_, 0);
  }

  std::uint64_t captureOf(Stream stream) override {
    const Lock lock(mutex_);
    mayFail(stream);
    return isCaptured(stream) ? id_ : 0;
  }
  void record(Event event, Stream stream) override {
    const Lock lock(mutex_);
    ofGraphs_.erase(event);
    if (!isCaptured(stream)) return FaultLink::record(event, stream);
    mayFail(stream);
    current_->recorded[event] = current_->known[stream.handle];
    add([this, event, handle = stream.handle](Graph::Part& part) {
      sim_.record(part.events.at(event), part.streams.at(handle));
    });
  }
  void wait(Stream stream, Event event) override {
    const Lock lock(mutex_);
    const bool ofThis = current_ && current_->recorded.contains(event);
    EXPECT_FALSE(ofGraphs_.contains(event)) << "an event of a graph is waited for";
    EXPECT_EQ(ofThis || isCaptured(stream), ofThis) << "a capture waits for what is no part of it";
    if (!ofThis) return FaultLink::wait(stream, event);
    mayFail(stream);
    auto& known = current_->known[stream.handle];
    for (const auto& [of, count] : current_->recorded[event]) known[of] = std::max(known[of], count);
    add([this, event, handle = stream.handle](Graph::Part& part) {
      sim_.wait(part.streams.at(handle), part.events.at(event));
    });
  }
  bool query(Event event) override {
    EXPECT_FALSE(isOfGraph(event));
    return FaultLink::query(event);
  }
  void synchronize(Event event) override {
    EXPECT_FALSE(isOfGraph(event));
    FaultLink::synchronize(event);
  }
  void copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) override {
    const Lock lock(mutex_);
    if (!isCaptured(stream)) {
      ++copies_;
      return FaultLink::copyToDevice(device, host, bytes, stream);
    }
    mayFail(stream);
    enqueue(stream, [=, this](Stream on) {
      ++copies_;
      sim_.copyToDevice(device, host, bytes, on);
    });
  }
  void copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) override {
    const Lock lock(mutex_);
    EXPECT_FALSE(isCaptured(stream));
    FaultLink::copyToHost(host, device, bytes, stream);
  }
  void fill(void* device, unsigned char value, std::size_t bytes, Stream stream) override {
    const Lock lock(mutex_);
    if (!isCaptured(stream)) return FaultLink::fill(device, value, bytes, stream);
    enqueue(stream, [=, this](Stream on) { sim_.fill(device, value, bytes, on); });
  }
  void launchHost(HostTask task, Stream stream) override {
    const Lock lock(mutex_);
    if (!isCaptured(stream)) return FaultLink::launchHost(std::move(task), stream);
    enqueue(stream, [=, this](Stream on) { sim_.launchHost(task, on); });
  }
  void* allocate(std::size_t bytes, Stream stream) override {
    const Lock lock(mutex_);
    EXPECT_FALSE(isCaptured(stream)) << "memory of the graph's own pool";
    return FaultLink::allocate(bytes, stream);
  }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;

  bool isOfGraph(Event event) {
    const Lock lock(mutex_);
    return ofGraphs_.contains(event) || (current_ && current_->recorded.contains(event));
  }
  bool isCaptured(Stream stream) const {
    return current_ && current_->known.contains(stream.handle);
  }
  /// What is captured has no call below that could fail by its number but this one.
  void mayFail(Stream stream) {
    (void)FaultLink::captureOf(stream);
  }
  void add(std::function<void(Graph::Part&)> operation) {
    current_->operations.push_back(std::move(operation));
  }
  void enqueue(Stream stream, const std::function<void(Stream)>& what) {
    if (!isCaptured(stream)) return what(stream);
    ++current_->known[stream.handle][stream.handle];
    add([what, handle = stream.handle](Graph::Part& part) { what(part.streams.at(handle)); });
  }
  Event newEvent(int device) {
    events_.push_back(sim_.createEvent(device));
    return events_.back();
  }

  SimLink& sim_;
  std::recursive_mutex mutex_; // of what follows
  std::unique_ptr<Graph> current_;
  std::uint64_t id_ = 0;
  int copies_ = 0;
  std::set<Event> ofGraphs_;
  std::vector<Stream> streams_; // of replays
  std::vector<Event> events_;
};

} // namespace offload::core_test
