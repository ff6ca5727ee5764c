// Device-only code: memory instructions and conversions in PTX. `shim.h` of the tests defines the
// same names for a host compiler; the code after this file is compiled for both.
//
// Pointers come from tables, so the compiler does not know their address space and would use
// generic accesses. These are `global`, and `cs` (streaming, evict first) unless the memory is
// accessed again soon.

#define DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/// Load or store 16, 8, 4, 2 or 1 bytes at an aligned address. With `KEEP` they stay in the cache
/// as others do, since another kernel accesses them soon.
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
DEVICE void store1(u64 at, u32 x) {
  asm volatile("st.global.cs.u8 [%1], %0;" :: "r"(x), "l"(at) : "memory");
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

/// `x` of the thread of the same warp whose number differs by `step`, a power of two.
DEVICE float exchange(float x, u32 step) { return __shfl_xor_sync(0xffffffffu, x, step); }

/// `2^x` but for the last bits; 0 below the smallest normal number.
DEVICE float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// `1 / x` but for the last bits, of a normal number.
DEVICE float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of compute capability 8.0 and later.

/// Begins to copy 16 bytes from global to shared memory, zeros unless they are there.
DEVICE void copy_ahead(void* to, u64 from, bool are_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(are_there ? 16 : 0) : "memory");
#endif
}
/// Waits for the thread's copies.
DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Tensor cores. A warp holds 16 x 16 halves in 4 words of each thread, 16 x 8 floats
// in 4, as `mma.m16n8k16` has them: thread `4 i + j` holds the adjacent columns `2 j` and `2 j + 1`
// of the rows `i` and `i + 8`, first the left half of 8 columns.

/// Reads four 8 x 8 matrices of halves from shared memory, in a warp; thread `8 m + i` gives the
/// address of row `i` of matrix `m`, of 16 bytes. Word `m` of thread `4 i + j` gets columns `2 j`
/// and `2 j + 1` of row `i` of matrix `m`.
DEVICE void load_tiles(u32 (&w)[4], const void* row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}
/// The same with rows and columns exchanged: rows `2 j` and `2 j + 1` of column `i`.
DEVICE void load_tiles_transposed(u32 (&w)[4], const void* row) {
#if __CUDA_ARCH__ >= 800
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"((u32)__cvta_generic_to_shared(row)));
#endif
}
/// `c += a * b` of 16 x 16 and 16 x 8 halves, `bf16` or `f16`; thread `4 i + j` holds rows `2 j`,
/// `2 j + 1` and, 8 further, of column `i` of `b`.
template <bool BF16>
DEVICE void multiply_tiles(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (BF16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
/// Two floats as halves, the first in the lower bits. A NaN loses its bits.
template <bool BF16>
DEVICE u32 narrow_two(float low, float high) {
  u32 w = 0;
#if __CUDA_ARCH__ >= 800
  if constexpr (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
#endif
  return w;
}
