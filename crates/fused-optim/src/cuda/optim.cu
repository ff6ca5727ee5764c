// Multi-tensor optimizer kernels: `look` (gradients, before anything is changed), then `step`; for
// rules of two sweeps `observe`, `conclude`, `step`. Apart from steps `average` (of weights, over time).
//
// Compiled after `ptx.h`, `device.h` and `rules.h`, once without `RULE` for `look` and `average`, and once for each
// rule and types that are used, given by macros: `RULE` (a type of `rules.h`), `SWEEPS`, `GRAD` and
// `WEIGHT` (`F32`, `F16`, `Bf16`), `MASTER` (whether a half weight has one); and by how `step` goes through
// memory: `SWEEP`, the elements a warp takes at a time, and `PACK`, those of each stream that a thread moves at
// a time (4 or 8; 0: as the types ask).
//
// Everything a step needs lies on the device: what changes from step to step is `Ctl`, `Group` and
// `Progress`. No launch depends on a value the host would have to wait for, so a step can be captured.
//
// Invariant: an element's result depends on that element, and on sums whose order is that of
// `cpu/sum.rs`; hence grid, order of threads and alignment never change a bit.
//
// The structs are those of `table.rs`, field by field.

/// A tensor of the step. Addresses are 0 where there is nothing.
struct Tensor {
  u64 grad, weight, master, slot[3], ema;
  /// Elements, and elements of a row: all, unless the rule goes by rows.
  u64 count, cols;
  /// Among the class's: its first chunk of `observe`, and its first row's factor.
  u64 first, row;
  u32 group, grad_type;
  /// Whether the gradient is to be zero afterwards; whether there are two dimensions or more.
  u32 clear, project;
  float ema_decay;
  u32 unused;
};

/// Elements of one row of a tensor: the `index`-th stretch, of `SWEEP` or `SPAN`.
struct Chunk { u32 tensor, index; };

struct Group {
  double h[12];
  /// What the rule itself does to gradients of large norm: nothing, or by the norm of the group, the
  /// tensor, all. `max` is its bound.
  double max;
  u32 own_clip, maximize;
};
enum { OWN_NONE, OWN_GROUP, OWN_TENSOR, OWN_UNIT };

struct Progress {
  u64 step;
  /// What the gradient is multiplied by, and then brought between this and its negative.
  float scale, limit;
  /// AdamP: whether the update is projected.
  u32 projected, unused;
};

/// Adds up to 32 neighbours of `order[from..]` into value `to`.
struct Fold { u32 from, count, to; };

struct Ctl {
  // What the host asks for.
  double max_norm;                  // below 0: no clip by norm
  double total_norm;                // below 0: that of the gradients here
  u64 total_norm_at;                // address of an f32 to use as the total norm, or 0
  double growth, backoff, interval; // of the loss scale
  float min_scale;                  // below 0: PyTorch's policy
  float limit, grad_scale;
  u32 scaled;                       // whether there is a loss scale
  u32 known, check, unit, unused;
  // What the device answers.
  double norm;
  u64 tracker, skipped;
  float loss_scale;
  u32 at_floor, skip, bad, arrived, more;
};

struct Job {
  const Tensor* tensor;
  const Chunk* chunk;
  const Group* group;
  Progress* progress;
  Ctl* ctl;
  /// Another's verdict on the gradients, or null.
  const u32* found_inf;
  /// `look`: sums of tensors, of all, of groups, of chunks, then between. Else sums of chunks.
  double* sum;
  /// `look`: of each chunk, what `add_to_tree` counts.
  u32* arrived;
  float* factor;
  const u32* order;
  const Fold* fold;
  const u32* level;
  u32 chunks, tensors, groups, levels;
  /// Of `chunks`, which ends them.
  u32 first;
  /// `average`: how much of the weight goes into its average; below 0: all that it is, unrounded.
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

/// What becomes of a gradient before a rule sees it. A NaN stays one.
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

/// A tensor's memory from some element on. `P` is what the rule reads and writes: the weight, or, if the
/// weight is a `COPY`, rounded, its master.
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

