// What looks at everything after every call, in a debug mode.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

namespace offload {

/// Runs a check when a call ends, however it ends. A check that throws ends the process with its sentence: whose invariants are broken
/// can't be trusted to go on, and a call that ends may be a deleter's.
template <std::invocable Check>
class Audit {
 public:
  Audit(bool wanted, const char* call, Check check) : wanted_(wanted), call_(call), check_(std::move(check)) {}
  ~Audit() {
    if (!wanted_) return;
    try {
      check_();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s This was found after %s().\n", error.what(), call_);
      std::abort();
    }
  }
  Audit(const Audit&) = delete;
  Audit& operator=(const Audit&) = delete;

 private:
  const bool wanted_;
  const char* const call_;
  const Check check_;
};

} // namespace offload
