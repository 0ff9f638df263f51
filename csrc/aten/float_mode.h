// How a thread computes with floating-point numbers: torch.set_flush_denormal(), which on x86 each thread has a say on.
#pragma once

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace offload {

#ifdef __SSE__
inline constexpr unsigned kUsualFloatMode = 0x1F80 & ~unsigned{_MM_EXCEPT_MASK};
inline unsigned floatMode() {
  return _mm_getcsr() & ~unsigned{_MM_EXCEPT_MASK};
}
inline void setFloatMode(unsigned mode) {
  _mm_setcsr(mode);
}
#else
inline constexpr unsigned kUsualFloatMode = 0;
inline unsigned floatMode() {
  return 0;
}
inline void setFloatMode(unsigned /*mode*/) {}
#endif

/// While one lives this thread computes as another one did that was asked, or as usual.
class FloatMode {
 public:
  explicit FloatMode(unsigned mode) : before_(floatMode()) {
    setFloatMode(mode);
  }
  ~FloatMode() {
    setFloatMode(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  const unsigned before_;
};

} // namespace offload