  /// `move(p, g, state)` gives the new parameter. If `STATE`, the state goes back, too.
  template <bool STATE, class Move>
  DEVICE void pack(u64 i, Move move) const {
    Pack<G, V> g;
    Pack<P, V> p;
    Pack<F32, V> s[N];
    g.load(g.at(grad, i));
    p.load(p.at(param, i));
#pragma unroll
    for (int k = 0; k < SLOTS; k++) s[k].load(s[k].at(slot[k], i));
    float moved[V];
#pragma unroll
    for (int j = 0; j < V; j++) {
      float state[N];
      for (int k = 0; k < SLOTS; k++) state[k] = F32::widen(s[k].x[j]);
      moved[j] = move(P::widen(p.x[j]), map(G::widen(g.x[j])), state);
      p.x[j] = P::narrow(moved[j]);
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
      for (int j = 0; j < V; j++) h.x[j] = W::narrow(moved[j]);
      h.store(h.at(half, i));
    }
    if (ema) {
      Pack<F32, V> e;
      e.load(e.at(ema, i));
#pragma unroll
      for (int j = 0; j < V; j++) e.x[j] = F32::narrow(average(F32::widen(e.x[j]), moved[j]));
      e.store(e.at(ema, i));
    }
    if (clear) {
      Pack<G, V> zero = {};
      zero.store(zero.at(grad, i));
    }
  }

  /// The same for one element.
  template <bool STATE, class Move>
  DEVICE void one(u64 i, Move move) const {
    float state[N];
    for (int k = 0; k < SLOTS; k++) state[k] = load_one<F32>(slot[k], i);
    const float moved = move(load_one<P>(param, i), map(load_one<G>(grad, i)), state);
    store_one<P>(param, i, moved);
    if constexpr (STATE)
      for (int k = 0; k < SLOTS; k++) store_one<F32>(slot[k], i, state[k]);
    if constexpr (COPY) store_one<W>(half, i, moved);
    if (ema) store_one<F32>(ema, i, average(load_one<F32>(ema, i), moved));
    if (clear) store_one<G>(grad, i, 0);
  }

  /// A warp's work on `count` elements.
  template <bool STATE, class Move>
  DEVICE void sweep(u32 count, Move move) const {
    const u32 packed = is_aligned<V>() ? count / V * V : 0;
#pragma unroll 1
    for (u32 i = lane() * V; i < packed; i += WARP * V) pack<STATE>(i, move);
#pragma unroll 1
    for (u32 i = packed + lane(); i < count; i += WARP) one<STATE>(i, move);
  }
};

/// The sweep that moves: the only one, or the second of two.
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
      return rule.moved(factor, p, rule.direction(p, g, state));
    });
#endif
  }
}

#if SWEEPS == 2

/// The first sweep: the state is brought up to date, and sums are taken of each chunk.
template <class R, class G, class W, bool COPY>
DEVICE void observe_of(const Job& job) {
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
        // The step reads both again.
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

/// Folds each of `rows` times `count` sums, `apart` from one another, into its first.
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

/// Between the sweeps, a block for each tensor: from its sums to the factors of its rows.
template <class R>
DEVICE void conclude_of(const Job& job) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 2) observe(const Job job) {
  observe_of<RULE, GRAD, WEIGHT, MASTER>(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) conclude(const Job job) {
  conclude_of<RULE>(job);
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2) step(const Job job) {
  step_of<RULE, GRAD, WEIGHT, MASTER>(job);
}

#else

/// The sum of squares of a span of gradients, and whether one is not finite.
template <class G>
DEVICE double squares(u64 grad, u32 count, GradMap map, bool& bad) {
  constexpr int W = 16 / sizeof(typename G::Bits);
  const bool aligned = grad % 16 == 0;
  double sums[1];
  sum_span<1, W>(count, sums, [&](u32 i, u32 many, double (&lanes)[1][W]) {
    Pack<G, W> g;
    // The step reads it again.
    if (many == W && aligned) g.template load<true>(g.at(grad, i));
    else {
#pragma unroll
      for (u32 j = 0; j < W; j++)
        g.x[j] = j < many ? G::template load<true>(grad + (i + j) * sizeof(typename G::Bits)) : 0;
    }
#pragma unroll
    for (int j = 0; j < W; j++) {
      const float x = G::widen(g.x[j]) * map.scale;
      bad |= !is_finite(x);
      const double y = map.limited(x);
      lanes[0][j] = fma(y, y, lanes[0][j]);
    }
  });
  return sums[0];
}

/// Sums by a tree that the host has drawn, level by level: each of up to 32 neighbours by one thread, which waits for
/// memory no longer than a warp would.
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
        // The last two eights are a pair of their own.
        if (k % 16) sum += pair, pair = 0;
      }
      job.sum[fold.to] = sum;
    }
    __syncthreads();
  }
}

