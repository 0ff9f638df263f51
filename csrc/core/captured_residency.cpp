// Fetches of a stream that is being captured, and replays: Note [Captured fetches].
#include "core/captured_fetches.h"
#include "core/error.h"
#include "core/residency.h"

#include <utility>

namespace offload {

std::shared_ptr<CapturedFetches> Residency::beginCapture(Stream stream, CapturedFetches::Keep keep) {
  const std::uint64_t id = link_.captureOf(stream);
  if (id == 0) throw Error("offload: no CUDA graph is being captured on this stream.");
  Device& dev = device(stream.device);
  std::shared_ptr<Staging> staging;
  std::shared_ptr<HeldCopies> held;
  CaptureOptions options{0, 0, options_.poison, options_.copyDelay};
  {
    const Lock lock(mutex_);
    if (!dev.staging) {
      dev.staging = std::make_shared<Staging>(link_, events_, dev.transfer.deviceBound());
      dev.held = std::make_shared<HeldCopies>(dev.staging);
    }
    staging = dev.staging;
    held = dev.held;
    options.stagingBytes = ringBytes_;
    // An automatic one as of the last look: it is no time to ask the driver.
    options.heldBytes = budgetBytes_.value_or(dev.budget + held->bytes()) / 2;
  }
  auto graph = std::make_shared<CapturedFetches>(
      link_, events_, std::move(staging), std::move(held), stream, id, std::move(keep), options);
  const Lock lock(mutex_);
  std::erase_if(captures_, [](const auto& entry) { return entry.second.expired(); });
  captures_[id] = graph;
  return graph;
}

void Residency::endCapture(CapturedFetches& graph) {
  {
    const Lock lock(mutex_);
    captures_.erase(graph.id());
    Device& dev = device(graph.device());
    dev.lookDue = true;
    dev.lastLook = {};
  }
  graph.end();
  // What was refused meanwhile gets its place now that nothing is captured any more: its streams may be gone by the next call.
  settle();
  (void)graph.staging().uses();
}

Pin Residency::fetchCaptured(Block& block, Extent extent, Stream stream, std::uint64_t id) {
  std::shared_ptr<CapturedFetches> graph;
  {
    const Lock lock(mutex_);
    if (const auto known = captures_.find(id); known != captures_.end()) graph = known->second.lock();
  }
  if (!graph) {
    throw Error(
        "offload: can't fetch while a CUDA graph is being captured of whose replays nobody would tell. Use torch.cuda.graph() "
        "or torch.cuda.make_graphed_callables(), make the first offload tensor before, and fetch none in the body of a "
        "conditional node.");
  }
  if (extent.bytes() == 0) return {};
  requireWithin(block, extent);
  if (memoryOf(block) != HostMemory::Pinned) {
    const bool foreign = block.kind == BlockKind::Foreign;
    throw Error(
        "offload: can't capture a fetch of " + std::to_string(extent.bytes()) +
        " bytes into a CUDA graph, as their host memory is not page-locked (it is " +
        (foreign ? "a file's or of another library); give the tensor memory of its own with clone()"
                 : "past what may be); raise TORCH_OFFLOAD_PINNED_LIMIT, or the system's limit on locked memory") +
        ", or move the tensor to CUDA before the capture.");
  }
  if (stream.device != graph->device()) {
    throw Error(
        "offload: a CUDA graph that is captured on cuda:" + std::to_string(graph->device()) +
        " can't fetch to cuda:" + std::to_string(stream.device) + "; capture one for each device.");
  }
  Device& dev = device(stream.device);
  // For a copy that is to be held nothing else is given up.
  const auto* const held =
      graph->hold(block, extent, [&](std::size_t bytes) { return link_.allocate(bytes, dev.transfer.deviceBound()); });
  const auto buffer = held != nullptr
      ? held->buffer
      : graph->take(extent.bytes() + kAlignment, [&](std::size_t bytes) { return allocate(dev, bytes); });
  const std::size_t shift = (block.address() + extent.begin) % kAlignment; // whatever the next one's is
  auto slot = std::make_shared<Slot>();
  slot->extent = extent;
  slot->device = dev.index;
  slot->state = SlotState::Clean;
  slot->buffer = {buffer->data, buffer->bytes, graph->staging().home(), buffer};
  slot->data = static_cast<std::byte*>(buffer->data) + shift;
  slot->host = static_cast<const std::byte*>(block.data) + extent.begin;
  slot->captured = graph;
  Pin pin(*this, slot, slot->data, stream); // gives the memory back if anything throws
  if (held == nullptr) graph->copy(block, *slot, stream);
  return pin;
}

void Residency::beginReplay(const CapturedFetches& graph, Stream stream) {
  hostErrors_.raise();
  settle();
  if (link_.capturing(stream)) {
    throw Error(
        "offload: a CUDA graph that fetches offload tensors can't be replayed into another one that is being captured.");
  }
  std::vector<Token> before;
  std::vector<std::pair<HeldCopy*, std::uint64_t>> stale; // and what it will be a copy of
  graph.staging().beginTurn();
  try {
    before = graph.staging().uses();
    Lock lock(mutex_);
    sendAllHome(lock, graph.blocks(), false);
    for (const Block* block : graph.blocks()) block->writers.appendTo(before);
    for (const auto& copy : graph.held()) {
      if (copy->version != copy->block.version) stale.emplace_back(copy.get(), copy->block.version);
    }
    for (Block* block : graph.blocks()) ++block->issuing;
  } catch (...) {
    graph.staging().endTurn();
    throw;
  }
  try {
    for (const Token& token : before) token.orderBefore(stream);
    for (const auto& [copy, version] : stale) {
      graph.refresh(*copy, stream);
      copy->version = version;
    }
  } catch (...) {
    endReplay(graph, stream);
    throw;
  }
}

void Residency::endReplay(const CapturedFetches& graph, Stream stream) {
  const Token done = events_.record(stream);
  graph.staging().addUse(done);
  std::vector<TokenSet*> many;
  {
    const Lock lock(mutex_);
    for (Block* block : graph.blocks()) {
      block->readers.add(done);
      if (block->readers.all().size() > kManyTokens) many.push_back(&block->readers);
      --block->issuing;
    }
  }
  issued_.notify_all();
  forgetDone(many);
  graph.staging().endTurn();
}

} // namespace offload
