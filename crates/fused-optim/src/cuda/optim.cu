// Multi-tensor optimizer kernels. A step launches `finish_grad_stats`, then for each class of
// tensors `step`, for rules of two sweeps `first_sweep`, `row_factors` and `step`. `grad_stats`
// reads gradients before the step; `average` updates moving averages of weights and is no part of a
// step.
//
// Compiled after `ptx.h`, `device.h` and `rules.h`: once without `RULE` for the kernels that all
// rules share, and once for each rule and types, given by macros: `RULE` (a type of `rules.h`),
// `SWEEPS` (1 or 2), `GRAD` and `WEIGHT` (`F32`, `F16`, `Bf16`), `MASTER` (whether a half weight
// has one), `SWEEP` (elements that a warp updates at a time) and `PACK` (elements of each stream
// that a thread loads at a time: 4 or 8; 0 chooses by the types).
//
// All inputs of a step are in device memory; `Ctl`, `Group` and `Progress` change from step to
// step. No launch depends on a value that the host has to wait for, so a step can be captured in a
// CUDA graph.
//
// Invariant: an element's result depends on that element and on sums in the order of `cpu/sum.rs`.
// So grid, order of threads and alignment change no bit.
//
// The structs are those of `table.rs`, field by field.

/// A tensor of the step. An address is 0 if there is no such vector.
struct Tensor {
  u64 grad, weight, master, slot[3], ema;
  /// Number of elements, and of elements per row: all, unless the rule has sums per row.
  u64 count, cols;
  /// Index of its first chunk of `first_sweep` and of its first row's factor, in its class.
  u64 first, row;
  u32 group, grad_type;
  /// Whether to zero the gradient after the update; whether the tensor has two or more dimensions.
  u32 clear, project;
  float ema_decay;
  u32 unused;
};

/// The `index`-th chunk of a tensor, at most `SWEEP` or `SPAN` elements of one row.
struct Chunk { u32 tensor, index; };

struct Group {
  double h[12];
  /// Clipping by the rule itself, to the norm `max` of the group, the tensor, or all gradients.
  double max;
  u32 own_clip, maximize;
};
enum { OWN_NONE, OWN_GROUP, OWN_TENSOR, OWN_UNIT };

struct Progress {
  u64 step;
  /// Factor of the gradient, and largest magnitude after it.
  float scale, limit;
  /// AdamP: whether the update is projected.
  u32 projected, unused;
};

/// Adds up to 32 neighbours of `order[from..]` into value `to`.
struct Fold { u32 from, count, to; };

struct Ctl {
  // Written by the host.
  double max_norm;                  // below 0: no clipping by norm
  double total_norm;                // below 0: computed from the gradients
  u64 total_norm_at;                // address of an f32 to use as the total norm, or 0
  double growth, backoff, interval; // of the loss scale
  float min_scale;                  // of the loss scale; below 0: PyTorch's policy
  float limit, grad_scale;
  u32 scaled;                       // whether there is a loss scale
  u32 known, check, unit, unused;
  // Written by the device.
  double norm;
  u64 tracker, skipped;
  float loss_scale;
  u32 at_floor, skip, nonfinite, arrived, padding;
};

struct Job {
  const Tensor* tensor;
  const Chunk* chunk;
  const Group* group;
  Progress* progress;
  Ctl* ctl;
  /// The step is skipped if this is not 0; may be null.
  const u32* found_inf;
  /// Gradient statistics: sums of tensors, of all, of groups, of chunks, then intermediate sums.
  /// `first_sweep`: sums of chunks.
  double* sum;
  /// Gradient statistics: counters of `add_to_tree` for each chunk.
  u32* arrived;
  float* factor;
  const u32* order;
  const Fold* fold;
  const u32* level;
  u32 chunks, tensors, groups, levels;
  /// The kernel processes chunks `first..chunks`.
  u32 first;
  /// `average`: the weight's share of its new average; below 0: the average becomes the weight.
  float share;
};

