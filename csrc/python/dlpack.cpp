#include "python/dlpack.h"

#include "aten/context.h"
#include "aten/tensors.h"

#include <ATen/dlpack.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <sstream>

namespace py = pybind11;

namespace offload {
namespace {

DLPackExchangeAPI original;

bool isRefused(void* object) noexcept {
  try {
    refuseDlpack(static_cast<PyObject*>(object));
    return false;
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return true;
}

int exportManaged(void* object, DLManagedTensorVersioned** out) {
  return isRefused(object) ? -1 : original.managed_tensor_from_py_object_no_sync(object, out);
}

int exportView(void* object, DLTensor* out) {
  return isRefused(object) ? -1 : original.dltensor_from_py_object_no_sync(object, out);
}

} // namespace

void refuseDlpack(py::handle object) {
  if (!Context::inUse() || !THPVariable_Check(object.ptr())) return;
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  if (!isOffload(tensor)) return;
  std::ostringstream text;
  text << "offload: a tensor of shape " << py::str(py::list(object.attr("shape"))).cast<std::string>() << " on "
       << tensor.device() << " can't be handed over through DLPack, which has no such device; hand over a copy, tensor.cpu().";
  throw py::buffer_error(text.str());
}

py::object guardedDlpackTable(const py::capsule& table) {
  const auto* const known = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(table.ptr(), table.name()));
  if (known == nullptr) throw py::error_already_set();
  TORCH_CHECK(
      known->header.version.major == DLPACK_MAJOR_VERSION, "offload: PyTorch's DLPack has version ",
      known->header.version.major, ", and it was built with ", DLPACK_MAJOR_VERSION, ".");
  static DLPackExchangeAPI guarded; // for as long as the process: who has found it keeps it
  original = guarded = *known;
  guarded.managed_tensor_from_py_object_no_sync = exportManaged;
  if (guarded.dltensor_from_py_object_no_sync != nullptr) guarded.dltensor_from_py_object_no_sync = exportView;
  return py::capsule(&guarded, table.name());
}

} // namespace offload
