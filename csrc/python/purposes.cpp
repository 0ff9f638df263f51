#include "python/purposes.h"

#include "aten/sparse.h"
#include "aten/tensors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace offload {
namespace {

Purpose purposeNamed(const std::string& name) {
  for (const Purpose purpose : kPurposes) {
    if (name == nameOf(purpose)) return purpose;
  }
  TORCH_CHECK(false, "offload: \"", name, "\" is no purpose of host bytes.");
}

void claim(py::handle object, Purpose purpose);

void claimDense(const at::Tensor& tensor, Purpose purpose) {
  if (tensor.has_storage() && tensor.storage().nbytes() > 0) {
    Context::get().accounts().claim(blockOf(tensor.storage()), purpose);
  }
}

void claimTensor(py::handle object, Purpose purpose) {
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (!isOffload(tensor)) return;
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    if (!py::hasattr(object, "__tensor_flatten__")) return;
    py::module_::import("torch_offload._wrappers").attr("follow")(py::type::of(object));
    const py::tuple flat = object.attr("__tensor_flatten__")();
    for (const py::handle name : flat[0]) claim(object.attr(name), purpose);
  } else {
    visitDense(tensor, [purpose](const at::Tensor& dense) { claimDense(dense, purpose); });
  }
}

void claim(py::handle object, Purpose purpose) {
  if (THPVariable_Check(object.ptr())) {
    claimTensor(object, purpose);
  } else if (py::isinstance<py::dict>(object)) {
    for (const auto& entry : py::reinterpret_borrow<py::dict>(object)) claim(entry.second, purpose);
  } else if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    for (const py::handle entry : object) claim(entry, purpose);
  }
}

} // namespace

void claimTensors(py::handle tensors, const std::string& purpose) {
  claim(tensors, purposeNamed(purpose));
}

} // namespace offload