struct Span {
  u64 start, row;
  u32 count;
};
DEVICE Span span_of(u64 cols, u32 index, u32 size) {
  const u32 per_row = (u32)((cols + size - 1) / size);
  const u64 row = index / per_row, from = (u64)(index % per_row) * size, left = cols - from;
  return {row * cols + from, row, left < size ? (u32)left : size};
}

/// Scales and clamps a gradient. A NaN stays NaN.
struct GradMap {
  float scale, limit;
  DEVICE float operator()(float grad) const {
    const float g = grad * scale;
    return limited(g);
  }
  DEVICE float limited(float g) const {
    g = g > limit ? limit : g;
    return g < -limit ? -limit : g;
  }
};

#ifdef RULE

template <bool CHOICE, class A, class B> struct Either { typedef A type; };
template <class A, class B> struct Either<false, A, B> { typedef B type; };

/// A tensor's memory from one element on. `P` is the type that the rule reads and writes: the
/// weight's, or the master's if the weight is its rounded copy (`COPY`).
template <class G, class W, bool COPY, int SLOTS>
struct Streams {
  typedef typename Either<COPY, F32, W>::type P;
  enum { N = SLOTS ? SLOTS : 1, OWN = sizeof(typename G::Bits) + sizeof(typename W::Bits) < 8 ? 8 : 4 };
  enum { V = PACK ? PACK : OWN };

  u64 grad, param, half, slot[N], ema;
  bool clear;
  float ema_decay;
  GradMap map;

  DEVICE Streams(const Tensor& t, u64 start, GradMap map) : map(map) {
    grad = t.grad + start * sizeof(typename G::Bits);
    half = COPY ? t.weight + start * sizeof(typename W::Bits) : 0;
    param = (COPY ? t.master : t.weight) + start * sizeof(typename P::Bits);
    for (int k = 0; k < SLOTS; k++) slot[k] = t.slot[k] + start * 4;
    ema = t.ema ? t.ema + start * 4 : 0;
    clear = t.clear, ema_decay = t.ema_decay;
  }

  template <int V>
  DEVICE bool is_aligned() const {
    u64 off = grad % Pack<G, V>::ALIGN | param % Pack<P, V>::ALIGN | ema % 16;
    if (COPY) off |= half % Pack<W, V>::ALIGN;
    for (int k = 0; k < SLOTS; k++) off |= slot[k] % 16;
    return off == 0;
  }

  DEVICE float average(float old, float x) const { return old * ema_decay + x * (1 - ema_decay); }

  /// Updates `V` elements. `update(p, g, state)` returns the new parameter. Stores the state if
  /// `STATE`.
  template <bool STATE, class Update>
  DEVICE void pack(u64 i, Update update) const {
    Pack<G, V> g;
    Pack<P, V> p;
    Pack<F32, V> s[N];
    g.load(g.at(grad, i));
    p.load(p.at(param, i));
#pragma unroll
    for (int k = 0; k < SLOTS; k++) s[k].load(s[k].at(slot[k], i));
    float updated[V];
#pragma unroll
    for (int j = 0; j < V; j++) {
      float state[N];
      for (int k = 0; k < SLOTS; k++) state[k] = F32::widen(s[k].x[j]);
      updated[j] = update(P::widen(p.x[j]), map(G::widen(g.x[j])), state);
      p.x[j] = P::narrow(updated[j]);
      for (int k = 0; k < SLOTS; k++) s[k].x[j] = F32::narrow(state[k]);
    }
    p.store(p.at(param, i));
    if constexpr (STATE) {
#pragma unroll
      for (int k = 0; k < SLOTS; k++) s[k].store(s[k].at(slot[k], i));
    }
    if constexpr (COPY) {
      Pack<W, V> h;
#pragma unroll
      for (int j = 0; j < V; j++) h.x[j] = W::narrow(updated[j]);
      h.store(h.at(half, i));
    }
    if (ema) {
      Pack<F32, V> e;
      e.load(e.at(ema, i));
#pragma unroll
      for (int j = 0; j < V; j++) e.x[j] = F32::narrow(average(F32::widen(e.x[j]), updated[j]));
      e.store(e.at(ema, i));
    }
    if (clear) {
      Pack<G, V> zero = {};
      zero.store(zero.at(grad, i));
    }
  }

