#include "aten/captured_graph.h"

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

void refuseHostAccessInCapture(c10::DeviceIndex index) {
  const Context& context = Context::get();
  if (context.hasCache())
    context.residency().refuseCapture(context.currentStream(index), "read or write offload tensors on the host");
}

} // namespace offload
