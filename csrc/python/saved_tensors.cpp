#include "python/saved_tensors.h"

#include "autograd/saved_tensors.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {
namespace {

std::optional<py::dict> planOf(const SavedTensors& region) {
  const auto plan = [&region] {
    const py::gil_scoped_release others; // who holds the meter's mutex may want the GIL
    return region.plan();
  }();
  if (!plan) return std::nullopt;
  py::dict result;
  const SavedStep& last = plan->last;
  result["share"] = plan->share;
  result["demanded_share"] = plan->demanded;
  result["bytes"] = last.candidates + last.late;
  result["sent_bytes"] = last.sent;
  result["forward_seconds"] = last.forward;
  result["forward_waited_seconds"] = last.forwardExposed;
  result["backward_seconds"] = last.backward;
  result["backward_waited_seconds"] = last.backwardExposed;
  return result;
}

} // namespace

void bindSavedTensors(py::module_& m) {
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(m, "SavedTensor");
  py::class_<SavedTensors, std::shared_ptr<SavedTensors>>(m, "SavedTensors")
      .def(
          py::init([](std::size_t minBytes, std::size_t keepBytes, std::optional<double> share,
                      std::optional<std::size_t> maxGpuBytes, std::optional<std::size_t> maxHostBytes,
                      std::optional<std::size_t> inFlightBytes, bool pinMemory, bool useStreams) {
            return std::make_shared<SavedTensors>(SavedTensorsOptions{
                .minBytes = minBytes,
                .keepBytes = keepBytes,
                .share = share.value_or(1),
                .learnsShare = !share,
                .maxGpuBytes = maxGpuBytes.value_or(SIZE_MAX),
                .maxHostBytes = maxHostBytes.value_or(SIZE_MAX),
                .inFlightBytes = inFlightBytes.value_or(SIZE_MAX),
                .pinMemory = pinMemory,
                .useStreams = useStreams});
          }),
          py::arg("min_bytes"), py::arg("keep_bytes"), py::arg("share"), py::arg("max_gpu_bytes"), py::arg("max_host_bytes"),
          py::arg("in_flight_bytes"), py::arg("pin_memory"), py::arg("use_streams"))
      .def_static("keeping", [] { return std::make_shared<SavedTensors>(SavedTensorsOptions{.activations = false}); })
      .def("may_go_home", &SavedTensors::mayGoHome)
      .def("plan", &planOf)
      .def("left", torch::wrap_pybind_function_no_gil(&SavedTensors::left))
      .def("pack", torch::wrap_pybind_function_no_gil(&SavedTensors::pack), py::arg("tensor"), py::arg("home") = true)
      .def("unpack", torch::wrap_pybind_function_no_gil(&SavedTensors::unpack));
}

} // namespace offload