  /// Updates one element.
  template <bool STATE, class Update>
  DEVICE void one(u64 i, Update update) const {
    float state[N];
    for (int k = 0; k < SLOTS; k++) state[k] = load_one<F32>(slot[k], i);
    const float updated = update(load_one<P>(param, i), map(load_one<G>(grad, i)), state);
    store_one<P>(param, i, updated);
    if constexpr (STATE)
      for (int k = 0; k < SLOTS; k++) store_one<F32>(slot[k], i, state[k]);
    if constexpr (COPY) store_one<W>(half, i, updated);
    if (ema) store_one<F32>(ema, i, average(load_one<F32>(ema, i), updated));
    if (clear) store_one<G>(grad, i, 0);
  }

  /// Updates `count` elements by one warp.
  template <bool STATE, class Update>
  DEVICE void sweep(u32 count, Update update) const {
    const u32 packed = is_aligned<V>() ? count / V * V : 0;
#pragma unroll 1
    for (u32 i = lane() * V; i < packed; i += WARP * V) pack<STATE>(i, update);
#pragma unroll 1
    for (u32 i = packed + lane(); i < count; i += WARP) one<STATE>(i, update);
  }
};

/// The sweep that updates the parameters: the only one, or the second of two.
template <class R, class G, class W, bool COPY>
DEVICE void step_of(const Job& job) {
  if (job.ctl->skip) return;
  for (u32 c = warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk chunk = job.chunk[c];
    const Tensor& t = job.tensor[chunk.tensor];
    const Progress progress = job.progress[chunk.tensor];
    const Span span = span_of(t.cols, chunk.index, SWEEP);
    const Streams<G, W, COPY, R::SLOTS> at(t, span.start, {progress.scale, progress.limit});
#if SWEEPS == 1
    const R rule(job.group[t.group].h, progress.step);
    at.template sweep<true>(span.count, [&](float p, float g, float* state) {
      return rule.update(p, g, state);
    });
#else
    const R rule(job.group[t.group].h, progress.step, progress.projected);
    const float factor = job.factor[t.row + span.row];
    at.template sweep<false>(span.count, [&](float p, float g, float* state) {
      return rule.apply(factor, p, rule.direction(p, g, state));
    });
#endif
  }
}

#if SWEEPS == 2

/// The first of two sweeps: updates the state and sums each chunk.
template <class R, class G, class W, bool COPY>
DEVICE void first_sweep_of(const Job& job) {
  if (job.ctl->skip) return;
  typedef Streams<G, W, COPY, R::SLOTS> At;
  typedef typename At::P P;
  for (u32 c = warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk chunk = job.chunk[c];
    const Tensor& t = job.tensor[chunk.tensor];
    const Progress progress = job.progress[chunk.tensor];
    const R rule(job.group[t.group].h, progress.step, false);
    const Span span = span_of(t.cols, chunk.index, SPAN);
    const At at(t, span.start, {progress.scale, progress.limit});
    const bool aligned = at.template is_aligned<4>();
    double sums[R::SUMS];
    sum_span<R::SUMS, 4>(span.count, sums, [&](u32 i, u32 many, double (&lanes)[R::SUMS][4]) {
      if (many == 4 && aligned) {
        Pack<G, 4> g;
        Pack<P, 4> p;
        Pack<F32, 4> s[2];
        // `step` reads both again, so keep them in the cache.
        g.template load<true>(g.at(at.grad, i));
        p.template load<true>(p.at(at.param, i));
        s[0].load(s[0].at(at.slot[0], i));
        s[1].load(s[1].at(at.slot[1], i));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float grad = at.map(G::widen(g.x[j])), param = P::widen(p.x[j]);
          float state[2] = {F32::widen(s[0].x[j]), F32::widen(s[1].x[j])};
          rule.state(grad, state);
          s[0].x[j] = F32::narrow(state[0]), s[1].x[j] = F32::narrow(state[1]);
          R::add(lanes, j, param, rule.direction(param, grad, state), grad);
        }
        s[0].store(s[0].at(at.slot[0], i));
        s[1].store(s[1].at(at.slot[1], i));
        return;
      }
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        if (j >= many) break;
        const float grad = at.map(load_one<G>(at.grad, i + j)), param = load_one<P>(at.param, i + j);
        float state[2] = {load_one<F32>(at.slot[0], i + j), load_one<F32>(at.slot[1], i + j)};
        rule.state(grad, state);
        store_one<F32>(at.slot[0], i + j, state[0]);
        store_one<F32>(at.slot[1], i + j, state[1]);
        R::add(lanes, j, param, rule.direction(param, grad, state), grad);
      }
    });
    if (lane() == 0)
      for (int k = 0; k < R::SUMS; k++) job.sum[(u64)c * R::SUMS + k] = sums[k];
  }
}

