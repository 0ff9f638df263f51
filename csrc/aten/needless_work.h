// What is slow and looks like any other call: work on the host, and bytes that travel without need. Each is counted by the
// operation's name, and said once for each where much is at stake.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace offload {

constexpr std::size_t kLargeBytes = std::size_t{16} << 20;

/// While one lives, what this thread fetches is for that operation.
class FetchingFor {
 public:
  explicit FetchingFor(const c10::OperatorHandle& op);
  ~FetchingFor();
  FetchingFor(const FetchingFor&) = delete;
  FetchingFor& operator=(const FetchingFor&) = delete;

 private:
  const c10::OperatorHandle* const before_;
};

/// An operation on offload tensors alone has no kernel where it should compute, and computes on the host, on operands of so many
/// bytes.
void countHostFallback(const c10::OperatorHandle& op, std::size_t bytes);
/// How often, by name.
std::map<std::string, std::uint64_t> hostFallbacks();

/// To fetch a tensor takes so many bytes, as its elements lie apart. What is small, or less than twice the elements, doesn't count.
void countExcess(const at::Tensor& tensor, std::size_t bytes);
/// Bytes beyond those of the elements, by name.
std::map<std::string, std::uint64_t> excessBytes();

} // namespace offload
