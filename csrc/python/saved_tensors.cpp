#include "python/saved_tensors.h"

#include "autograd/saved_tensors.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {
namespace {

class Hooks {
 public:
  Hooks(SavedTensorsOptions options, py::object filter)
      : region_(std::make_shared<SavedTensors>(options)), filter_(std::move(filter)) {}

  std::shared_ptr<SavedTensor> pack(const py::object& tensor) const {
    const at::Tensor& value = THPVariable_Unpack(tensor.ptr());
    const bool home = filter_.is_none() || !region_->mayGoHome(value) || py::cast<bool>(filter_(tensor));
    const py::gil_scoped_release release;
    return region_->pack(value, home);
  }

  py::object unpack(const SavedTensor& saved) const {
    at::Tensor tensor;
    {
      const py::gil_scoped_release release;
      tensor = region_->unpack(saved);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
  }

 private:
  const std::shared_ptr<SavedTensors> region_;
  const py::object filter_;
};

} // namespace

void bindSavedTensors(py::module_& m) {
  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(m, "SavedTensor");
  py::class_<Hooks>(m, "SavedTensors")
      .def(
          py::init([](std::size_t minBytes, std::size_t keepBytes, std::optional<std::size_t> maxHostBytes, py::object filter) {
            const SavedTensorsOptions options{minBytes, keepBytes, maxHostBytes.value_or(SIZE_MAX)};
            return std::make_unique<Hooks>(options, std::move(filter));
          }),
          py::arg("min_bytes"), py::arg("keep_bytes"), py::arg("max_host_bytes"), py::arg("filter"))
      .def_static("keeping", [] { return std::make_unique<Hooks>(SavedTensorsOptions{.activations = false}, py::none()); })
      .def("pack", torch::wrap_pybind_function(&Hooks::pack))
      .def("unpack", torch::wrap_pybind_function(&Hooks::unpack));
}

} // namespace offload
