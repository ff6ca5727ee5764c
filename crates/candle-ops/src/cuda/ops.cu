// The operators' kernels, forward and backward.
//
// Compiled after `ptx.h` and `device.h` for each element type, given by the macro `TYPE` (`F32`,
// `F16`, `Bf16`). All compute in f32 and round once, to nearest even, when they write. Sums have a
// fixed order: results do not depend on the launch. A warp takes a row, or a chunk of one; a
// plane of an image is a row.
//
// Addresses are numbers; the Rust function of a kernel's name fills its struct.

typedef TYPE T;

constexpr int WIDE = 16 / sizeof(T::Bits);
constexpr bool IS_HALF = sizeof(T::Bits) == 2;
constexpr float LOG2_E = 1.44269504f;

/// Adjacent elements as f32, `WIDE` of them in one access of 16 bytes, or one.
DEVICE void load(float (&x)[WIDE], u64 base, u64 i, u32 many) {
  if (many == 1) return (void)(x[0] = load_one<T>(base, i));
  Pack<T, WIDE> p;
  p.load(p.at(base, i));
#pragma unroll
  for (int j = 0; j < WIDE; j++) x[j] = T::widen(p.x[j]);
}
DEVICE void store(u64 base, u64 i, u32 many, const float (&x)[WIDE]) {
  if (many == 1) return store_one<T>(base, i, x[0]);
  Pack<T, WIDE> p;
#pragma unroll
  for (int j = 0; j < WIDE; j++) p.x[j] = T::narrow(x[j]);
  p.store(p.at(base, i));
}

/// Takes `step` threads through a row, `many` elements of each at a time: `WIDE` where all
/// `addresses`, or-ed together, allow it, else one.
template <class Visit>
DEVICE void sweep(u64 addresses, u64 count, u64 first, u64 step, Visit visit) {
  const u64 packed = addresses % 16 == 0 ? count / WIDE * WIDE : 0;
  for (u64 i = first * WIDE; i < packed; i += step * WIDE) visit(i, WIDE);
  for (u64 i = packed + first; i < count; i += step) visit(i, 1);
}

/// Elements of a row that a warp takes at a time.
constexpr u32 CHUNK = 1024;
struct Chunk { u32 row, from, count; };
DEVICE u32 chunks(u32 length) { return (length + CHUNK - 1) / CHUNK; }
DEVICE Chunk chunk_of(u32 index, u32 length) {
  const u32 per_row = chunks(length), row = index / per_row, from = (index - row * per_row) * CHUNK;
  return {row, from, length - from < CHUNK ? length - from : CHUNK};
}

DEVICE u64 at(u64 base, u64 i) { return base + i * sizeof(T::Bits); }

DEVICE double sum_of_block(double x) {
  __shared__ double of_warp[THREADS / WARP];
  x = fold_threads(x, 1, WARP);
  __syncthreads(); // The previous sum was read.
  if (lane() == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  double sum = 0;
  for (u32 i = 0; i < THREADS / WARP; i++) sum += of_warp[i];
  return sum;
}

// Element by element.

/// `y = f(a, b)`.
struct MapJob { u64 a, b, y, count; };

template <bool TWO, class F>
DEVICE void map(const MapJob& job, F f) {
  constexpr u32 AT_ONCE = 2;
  const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  const u64 packed = (job.a | job.b | job.y) % 16 == 0 ? job.count / WIDE * WIDE : 0;
  float a[AT_ONCE][WIDE], b[AT_ONCE][WIDE] = {};
  const auto read = [&](u32 k, u64 i) {
    load(a[k], job.a, i, WIDE);
    if constexpr (TWO) load(b[k], job.b, i, WIDE);
  };
  const auto write = [&](u32 k, u64 i) {
#pragma unroll
    for (u32 j = 0; j < WIDE; j++) a[k][j] = f(a[k][j], b[k][j]);
    store(job.y, i, WIDE, a[k]);
  };
  u64 i = first * WIDE;
  // Both packs are loaded before the first is stored.
  for (; i + step * WIDE < packed; i += AT_ONCE * step * WIDE) {
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) read(k, i + k * step * WIDE);
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) write(k, i + k * step * WIDE);
  }
  if (i < packed) read(0, i), write(0, i);
  for (u64 i = packed + first; i < job.count; i += step)
    store_one<T>(job.y, i, f(load_one<T>(job.a, i), TWO ? load_one<T>(job.b, i) : 0));
}

/// Keeps NaN.
DEVICE float relu_of(float x) { return x <= 0 ? 0 : x; }

