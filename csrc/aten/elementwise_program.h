// Sequences of elementwise operations, run on host bytes piece by piece.
//
// Note [Piece by piece]
// An optimizer's step is a dozen operations for each parameter, and one after the other each of them reads and writes all of it: the
// time goes into memory, twice to three times what the values themselves need. Elementwise operations may as well be done to a piece
// that a core's cache holds, all of them, and then to the next. They have the bits of PyTorch's own, and no element meets another, so
// the bits are those of the plain order; and what is made in between is as large as a piece, not as the parameter. Each thread keeps
// that memory, since to get and to give back some 64 KiB costs malloc a system call and page faults, as much as the work.
#pragma once

#include "aten/elementwise_step.h"
#include "aten/vector/step.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace offload {

/// Steps make nothing: each writes to a register, in place or as `out=`, which its schema says.
class ElementwiseProgram {
 public:
  ElementwiseProgram(std::size_t operands, std::vector<c10::ScalarType> temporaries, std::vector<ElementwiseStep> steps);

  /// Whether all are offload tensors of one size and strides, dense and without overlap, with each other too.
  static bool fits(const std::vector<at::Tensor>& operands);
  /// Runs the steps on tensors that fit, in place: on the host bytes by all of PyTorch's threads, at once or later where Note [Host
  /// jobs] lets it; or on the device, where doOnDevice() can. Bumps the versions of what is written to.
  static void run(
      std::shared_ptr<const ElementwiseProgram> program, const std::vector<at::Tensor>& operands, std::int64_t pieceElements);

  /// Runs the steps on an element of each operand's dtype, which throws what they throw whatever the values: of a number that
  /// the dtype doesn't hold, say. From then on vector kernels do those that they can, on operands of these dtypes on the host: Note
  /// [Vector steps]. To be called once, before run().
  void prepare(const std::vector<c10::ScalarType>& types);
  /// How many of the steps vector kernels do.
  std::size_t vectorSteps() const;

  /// Elements of a piece that, with a few operands of four bytes, a core's own cache holds.
  static constexpr std::int64_t kPieceElements = std::int64_t{1} << 14;
  /// And of one that keeps a device busy, and whose temporaries take little of its memory.
  static constexpr std::int64_t kDevicePieceElements = std::int64_t{1} << 24;

 private:
  /// A step that is PyTorch's, or some that vector kernels do.
  struct Part {
    std::size_t step = 0;
    std::vector<VectorStep> vectors;
  };

  void runPieces(const std::vector<at::Tensor>& aliases, std::int64_t pieceElements) const;
  void runThere(const std::vector<at::Tensor>& tensors) const;
  std::vector<at::Tensor> withTemporaries(const std::vector<at::Tensor>& operands, std::int64_t elements) const;
  std::vector<at::Tensor> withKeptTemporaries(const std::vector<at::Tensor>& operands, std::int64_t elements) const;
  void runPiece(
      const std::vector<Part>& parts, const std::vector<at::Tensor>& memory, std::int64_t from, std::int64_t count) const;

  std::size_t operands_;
  std::vector<c10::ScalarType> temporaries_;
  std::vector<ElementwiseStep> steps_;
  std::vector<bool> written_; // of the operands
  std::vector<Part> plain_; // each step is one
  std::vector<Part> prepared_; // for operands of these types, on the host
  std::vector<c10::ScalarType> preparedFor_;
};

} // namespace offload
