// Kernels: `cast`; `unscale`, which checks and unscales gradients; `update`, which updates the loss
// scale.
//
// Compiled after `ptx.h` and `device.h`: `cast` for each pair of types, set by the macros `FROM`
// and `TO` (`F32`, `F16`, `Bf16`), the others once, without these macros.
//
// `scaler.rs` and `mod.rs` fill the structs, field by field.

struct CastJob { u64 from, to, count; };

struct Tensor { u64 grad, count; u32 type, unused; };
/// Span `index` of a tensor.
struct Chunk { u32 tensor, index; };

struct Scaler {
  // Set by the host.
  double growth, backoff, interval;
  float min_scale; // below 0: PyTorch's policy
  u32 dynamic;
  // Updated by the device.
  u64 tracker;
  double norm;
  /// The square of the norm so far.
  double squares;
  float scale;
  u32 found_inf, at_floor, bad, arrived, unused;
};

struct UnscaleJob {
  const Tensor* tensor;
  const Chunk* chunk;
  /// Sums of the chunks; then a `u32` for each, which `add_to_tree` counts.
  double* sum;
  Scaler* scaler;
  /// `how` has flags: `WRITES` stores the unscaled gradients, `ADDS` adds to the norm of earlier
  /// launches.
  u32 chunks, how;
};
enum { WRITES = 1, ADDS = 2 };

#ifdef FROM

template <class S, class D>
DEVICE void cast_of(const CastJob& job) {
  // The wider type is accessed by 16 bytes, so that neighbouring threads access neighbouring bytes
  // of both.
  constexpr int WIDEST = sizeof(typename S::Bits) > sizeof(typename D::Bits) ? sizeof(typename S::Bits)
                                                                             : sizeof(typename D::Bits);
  constexpr int V = 16 / WIDEST, AT_ONCE = 4;
  constexpr u64 TILE = (u64)THREADS * AT_ONCE * V;
  const bool aligned = job.from % Pack<S, V>::ALIGN == 0 && job.to % Pack<D, V>::ALIGN == 0;
  const u64 packed = aligned ? job.count / V * V : 0;
  const u64 first = (u64)blockIdx.x * THREADS + threadIdx.x, threads = (u64)gridDim.x * THREADS;
  const u64 tiled = packed / TILE * TILE;
  for (u64 tile = blockIdx.x * TILE; tile < tiled; tile += gridDim.x * TILE) {
    const u64 own = tile + (u64)threadIdx.x * V;
    // All loads come first: none may pass a store.
    Pack<S, V> from[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) from[k].load(from[k].at(job.from, own + k * THREADS * V));
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      Pack<D, V> to;
#pragma unroll
      for (int j = 0; j < V; j++) to.x[j] = D::narrow(S::widen(from[k].x[j]));
      to.store(to.at(job.to, own + k * THREADS * V));
    }
  }
  for (u64 i = tiled + first * V; i < packed; i += threads * V) {
    Pack<S, V> from;
    Pack<D, V> to;
    from.load(from.at(job.from, i));
#pragma unroll
    for (int j = 0; j < V; j++) to.x[j] = D::narrow(S::widen(from.x[j]));
    to.store(to.at(job.to, i));
  }
  for (u64 i = packed + first; i < job.count; i += threads)
    store_one<D>(job.to, i, load_one<S>(job.from, i));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) cast(const CastJob job) {
  cast_of<FROM, TO>(job);
}

#else

DEVICE float inverse(float scale) { return (float)(1 / (double)scale); }