extern "C" __global__ void __launch_bounds__(THREADS, 2) relu(const MapJob job) {
  map<false>(job, [](float x, float) { return relu_of(x); });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) add_relu(const MapJob job) {
  map<true>(job, [](float a, float b) { return relu_of(a + b); });
}
/// Of a result and its gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2) relu_backward(const MapJob job) {
  map<true>(job, [](float y, float dy) { return y <= 0 ? 0 : dy; });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) add(const MapJob job) {
  map<true>(job, [](float a, float b) { return a + b; });
}
/// The sum of an f32 `a` and a `b`, f32.
extern "C" __global__ void __launch_bounds__(THREADS, 2) add_to_f32(const MapJob job) {
  const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  sweep(job.a | job.b | job.y, job.count, first, step, [&](u64 i, u32 many) {
    if (many == 1) return store_one<F32>(job.y, i, load_one<F32>(job.a, i) + load_one<T>(job.b, i));
    float b[WIDE];
    load(b, job.b, i, many);
    Pack<F32, WIDE> a;
    a.load(a.at(job.a, i));
#pragma unroll
    for (int j = 0; j < WIDE; j++) a.x[j] = F32::narrow(F32::widen(a.x[j]) + b[j]);
    a.store(a.at(job.y, i));
  });
}

/// `y` is `x` of another type, 16 bytes of f32 at a time, four such loads of a thread before its
/// stores.
template <class From, class To>
DEVICE void convert(const MapJob& job) {
  constexpr int MANY = 4, AT_ONCE = 4;
  const u64 packs = (job.a | job.y) % 16 == 0 ? job.count / MANY : 0;
  const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, step = (u64)gridDim.x * THREADS;
  for (u64 i = first; i < packs; i += AT_ONCE * step) {
    Pack<From, MANY> x[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
      if (i + j * step < packs) x[j].load(x[j].at(job.a, MANY * (i + j * step)));
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      if (i + j * step >= packs) continue;
      Pack<To, MANY> y;
#pragma unroll
      for (int k = 0; k < MANY; k++) y.x[k] = To::narrow(From::widen(x[j].x[k]));
      y.store(y.at(job.y, MANY * (i + j * step)));
    }
  }
  for (u64 i = MANY * packs + first; i < job.count; i += step) store_one<To>(job.y, i, load_one<From>(job.a, i));
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) cast_from_f32(const MapJob job) { convert<F32, T>(job); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) cast_to_f32(const MapJob job) { convert<T, F32>(job); }

struct Gelu { float value, slope; };

/// The formula of the CPU (`Real::gelu`), for halves with a power and a quotient that are right but
/// for 1e-5. Clamped, since infinity times zero is NaN; the results do not change beyond.
DEVICE Gelu gelu_of(float x) {
  const float bounded = x < -13 ? -13 : x > 13 ? 13 : x; // Keeps NaN.
  const float u = fabsf(bounded) * 0.70710678f, bottom = 1 + 0.3275911f * u;
  const float gauss = IS_HALF ? exp2_of(-LOG2_E * u * u) : expf(-u * u);
  const float t = IS_HALF ? reciprocal_of(bottom) : 1 / bottom;
  float tail = 1.0614054f;
  tail = fmaf(tail, t, -1.4531521f);
  tail = fmaf(tail, t, 1.4214137f);
  tail = fmaf(tail, t, -0.28449674f);
  tail = fmaf(tail, t, 0.2548296f);
  tail = 0.5f * tail * t * gauss;
  const float probability = x < 0 ? tail : 1 - tail;
  return {(x < 0 ? bounded : x) * probability, probability + bounded * (0.3989423f * gauss)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gelu(const MapJob job) {
  map<false>(job, [](float x, float) { return gelu_of(x).value; });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) gelu_backward(const MapJob job) {
  map<true>(job, [](float x, float dy) { return dy * gelu_of(x).slope; });
}

/// Adds a bias in place: row `i` gets bias `i % channels`; if `channels` is 0, each row gets a row
/// of biases.
struct BiasJob { u64 y, bias; u32 rows, count, channels, unused; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) add_bias(const BiasJob job) {
  const u32 all = job.rows * chunks(job.count);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, job.count);
    const u64 y = at(job.y, (u64)s.row * job.count + s.from), row = at(job.bias, s.from);
    const float own = job.channels ? load_one<T>(job.bias, s.row % job.channels) : 0;
    sweep(job.channels ? y : y | row, s.count, lane(), WARP, [&](u64 i, u32 many) {
      float x[WIDE], b[WIDE] = {};
      load(x, y, i, many);
      if (!job.channels) load(b, row, i, many);
#pragma unroll
      for (u32 j = 0; j < many; j++) x[j] += job.channels ? own : b[j];
      store(y, i, many, x);
    });
  }
}

/// `y = a + b`, where `b` is for each row of `a`.
struct AddRowsJob { u64 a, b, y; u32 rows, count; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) add_rows(const AddRowsJob job) {
  const u32 all = job.rows * chunks(job.count);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, job.count);
    const u64 first = (u64)s.row * job.count + s.from;
    const u64 a = at(job.a, first), b = at(job.b, s.from), y = at(job.y, first);
    sweep(a | b | y, s.count, lane(), WARP, [&](u64 i, u32 many) {
      float x[WIDE], added[WIDE];
      load(x, a, i, many);
      load(added, b, i, many);
#pragma unroll
      for (u32 j = 0; j < many; j++) x[j] += added[j];
      store(y, i, many, x);
    });
  }
}
