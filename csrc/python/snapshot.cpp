#include "python/snapshot.h"

#include "aten/context.h"

#include <algorithm>

namespace py = pybind11;

namespace offload {
namespace {

// The visualizer shows where something was allocated. Here that is what it is for.
py::list framesOf(Purpose purpose) {
  py::dict frame;
  frame["name"] = nameOf(purpose);
  frame["filename"] = "offload";
  frame["line"] = 0;
  py::list frames;
  frames.append(frame);
  return frames;
}

const char* nameOf(ArenaPiece::State state) {
  switch (state) {
    case ArenaPiece::State::Allocated:
      return "active_allocated";
    case ArenaPiece::State::Pending:
      return "active_pending_free";
    default:
      return "inactive";
  }
}

using Blocks = std::unordered_map<const void*, Context::BlockInfo>;

py::dict segmentOf(const ArenaSegment& segment, const Blocks& blocks) {
  std::size_t allocated = 0;
  std::size_t active = 0;
  std::size_t requested = 0;
  py::list pieces;
  for (const ArenaPiece& piece : segment.pieces) {
    const bool inUse = piece.state == ArenaPiece::State::Allocated;
    const auto block = inUse ? blocks.find(reinterpret_cast<const void*>(piece.begin)) : blocks.end();
    // Whoever asked for less got a multiple of the granule; one that comes or goes at this moment has no Block to tell.
    const std::size_t asked = block != blocks.end() ? std::min(block->second.bytes, piece.bytes) : piece.bytes;
    if (inUse) allocated += piece.bytes;
    if (inUse) requested += asked;
    if (piece.state != ArenaPiece::State::Free) active += piece.bytes;
    py::dict entry;
    entry["address"] = piece.begin;
    entry["size"] = piece.bytes;
    entry["requested_size"] = inUse ? asked : 0;
    entry["state"] = nameOf(piece.state);
    entry["frames"] = block != blocks.end() ? framesOf(block->second.purpose) : py::list();
    pieces.append(entry);
  }
  py::dict result;
  result["device"] = 0;
  result["address"] = segment.begin;
  result["total_size"] = segment.bytes;
  result["allocated_size"] = allocated;
  result["active_size"] = active;
  result["requested_size"] = requested;
  result["stream"] = 0;
  result["segment_type"] = segment.bytes > (std::size_t{1} << 20) ? "large" : "small";
  result["segment_pool_id"] = py::make_tuple(0, 0);
  result["is_expandable"] = false;
  result["is_pinned"] = segment.kind == HostKind::Locked;
  result["frames"] = py::list();
  result["blocks"] = pieces;
  return result;
}

py::dict entryOf(const BlockEvent& event, const char* action, Purpose purpose) {
  py::dict entry;
  entry["action"] = action;
  entry["addr"] = reinterpret_cast<HostAddress>(event.data);
  entry["size"] = event.bytes;
  entry["stream"] = 0;
  entry["frames"] = framesOf(purpose);
  entry["time_us"] = std::chrono::duration_cast<std::chrono::microseconds>(event.time.time_since_epoch()).count();
  return entry;
}

// What a Block was for is known when it goes, or now; so the events are gone through from the last one.
py::list traceOf(const std::vector<BlockEvent>& events, const Blocks& blocks) {
  std::unordered_map<const void*, Purpose> last;
  for (const auto& [data, block] : blocks) last[data] = block.purpose;
  std::vector<py::dict> entries;
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    if (event->gone) {
      last[event->data] = event->purpose;
      entries.push_back(entryOf(*event, "free_completed", event->purpose));
      entries.push_back(entryOf(*event, "free_requested", event->purpose));
    } else {
      const auto purpose = last.find(event->data);
      entries.push_back(entryOf(*event, "alloc", purpose != last.end() ? purpose->second : event->purpose));
    }
  }
  py::list trace;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) trace.append(*entry);
  return trace;
}

} // namespace

py::dict takeSnapshot() {
  py::list segments;
  py::list trace;
  if (const Context* now = Context::ifCreated()) {
    const auto blocks = now->blocks();
    for (const ArenaSegment& segment : now->arena().snapshot()) segments.append(segmentOf(segment, blocks));
    trace = traceOf(now->accounts().history(), blocks);
  }
  py::list traces;
  traces.append(trace);
  py::dict snapshot;
  snapshot["segments"] = segments;
  snapshot["device_traces"] = traces;
  return snapshot;
}

} // namespace offload
