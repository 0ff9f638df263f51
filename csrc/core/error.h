// The errors of core. The glue turns them into PyTorch's own exception types.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace offload {

/// Something went wrong in one clear sentence: what, where, the numbers, what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Host or device memory could not be had. Retrying after freeing memory may succeed.
class OutOfMemory : public Error {
 public:
  enum class Where { Host, Device };

  OutOfMemory(Where where, std::size_t bytes, const std::string& sentence) : Error(sentence), where_(where), bytes_(bytes) {}

  Where where() const noexcept {
    return where_;
  }
  /// Bytes that were asked for.
  std::size_t bytes() const noexcept {
    return bytes_;
  }

 private:
  Where where_;
  std::size_t bytes_;
};

} // namespace offload
