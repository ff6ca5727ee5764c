// Device-only code: memory instructions and conversions in PTX. `shim.h` of the tests defines the same names
// for a host compiler; the code after this file is compiled for both.
//
// Pointers come from tables, so the compiler does not know their address space and would use generic
// accesses. These are `global`, and `cs` (streaming, evict first) unless the memory is accessed again soon.

#define DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/// Load or store 16, 8, 4, 2 or 1 bytes at an aligned address. With `KEEP` they stay in the cache as others do, since
/// another kernel accesses them soon.
template <bool KEEP = false>
DEVICE void load16(u32* w, u64 at) {
  if constexpr (KEEP)
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(at) : "memory");
  else
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(at) : "memory");
}
template <bool KEEP = false>
DEVICE void load8(u32* w, u64 at) {
  if constexpr (KEEP)
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(at) : "memory");
  else
    asm volatile("ld.global.cs.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(at) : "memory");
}
template <bool KEEP = false>
DEVICE u32 load4(u64 at) {
  u32 x;
  if constexpr (KEEP) asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  else asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
template <bool KEEP = false>
DEVICE u16 load2(u64 at) {
  u16 x;
  if constexpr (KEEP) asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
  else asm volatile("ld.global.cs.u16 %0, [%1];" : "=h"(x) : "l"(at) : "memory");
  return x;
}
DEVICE u32 load1(u64 at) {
  u32 x;
  asm volatile("ld.global.cs.u8 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
template <bool KEEP = false>
DEVICE void store16(u64 at, const u32* w) {
  if constexpr (KEEP)
    asm volatile("st.global.v4.u32 [%4], {%0, %1, %2, %3};"
                 :: "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(at) : "memory");
  else
    asm volatile("st.global.cs.v4.u32 [%4], {%0, %1, %2, %3};"
                 :: "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(at) : "memory");
}
template <bool KEEP = false>
DEVICE void store8(u64 at, const u32* w) {
  if constexpr (KEEP)
    asm volatile("st.global.v2.u32 [%2], {%0, %1};" :: "r"(w[0]), "r"(w[1]), "l"(at) : "memory");
  else
    asm volatile("st.global.cs.v2.u32 [%2], {%0, %1};" :: "r"(w[0]), "r"(w[1]), "l"(at) : "memory");
}
template <bool KEEP = false>
DEVICE void store4(u64 at, u32 x) {
  if constexpr (KEEP) asm volatile("st.global.u32 [%1], %0;" :: "r"(x), "l"(at) : "memory");
  else asm volatile("st.global.cs.u32 [%1], %0;" :: "r"(x), "l"(at) : "memory");
}
template <bool KEEP = false>
DEVICE void store2(u64 at, u16 x) {
  if constexpr (KEEP) asm volatile("st.global.u16 [%1], %0;" :: "h"(x), "l"(at) : "memory");
  else asm volatile("st.global.cs.u16 [%1], %0;" :: "h"(x), "l"(at) : "memory");
}

/// Widens a half that is not NaN.
DEVICE float f16_to_f32(u16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
/// Rounds a float that is not NaN to nearest even.
DEVICE u16 f32_to_f16(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
