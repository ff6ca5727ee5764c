// `__half` and `__nv_bfloat16` with what candle's kernels use of NVIDIA's headers: every operation
// is that of f32, rounded to 16 bits.

#pragma once

#include "device.h"

namespace fake {

struct F16 {
  template <class T>
  static unsigned short narrow(T x) { return bits<unsigned short>(static_cast<_Float16>(x)); }
  static float widen(unsigned short x) { return bits<_Float16>(x); }
};
struct Bf16 {
  static unsigned short narrow(float x) {
    unsigned u = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static float widen(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
};

template <class Code>
struct Half {
  unsigned short x;

  Half() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Half(T value) : x(Code::narrow(value)) {}
  operator float() const { return Code::widen(x); }

  friend Half operator-(Half a) { return -float(a); }
  friend Half operator+(Half a, Half b) { return float(a) + float(b); }
  friend Half operator-(Half a, Half b) { return float(a) - float(b); }
  friend Half operator*(Half a, Half b) { return float(a) * float(b); }
  friend Half operator/(Half a, Half b) { return float(a) / float(b); }
  friend Half &operator+=(Half &a, Half b) { return a = a + b; }
  friend Half &operator-=(Half &a, Half b) { return a = a - b; }
  friend Half &operator*=(Half &a, Half b) { return a = a * b; }
  friend Half &operator/=(Half &a, Half b) { return a = a / b; }
  friend bool operator==(Half a, Half b) { return float(a) == float(b); }
  friend bool operator!=(Half a, Half b) { return float(a) != float(b); }
  friend bool operator<(Half a, Half b) { return float(a) < float(b); }
  friend bool operator<=(Half a, Half b) { return float(a) <= float(b); }
  friend bool operator>(Half a, Half b) { return float(a) > float(b); }
  friend bool operator>=(Half a, Half b) { return float(a) >= float(b); }

  friend bool __hisnan(Half a) { return isnan(float(a)); }
  friend Half __hmax_nan(Half a, Half b) { return __hisnan(a) ? a : __hisnan(b) ? b : Half(fmaxf(a, b)); }
  friend Half __hmin_nan(Half a, Half b) { return __hisnan(a) ? a : __hisnan(b) ? b : Half(fminf(a, b)); }
  friend Half __habs(Half a) { return fabsf(a); }
  friend Half hsqrt(Half a) { return sqrtf(a); }
  friend Half hsin(Half a) { return sinf(a); }
  friend Half hcos(Half a) { return cosf(a); }
  friend Half hlog(Half a) { return logf(a); }
  friend Half hexp(Half a) { return expf(a); }
};

}  // namespace fake

using __half = fake::Half<fake::F16>;
using __nv_bfloat16 = fake::Half<fake::Bf16>;

inline __half __float2half(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half __ushort_as_half(unsigned short x) { return fake::bits<__half>(x); }
inline unsigned short __half_as_ushort(__half x) { return x.x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }

// Two at once.
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x * b.x, a.y * b.y}; }
