// Element types, packs of 16 bytes, warps, and sums in a fixed order for all kernels.
//
// Compiled without contraction of `a * b + c` and without flushing subnormals, so that the code
// below computes the same bits as in Rust.

/// Threads of a block, for all kernels.
constexpr u32 THREADS = 256;
constexpr u32 WARP = 32;
constexpr u32 ALL = 0xffffffffu;
constexpr u32 INFINITY_BITS = 0x7f800000u;

/// The element types: storage, and conversion from and to f32 that keeps the sign and upper bits of
/// NaNs.
struct F32 {
  typedef u32 Bits;
  static DEVICE float widen(u32 bits) { return __uint_as_float(bits); }
  static DEVICE u32 narrow(float x) { return __float_as_uint(x); }
  template <bool KEEP = false> static DEVICE u32 load(u64 at) { return load4<KEEP>(at); }
  template <bool KEEP = false> static DEVICE void store(u64 at, u32 bits) { store4<KEEP>(at, bits); }
};
struct F16 {
  typedef u16 Bits;
  static DEVICE float widen(u16 bits) {
    const u32 nan = ((u32)bits & 0x8000u) << 16 | 0x7fc00000u | ((u32)bits & 0x3ffu) << 13;
    return (bits & 0x7fffu) > 0x7c00u ? __uint_as_float(nan) : f16_to_f32(bits);
  }
  static DEVICE u16 narrow(float x) {
    const u32 bits = __float_as_uint(x);
    const u32 nan = (bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu);
    return (bits & 0x7fffffffu) > INFINITY_BITS ? (u16)nan : f32_to_f16(x);
  }
  template <bool KEEP = false> static DEVICE u16 load(u64 at) { return load2<KEEP>(at); }
  template <bool KEEP = false> static DEVICE void store(u64 at, u16 bits) { store2<KEEP>(at, bits); }
};
struct Bf16 {
  typedef u16 Bits;
  static DEVICE float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
  static DEVICE u16 narrow(float x) {
    const u32 bits = __float_as_uint(x);
    // Adds just below half a unit, and one more for ties with an odd result.
    const u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const u32 nan = bits >> 16 | 0x40u;
    return (u16)((bits & 0x7fffffffu) > INFINITY_BITS ? nan : rounded);
  }
  template <bool KEEP = false> static DEVICE u16 load(u64 at) { return load2<KEEP>(at); }
  template <bool KEEP = false> static DEVICE void store(u64 at, u16 bits) { store2<KEEP>(at, bits); }
};

/// `N` adjacent elements, accessed by 16 bytes, or by 8 if they are so few.
template <class T, int N>
union Pack {
  typename T::Bits x[N];
  u32 w[N * sizeof(typename T::Bits) / 4];

  enum { BYTES = N * sizeof(typename T::Bits) };

  /// The address of element `i`.
  static DEVICE u64 at(u64 base, u64 i) { return base + i * sizeof(typename T::Bits); }
  /// The alignment of a pack.
  static constexpr u64 ALIGN = BYTES < 16 ? BYTES : 16;

  template <bool KEEP = false>
  DEVICE void load(u64 from) {
    if constexpr (BYTES < 16) load8<KEEP>(w, from);
    else {
#pragma unroll
      for (int k = 0; k < BYTES / 16; k++) load16<KEEP>(w + 4 * k, from + 16 * k);
    }
  }
  template <bool KEEP = false>
  DEVICE void store(u64 to) const {
    if constexpr (BYTES < 16) store8<KEEP>(to, w);
    else {
#pragma unroll
      for (int k = 0; k < BYTES / 16; k++) store16<KEEP>(to + 16 * k, w + 4 * k);
    }
  }
};

template <class T>
DEVICE float load_one(u64 base, u64 i) { return T::widen(T::load(base + i * sizeof(typename T::Bits))); }
template <class T>
DEVICE void store_one(u64 base, u64 i, float x) {
  T::store(base + i * sizeof(typename T::Bits), T::narrow(x));
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7fffffffu) < INFINITY_BITS; }

