#include "python/elementwise.h"

#include "aten/elementwise_program.h"

#include <ATen/ScalarOps.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace offload {
namespace {

struct Register {
  std::size_t number;
};

c10::Scalar scalarOf(const py::handle& value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<std::int64_t>();
  return value.cast<double>();
}

c10::IValue valueOf(const py::handle& value, const c10::Argument& argument) {
  if (value.is_none()) return {};
  if (THPVariable_Check(value.ptr())) return THPVariable_Unpack(value.ptr());
  c10::TypePtr type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      // As PyTorch's own binding does: a number beside a tensor doesn't decide the result's dtype.
      return at::native::wrapped_scalar_tensor(scalarOf(value));
    case c10::TypeKind::NumberType:
      return scalarOf(value);
    case c10::TypeKind::FloatType:
      return value.cast<double>();
    case c10::TypeKind::IntType:
      return value.cast<std::int64_t>();
    case c10::TypeKind::BoolType:
      return value.cast<bool>();
    case c10::TypeKind::StringType:
      return value.cast<std::string>();
    default:
      TORCH_CHECK(false, "offload: an elementwise program can't hold an argument of type ", type->str(), ".");
  }
}

ElementwiseStep stepOf(const py::tuple& written) {
  ElementwiseStep step{
      c10::Dispatcher::singleton().findSchemaOrThrow(
          written[0].cast<std::string>().c_str(), written[1].cast<std::string>().c_str()),
      {},
      {}};
  const auto& schema = step.op.schema();
  const auto arguments = written[2].cast<py::sequence>();
  TORCH_CHECK(
      arguments.size() == schema.arguments().size(), "offload: ", schema.name(), " takes ", schema.arguments().size(),
      " arguments, and a step gives it ", arguments.size(), ".");
  for (std::size_t k = 0; k < arguments.size(); ++k) {
    const py::object value = arguments[k];
    if (py::isinstance<Register>(value)) {
      step.registers.emplace_back(k, value.cast<Register>().number);
      step.arguments.emplace_back();
    } else {
      step.arguments.push_back(valueOf(value, schema.arguments()[k]));
    }
  }
  return step;
}

} // namespace

void bindElementwise(py::module_& m) {
  py::class_<Register>(m, "Register").def(py::init<std::size_t>());
  py::class_<ElementwiseProgram, std::shared_ptr<ElementwiseProgram>>(m, "ElementwiseProgram")
      .def(py::init([](std::size_t operands, std::vector<c10::ScalarType> temporaries, const std::vector<py::tuple>& steps) {
        std::vector<ElementwiseStep> read;
        for (const py::tuple& step : steps) read.push_back(stepOf(step));
        return std::make_shared<ElementwiseProgram>(operands, std::move(temporaries), std::move(read));
      }))
      .def_static("fits", &ElementwiseProgram::fits)
      .def("prepare", &ElementwiseProgram::prepare)
      .def_property_readonly("vector_steps", &ElementwiseProgram::vectorSteps)
      .def(
          "run",
          [](std::shared_ptr<ElementwiseProgram> program, const std::vector<at::Tensor>& operands, std::int64_t pieceElements) {
            ElementwiseProgram::run(std::move(program), operands, pieceElements);
          },
          py::arg("operands"), py::arg("piece_elements") = ElementwiseProgram::kPieceElements,
          py::call_guard<py::gil_scoped_release>());
}

} // namespace offload