/// Returns the sum of squares of a span multiplied by `factor`; sets `bad` on overflow. Stores the
/// products if `write`.
template <class G>
DEVICE double unscale_span(u64 grad, u32 count, float factor, bool guarded, bool write, bool& bad) {
  constexpr int W = 16 / sizeof(typename G::Bits);
  const bool aligned = grad % 16 == 0;
  double sums[1];
  sum_span<1, W>(count, sums, [&](u32 i, u32 many, double (&lanes)[1][W]) {
    Pack<G, W> g;
    const bool pack = many == W && aligned;
    // The optimizer reads it again.
    if (pack) g.template load<true>(g.at(grad, i));
    else {
#pragma unroll
      for (u32 j = 0; j < W; j++)
        g.x[j] = j < many ? G::template load<true>(grad + (i + j) * sizeof(typename G::Bits)) : 0;
    }
#pragma unroll
    for (u32 j = 0; j < W; j++) {
      const float x = G::widen(g.x[j]), y = x * factor;
      bad |= !is_finite(x) || (guarded && !is_finite(y));
      lanes[0][j] = fma((double)y, (double)y, lanes[0][j]);
      g.x[j] = G::narrow(y);
    }
    if (!write) return;
    if (pack) return g.template store<true>(g.at(grad, i));
#pragma unroll
    for (u32 j = 0; j < W; j++)
      if (j < many) G::template store<true>(grad + (i + j) * sizeof(typename G::Bits), g.x[j]);
  });
  return sums[0];
}

/// Checks gradients and, with `WRITES`, unscales those of f32. Halves would underflow.
extern "C" __global__ void __launch_bounds__(THREADS, 2) unscale(const UnscaleJob job) {
  Scaler& scaler = *job.scaler;
  const float inv = inverse(scaler.scale);
  const bool guarded = scaler.min_scale >= 0 && inv > 1;
  const float factor = is_finite(inv) ? inv : 1;
  const bool write = job.how & WRITES && factor != 1;
  bool bad = false;
  for (u32 c = warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk chunk = job.chunk[c];
    const Tensor t = job.tensor[chunk.tensor];
    const u64 start = (u64)chunk.index * SPAN, left = t.count - start;
    const u32 count = left < SPAN ? (u32)left : SPAN;
    double sum;
    if (t.type == 0) sum = unscale_span<F32>(t.grad + start * 4, count, factor, guarded, write, bad);
    else if (t.type == 1)
      sum = unscale_span<F16>(t.grad + start * 2, count, factor, guarded, false, bad);
    else sum = unscale_span<Bf16>(t.grad + start * 2, count, factor, guarded, false, bad);
    u32* arrived = (u32*)(job.sum + job.chunks);
    if (add_to_tree(job.sum, arrived, c, job.chunks, sum) && lane() == 0) job.sum[0] = sum;
  }
  if (bad) atomicOr(&scaler.bad, 1u);
  if (!is_last_block(&scaler.arrived)) return;
  if (threadIdx.x == 0) {
    const double total = job.chunks ? job.sum[0] : 0;
    scaler.squares = (job.how & ADDS ? scaler.squares : 0) + total;
    scaler.norm = sqrt(scaler.squares);
    scaler.found_inf |= scaler.bad;
    scaler.bad = 0;
  }
}

/// Applies the rule of `LossScaler::update` and clears `found_inf`.
extern "C" __global__ void __launch_bounds__(THREADS, 2) update(const UnscaleJob job) {
  if (blockIdx.x || threadIdx.x) return;
  Scaler& scaler = *job.scaler;
  const bool torch = scaler.min_scale < 0, overflow = scaler.found_inf;
  scaler.found_inf = 0;
  if (!scaler.dynamic) return;
  if (overflow) {
    const float reduced = (float)(scaler.scale * scaler.backoff);
    scaler.tracker = 0;
    if (torch) scaler.scale = reduced;
    else if (scaler.scale > scaler.min_scale)
      scaler.scale = reduced > scaler.min_scale ? reduced : scaler.min_scale;
    else scaler.at_floor = 1;
    return;
  }
  scaler.tracker++;
  const double count = (double)scaler.tracker;
  if (torch ? count != scaler.interval : count < scaler.interval) return;
  scaler.tracker = 0;
  const float grown = (float)(scaler.scale * scaler.growth);
  if (is_finite(grown)) scaler.scale = grown;
}

#endif