/// The rule of `amp::LossScaler::update`.
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

/// `min(1, max / (norm + 1e-6))`; a NaN stays one.
DEVICE double coefficient(double max, double norm) {
  const double c = max / (norm + 1e-6);
  return c > 1 ? 1 : c;
}

DEVICE float grad_scale(const Ctl& ctl) {
  return ctl.scaled ? (float)(1 / (double)ctl.loss_scale) : ctl.grad_scale;
}

/// What each gradient is to be multiplied by, and that a step is taken.
DEVICE void advance(const Job& job, float scale, double clipped) {
  const Ctl& ctl = *job.ctl;
  const double* of_group = job.sum + job.tensors + 1;
  const double all = clipped * sqrt(job.sum[job.tensors]);
  // Written so that a NaN divides.
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
    // The limit is one before the rule's own factor.
    job.progress[at].limit = (float)((double)ctl.limit * own);
    job.progress[at].step++;
  }
}

/// Sums of squares of chunks from `first` on, and of the tensors that have no other chunks.
DEVICE void look_at(const Job& job, float scale) {
  Ctl& ctl = *job.ctl;
  const GradMap map = {scale, ctl.limit};
  bool bad = false;
  for (u32 c = job.first + warp_index(); c < job.chunks; c += warp_count()) {
    const Chunk& chunk = job.chunk[c];
    const Tensor& t = job.tensor[chunk.tensor];
    const Span span = span_of(t.count, chunk.index, SPAN);
    double sum;
    if (t.grad_type == 0) sum = squares<F32>(t.grad + span.start * 4, span.count, map, bad);
    else if (t.grad_type == 1) sum = squares<F16>(t.grad + span.start * 2, span.count, map, bad);
    else sum = squares<Bf16>(t.grad + span.start * 2, span.count, map, bad);
    const u32 own = c - chunk.index, count = (u32)((t.count + SPAN - 1) / SPAN);
    double* sums = job.sum + job.tensors + 1 + job.groups + own;
    const bool whole = add_to_tree(sums, job.arrived + own, chunk.index, count, sum);
    if (whole && lane() == 0) job.sum[chunk.tensor] = sum;
  }
  if (bad) atomicOr(&ctl.bad, 1u);
}

/// Looks at some gradients before the others are there.
extern "C" __global__ void __launch_bounds__(THREADS, 3) look_part(const Job job) {
  look_at(job, grad_scale(*job.ctl));
}

/// Looks at the gradients, as far as it has chunks; the last block decides about the step.
extern "C" __global__ void __launch_bounds__(THREADS, 3) look(const Job job) {
  Ctl& ctl = *job.ctl;
  const float scale = grad_scale(ctl);
  look_at(job, scale);
  if (!is_last_block(&ctl.arrived)) return;
  fold_levels(job);

  __shared__ bool skip;
  __shared__ double clipped;
  if (threadIdx.x == 0) {
    double norm = ctl.total_norm < 0 ? sqrt(job.sum[job.tensors]) : ctl.total_norm;
    bool bad = ctl.bad;
    if (ctl.total_norm_at) {
      const float total = load_one<F32>(ctl.total_norm_at, 0);
      norm = total, bad = !is_finite(total);
    }
    skip = ctl.known || (job.found_inf && *job.found_inf) || (ctl.check && bad);
    clipped = ctl.max_norm < 0 ? 1 : coefficient(ctl.max_norm, norm);
    if (!skip && ctl.max_norm >= 0) ctl.norm = norm;
    ctl.skip = skip;
    ctl.skipped += skip;
    ctl.bad = 0;
    if (ctl.scaled) update_scale(ctl, skip);
  }
  __syncthreads();
  if (!skip) advance(job, scale, clipped);
}

/// A weight's average when it moves to `x`, each operation rounded.
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

/// Moves averages towards their weights, of the type `grad_type`.
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