/// Folds `count` sums, at a stride of `apart`, of each of `rows` rows into the row's first.
template <int K>
DEVICE void fold_rows(double* sums, u64 rows, u64 count, u64 apart) {
  for (u64 step = 1; step < count; step *= 2) {
    const u64 pairs = (count + 2 * step - 1) / (2 * step);
    for (u64 at = threadIdx.x; at < rows * pairs; at += THREADS) {
      const u64 row = at / pairs, i = at % pairs * 2 * step;
      double* left = sums + (row * count + i) * apart * K;
      if (i + step < count)
        for (int k = 0; k < K; k++) left[k] += left[step * apart * K + k];
    }
    __syncthreads();
  }
}

/// Between the sweeps: computes the factors of a tensor's rows from its sums, one block per tensor.
template <class R>
DEVICE void row_factors_of(const Job& job) {
  if (job.ctl->skip) return;
  for (u32 at = blockIdx.x; at < job.tensors; at += gridDim.x) {
    const Tensor& t = job.tensor[job.order[at]];
    const double* h = job.group[t.group].h;
    const u64 rows = t.count / t.cols, per_row = (t.cols + SPAN - 1) / SPAN;
    double* sums = job.sum + t.first * R::SUMS;
    float* factor = job.factor + t.row;
    fold_rows<R::SUMS>(sums, rows, per_row, 1);
    if constexpr (!R::BY_ROWS) {
      if (threadIdx.x == 0) factor[0] = R::factor(h, sums);
    } else {
      bool all = t.project;
      for (u64 row = threadIdx.x; row < rows; row += THREADS)
        all = all && R::scale_invariant(h, sums + row * per_row * R::SUMS, t.cols);
      const bool by_rows = __syncthreads_and(all);
      if (!by_rows) fold_rows<R::SUMS>(sums, 1, rows, per_row);
      const bool whole = !by_rows && t.project && R::scale_invariant(h, sums, t.count);
      for (u64 row = threadIdx.x; row < rows; row += THREADS) {
        const double* of = sums + (by_rows ? row * per_row * R::SUMS : 0);
        factor[row] = by_rows || whole ? R::factor(h, of) : 0;
      }
      if (threadIdx.x == 0) job.progress[job.order[at]].projected = by_rows || whole;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) first_sweep(const Job job) {
  first_sweep_of<RULE, GRAD, WEIGHT, MASTER>(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) row_factors(const Job job) {
  row_factors_of<RULE>(job);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) step(const Job job) {
  step_of<RULE, GRAD, WEIGHT, MASTER>(job);
}

#else

/// Sum of squares of a span of gradients; sets `nonfinite` if a gradient is infinite or NaN.
template <class G>
DEVICE double squares(u64 grad, u32 count, GradMap map, bool& nonfinite) {
  constexpr int W = 16 / sizeof(typename G::Bits);
  const bool aligned = grad % 16 == 0;
  double sums[1];
  sum_span<1, W>(count, sums, [&](u32 i, u32 many, double (&lanes)[1][W]) {
    Pack<G, W> g;
    // `step` reads it again, so keep it in the cache.
    if (many == W && aligned) g.template load<true>(g.at(grad, i));
    else {
#pragma unroll
      for (u32 j = 0; j < W; j++)
        g.x[j] = j < many ? G::template load<true>(grad + (i + j) * sizeof(typename G::Bits)) : 0;
    }
#pragma unroll
    for (int j = 0; j < W; j++) {
      const float x = G::widen(g.x[j]) * map.scale;
      nonfinite |= !is_finite(x);
      const double y = map.limited(x);
      lanes[0][j] = fma(y, y, lanes[0][j]);
    }
  });
  return sums[0];
}

/// Evaluates the host's tree of sums level by level. One thread adds up to 32 neighbours: it waits
/// for memory no longer than a warp would.
DEVICE void fold_levels(const Job& job) {
  for (u32 l = 0; l < job.levels; l++) {
    for (u32 f = job.level[l] + threadIdx.x; f < job.level[l + 1]; f += THREADS) {
      const Fold fold = job.fold[f];
      double pair = 0, sum = 0;
#pragma unroll 1
      for (u32 k = 0; k < WARP; k += 8) {
        double x[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++)
          x[i] = k + i < fold.count ? job.sum[job.order[fold.from + k + i]] : 0;
        pair += fold_array<8>(x);
        // Two groups of eight are a pair of the tree.
        if (k % 16) sum += pair, pair = 0;
      }
      job.sum[fold.to] = sum;
    }
    __syncthreads();
  }
}

/// As `amp::LossScaler::update`.
DEVICE void update_scale(Ctl& ctl, bool overflow) {
  const bool torch = ctl.min_scale < 0;
  if (overflow) {
    const float reduced = (float)(ctl.loss_scale * ctl.backoff);
    ctl.tracker = 0;
    if (torch) ctl.loss_scale = reduced;
    else if (ctl.loss_scale > ctl.min_scale)
      ctl.loss_scale = reduced > ctl.min_scale ? reduced : ctl.min_scale;
    else ctl.at_floor = 1;
    return;
  }
  ctl.tracker++;
  const double count = (double)ctl.tracker;
  if (torch ? count != ctl.interval : count < ctl.interval) return;
  const float grown = (float)(ctl.loss_scale * ctl.growth);
  ctl.tracker = 0;
  if (is_finite(grown)) ctl.loss_scale = grown;
}

/// `min(1, max / (norm + 1e-6))`; a NaN stays NaN.
DEVICE double coefficient(double max, double norm) {
  const double c = max / (norm + 1e-6);
  return c > 1 ? 1 : c;
}

DEVICE float grad_scale(const Ctl& ctl) {
  return ctl.scaled ? (float)(1 / (double)ctl.loss_scale) : ctl.grad_scale;
}

/// Computes each gradient's factor and limit, and increments the step counts.
DEVICE void begin_step(const Job& job, float scale, double clipped) {
  const Ctl& ctl = *job.ctl;
  const double* of_group = job.sum + job.tensors + 1;
  const double all = clipped * sqrt(job.sum[job.tensors]);
  // Written so that a NaN norm gives a NaN factor.
  const double unit = !ctl.unit || all <= 1 ? 1 : 1 / all;
  for (u32 at = threadIdx.x; at < job.tensors; at += THREADS) {
    const Tensor& t = job.tensor[at];
    const Group& group = job.group[t.group];
    double own = unit;
    if (group.own_clip == OWN_GROUP)
      own = unit * coefficient(group.max, clipped * sqrt(of_group[t.group]));
    if (group.own_clip == OWN_TENSOR)
      own = unit * coefficient(group.max, clipped * sqrt(job.sum[at]));
    const float total = (float)((double)scale * clipped * own);
    job.progress[at].scale = group.maximize ? -total : total;
    // The limit applies before the rule's own factor.
    job.progress[at].limit = (float)((double)ctl.limit * own);
    job.progress[at].step++;
  }
}

/// Sums the squares of chunks `first..chunks`, and of each tensor whose chunks are then all summed.
DEVICE void chunk_stats(const Job& job, float scale) {
  Ctl& ctl = *job.ctl;
  const GradMap map = {scale, ctl.limit};
  bool nonfinite = false;
  for (u32 c = job.first + warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk& chunk = job.chunk[c];
    const Tensor& t = job.tensor[chunk.tensor];
    const Span span = span_of(t.count, chunk.index, SPAN);
    double sum;
    if (t.grad_type == 0) sum = squares<F32>(t.grad + span.start * 4, span.count, map, nonfinite);
    else if (t.grad_type == 1) sum = squares<F16>(t.grad + span.start * 2, span.count, map, nonfinite);
    else sum = squares<Bf16>(t.grad + span.start * 2, span.count, map, nonfinite);
    const u32 own = c - chunk.index, count = (u32)((t.count + SPAN - 1) / SPAN);
    double* sums = job.sum + job.tensors + 1 + job.groups + own;
    const bool whole = add_to_tree(sums, job.arrived + own, chunk.index, count, sum);
    if (whole && lane() == 0) job.sum[chunk.tensor] = sum;
  }
  if (nonfinite) atomicOr(&ctl.nonfinite, 1u);
}

/// Takes statistics of some gradients before the step.
extern "C" __global__ void __launch_bounds__(THREADS, 3) grad_stats(const Job job) {
  chunk_stats(job, grad_scale(*job.ctl));
}

/// Takes statistics of the remaining gradients. The last block computes the total norm and the
/// clipping factors, decides whether the step is skipped, and updates the loss scale.
extern "C" __global__ void __launch_bounds__(THREADS, 3) finish_grad_stats(const Job job) {
  Ctl& ctl = *job.ctl;
  const float scale = grad_scale(ctl);
  chunk_stats(job, scale);
  if (!is_last_block(&ctl.arrived)) return;
  fold_levels(job);

  __shared__ bool skip;
  __shared__ double clipped;
  if (threadIdx.x == 0) {
    double norm = ctl.total_norm < 0 ? sqrt(job.sum[job.tensors]) : ctl.total_norm;
    bool nonfinite = ctl.nonfinite;
    if (ctl.total_norm_at) {
      const float total = load_one<F32>(ctl.total_norm_at, 0);
      norm = total, nonfinite = !is_finite(total);
    }
    skip = ctl.known || (job.found_inf && *job.found_inf) || (ctl.check && nonfinite);
    clipped = ctl.max_norm < 0 ? 1 : coefficient(ctl.max_norm, norm);
    if (!skip && ctl.max_norm >= 0) ctl.norm = norm;
    ctl.skip = skip;
    ctl.skipped += skip;
    ctl.nonfinite = 0;
    if (ctl.scaled) update_scale(ctl, skip);
  }
  __syncthreads();
  if (!skip) begin_step(job, scale, clipped);
}

/// The new average of a weight `x`, each operation rounded.
DEVICE float averaged(float old, float x, float share) { return share < 0 ? x : old + share * (x - old); }

template <class W>
DEVICE void average_of(u64 weight, u64 ema, u32 count, float share) {
  constexpr int V = 16 / sizeof(typename W::Bits);
  const u32 packed = (weight | ema) % 16 == 0 ? count / V * V : 0;
#pragma unroll 1
  for (u32 i = lane() * V; i < packed; i += WARP * V) {
    Pack<W, V> w;
    Pack<F32, V> e;
    w.load(w.at(weight, i));
    e.load(e.at(ema, i));
#pragma unroll
    for (int j = 0; j < V; j++) e.x[j] = F32::narrow(averaged(F32::widen(e.x[j]), W::widen(w.x[j]), share));
    e.store(e.at(ema, i));
  }
#pragma unroll 1
  for (u32 i = packed + lane(); i < count; i += WARP)
    store_one<F32>(ema, i, averaged(load_one<F32>(ema, i), load_one<W>(weight, i), share));
}

/// Updates moving averages of weights, which are of the type `grad_type`.
extern "C" __global__ void __launch_bounds__(THREADS, 2) average(const Job job) {
  for (u32 c = warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk chunk = job.chunk[c];
    const Tensor& t = job.tensor[chunk.tensor];
    const Span span = span_of(t.count, chunk.index, SPAN);
    const u64 ema = t.ema + span.start * 4;
    if (t.grad_type == 0) average_of<F32>(t.weight + span.start * 4, ema, span.count, job.share);
    else if (t.grad_type == 1) average_of<F16>(t.weight + span.start * 2, ema, span.count, job.share);
    else average_of<Bf16>(t.weight + span.start * 2, ema, span.count, job.share);
  }
}

#endif
