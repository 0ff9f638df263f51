#include "python/file_bindings.h"

#include "aten/file_tensors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {
namespace {

py::bytes readBytes(const File& file, std::uint64_t offset, std::size_t bytes) {
  std::string read(bytes, '\0');
  const FilePart part{offset, reinterpret_cast<std::byte*>(read.data()), bytes};
  {
    py::gil_scoped_release release;
    file.read({&part, 1}, 1);
  }
  return read;
}

} // namespace

void bindFiles(py::module_& m) {
  py::class_<File, std::shared_ptr<File>>(m, "File")
      .def(py::init<std::string>(), py::arg("path"))
      .def_property_readonly("path", &File::path)
      .def_property_readonly("bytes", &File::bytes)
      .def("require_unchanged", &File::requireUnchanged)
      .def("read", &readBytes, py::arg("offset"), py::arg("bytes"))
      .def("read_tensors", &readTensors, py::arg("tensors"))
      .def(
          "tensor",
          [](const std::shared_ptr<File>& file, std::uint64_t offset, const std::vector<std::int64_t>& sizes,
             at::ScalarType type, c10::Device device) { return fileTensor(file, offset, sizes, type, device); },
          py::arg("offset"), py::arg("sizes"), py::arg("dtype"), py::arg("device"));
}

} // namespace offload
