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

void CapturedGraph::beginReplay() {
  replaysOn_ = Context::get().currentStream(device_);
  Context::get().residency().beginReplay(*fetches_, replaysOn_);
}

void CapturedGraph::endReplay() {
  Context::get().residency().endReplay(*fetches_, replaysOn_);
}

void refuseHostWorkInCapture(c10::DeviceIndex index) {
  const Context& context = Context::get();
  if (context.hasCache()) context.residency().refuseCapture(context.currentStream(index), "work on the host");
}

} // namespace offload
