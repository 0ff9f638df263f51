#include "aten/captured_graph.h"

#include "aten/tensors.h"

namespace offload {

CapturedGraph::CapturedGraph(c10::DeviceIndex device)
    : device_(device), fetches_(Context::get().residency().beginCapture(Context::get().currentStream(device), [](Block& block) {
        return std::make_shared<c10::DataPtr>(Context::retain(block));
      })) {}

void CapturedGraph::end() {
  Context::get().residency().endCapture(*fetches_);
}

std::size_t CapturedGraph::tensors() const {
  return fetches_->blocks().size();
}

CapturedGraph::Replay::Replay(const CapturedGraph& graph)
    : fetches_(*graph.fetches_), stream_(Context::get().currentStream(graph.device_)) {
  Context::get().residency().beginReplay(fetches_, stream_);
}

CapturedGraph::Replay::~Replay() {
  Context::get().residency().endReplay(fetches_, stream_);
}

// Fake tensors and wrappers name the device and have no Block.
bool canBeCaptured(const at::Tensor& tensor, std::uintptr_t alignment) {
  if (!isOffload(tensor) || tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage()) return true;
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() == 0) return true;
  return memoryOf(blockOf(storage)) == HostMemory::Pinned &&
      reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % alignment == 0;
}

void refuseHostAccessInCapture(c10::DeviceIndex index) {
  const Context& context = Context::get();
  if (context.hasCache())
    context.residency().refuseCapture(context.currentStream(index), "read or write offload tensors on the host");
}

} // namespace offload