DEVICE u32 lane() { return threadIdx.x % WARP; }
/// The index of this warp in the grid, and the grid's number of warps.
DEVICE u32 warp_index() { return (blockIdx.x * THREADS + threadIdx.x) / WARP; }
DEVICE u32 warp_count() { return gridDim.x * (THREADS / WARP); }

// Sums, in the order of `cpu/sum.rs`: element `i` of a block of 1024 is added to lane `i mod 16`,
// in order; lanes, blocks and further levels are added pairwise, (0, 1), (2, 3), ... An odd last
// one is kept, which equals adding 0: a sum that began at +0 is never -0.

constexpr u32 BLOCK = 1024;
constexpr u32 LANES = 16;
/// Elements that one warp sums: blocks that form a complete subtree.
constexpr u32 SPAN = 16 * BLOCK;

/// Adds the values of a warp's threads pairwise: groups of `from` threads hold equal values before,
/// groups of `to` threads after; or `from` sums of values that lie so many threads apart.
DEVICE double fold_threads(double x, u32 from, u32 to) {
  for (u32 step = from; step < to; step *= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

template <int N>
DEVICE double fold_array(const double* x) {
  if constexpr (N == 1) return x[0];
  else return fold_array<N / 2>(x) + fold_array<N / 2>(x + N / 2);
}

/// Computes `K` sums over a span of at most `SPAN` elements by one warp; every thread gets them. A
/// thread has `W` adjacent lanes of a block and visits them row by row: `visit(i, many, lanes)`
/// adds the terms of elements `i..i + many` to `lanes[k][0..many]`.
template <int K, int W, class Visit>
DEVICE void sum_span(u32 count, double (&sums)[K], Visit visit) {
  constexpr u32 own = LANES / W, at_once = WARP / own * BLOCK;
  for (int k = 0; k < K; k++) sums[k] = 0;
#pragma unroll 1
  for (u32 from = 0; from < SPAN; from += at_once) {
    const u32 block = from + lane() / own * BLOCK;
    const u32 end = count < block + BLOCK ? count : block + BLOCK;
    double lanes[K][W] = {};
#pragma unroll 4
    for (u32 i = block + lane() % own * W; i < end; i += LANES)
      visit(i, end - i < W ? end - i : W, lanes);
#pragma unroll
    for (int k = 0; k < K; k++)
      sums[k] += fold_threads(fold_array<W>(lanes[k]), 1, WARP);
  }
}

/// Brings the `index`-th of `count` sums, which all threads of a warp have, to the tree of `sums`:
/// of 32 neighbours the warp that is the last folds them, and brings what they give to the next
/// level. Returns true in the warp that then has the total. `arrived` has a number for each sum, 0
/// before and afterwards; all sums must come in one launch. `count` is below 2^30.
DEVICE bool add_to_tree(double* sums, u32* arrived, u32 index, u32 count, double& sum) {
  // Sums of a level lie 2^shift apart, each where the first of its leaves was.
#pragma unroll 1
  for (u32 shift = 0; (count - 1) >> shift; shift += 5) {
    const u32 first = index >> (shift + 5) << (shift + 5), left = ((count - 1 - first) >> shift) + 1;
    const u32 members = left < WARP ? left : WARP;
    if (members > 1) {
      // There are more leaves below than levels, so each fold has a number of its own.
      u32* const own = &arrived[first + shift / 5];
      u32 before = 0;
      if (lane() == 0) {
        sums[index] = sum;
        __threadfence();
        before = atomicAdd(own, 1u);
      }
      // What thread 0 has, to all.
      if (fold_threads(before, 1, WARP) != members - 1) return false;
      if (lane() == 0) *own = 0;
      __syncwarp();
      __threadfence();
      sum = fold_threads(lane() < members ? sums[first + (lane() << shift)] : 0, 1, WARP);
    }
    index = first;
  }
  return true;
}

/// Whether this block is the grid's last to call this. The last block's threads see all earlier
/// writes of the other blocks. `arrived` counts the calls and is 0 afterwards.
DEVICE bool is_last_block(u32* arrived) {
  __shared__ u32 before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(arrived, 1u);
  __syncthreads();
  const bool last = before == gridDim.x - 1;
  if (last && threadIdx.x == 0) *arrived = 0;
  __threadfence();
  return last;
}
