#include "python/saved_tensors.h"

#include "autograd/saved_tensors.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {

void bindSavedTensors(py::module_& m) {
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(m, "SavedTensor");
  py::class_<SavedTensors, std::shared_ptr<SavedTensors>>(m, "SavedTensors")
      .def(
          py::init([](std::size_t minBytes, std::size_t keepBytes, std::optional<std::size_t> maxHostBytes) {
            const SavedTensorsOptions options{minBytes, keepBytes, maxHostBytes.value_or(SIZE_MAX)};
            return std::make_shared<SavedTensors>(options);
          }),
          py::arg("min_bytes"), py::arg("keep_bytes"), py::arg("max_host_bytes"))
      .def_static("keeping", [] { return std::make_shared<SavedTensors>(SavedTensorsOptions{.activations = false}); })
      .def("may_go_home", &SavedTensors::mayGoHome)
      .def("pack", torch::wrap_pybind_function_no_gil(&SavedTensors::pack), py::arg("tensor"), py::arg("home") = true)
      .def("unpack", torch::wrap_pybind_function_no_gil(&SavedTensors::unpack));
}

} // namespace offload
