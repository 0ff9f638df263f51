#include "python/graphs.h"

#include "aten/captured_graph.h"
#include "aten/cuda_glue.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {

namespace {

// One call, so that nothing of Python's can come between and leave a replay begun.
void replay(const CapturedGraph& graph, const py::object& launch) {
  const py::gil_scoped_release others;
  const CapturedGraph::Replay ordered(graph);
  const py::gil_scoped_acquire mine;
  launch();
}

// Once for each call of a function with CUDA graphs, of all its inputs.
bool canAllBeCaptured(const py::iterable& values, std::uintptr_t alignment) {
  for (const py::handle value : values) {
    if (THPVariable_Check(value.ptr()) && !canBeCaptured(THPVariable_Unpack(value.ptr()), alignment)) return false;
  }
  return true;
}

} // namespace

void bindGraphs(py::module_& m) {
  py::class_<CapturedGraph>(m, "CapturedGraph")
      .def(py::init<c10::DeviceIndex>(), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("tensors", &CapturedGraph::tensors)
      .def("end", torch::wrap_pybind_function_no_gil(&CapturedGraph::end))
      .def("replay", &replay, py::arg("launch"));
  m.def("set_thread_has_pool", &cuda::setThreadHasPool, py::arg("has"));
  m.def("can_be_captured", &canAllBeCaptured, py::arg("values"), py::arg("alignment") = 1);
  m.def("captures_graphs", [] {
    const Context* now = Context::ifCreated();
    return now != nullptr && now->backend() == Backend::Cuda;
  });
}

} // namespace offload
