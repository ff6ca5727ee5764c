// Kernels over rows, compiled after `ops.cu`: softmax, layer normalisation, cross entropy, rows of
// a table, sums of columns.
//
// A row of at most `HELD` elements for each thread of a block is held in registers, so that it is
// read once; longer rows are read from the cache again.

DEVICE float sum_of_warp(float x) { return (float)fold_threads(x, 1, WARP); }
/// Skips NaN.
DEVICE float largest_of_warp(float x) {
  for (u32 step = 1; step < WARP; step *= 2) x = fmaxf(x, (float)__shfl_xor_sync(ALL, (double)x, step));
  return x;
}

/// A row's sum of `f(i)`, and its largest `f(i)`.
template <class F>
DEVICE float sum_of_line(u32 count, F f) {
  float sum = 0;
  for (u32 i = lane(); i < count; i += WARP) sum += f(i);
  return sum_of_warp(sum);
}
template <class F>
DEVICE float largest_of_line(u32 count, F f) {
  float largest = -__uint_as_float(INFINITY_BITS);
  for (u32 i = lane(); i < count; i += WARP) largest = fmaxf(largest, f(i));
  return largest_of_warp(largest);
}

constexpr u32 HELD = 8;

/// Some warps of a block, 1, 2, 4 or 8, that hold a row together: thread `i` of the team has the
/// elements `i`, `i + threads`, ... All teams of a block go through their rows in step.
struct Team {
  u32 warps;

  DEVICE u32 threads() const { return warps * WARP; }
  /// Of a block.
  DEVICE u32 teams() const { return THREADS / threads(); }
  DEVICE u32 own() const { return threadIdx.x / threads(); }
  /// The thread's `j`-th element.
  DEVICE u32 element(u32 j) const { return threadIdx.x % threads() + j * threads(); }

  /// Calls `visit(j, i)` for the thread's elements below `count`.
  template <class Visit>
  DEVICE void each(u32 count, Visit visit) const {
#pragma unroll
    for (u32 j = 0; j < HELD; j++)
      if (element(j) < count) visit(j, element(j));
  }
  /// Calls `visit(row)` for all rows of the team; a row past the end is `rows`.
  template <class Visit>
  DEVICE void rows(u32 rows, Visit visit) const {
    for (u32 first = blockIdx.x * teams(); first < rows; first += gridDim.x * teams())
      visit(first + own() < rows ? first + own() : rows);
  }
  /// The values of the team's warps, combined in order by `f`.
  template <class F>
  DEVICE float combine(float of_warp, F f) const {
    if (warps == 1) return of_warp;
    __shared__ float all[THREADS / WARP];
    __syncthreads(); // The previous numbers were read.
    if (lane() == 0) all[threadIdx.x / WARP] = of_warp;
    __syncthreads();
    float x = all[own() * warps];
    for (u32 i = 1; i < warps; i++) x = f(x, all[own() * warps + i]);
    return x;
  }
  DEVICE float sum(float x) const {
    return combine(sum_of_warp(x), [](float a, float b) { return a + b; });
  }
  DEVICE float largest(float x) const {
    return combine(largest_of_warp(x), [](float a, float b) { return fmaxf(a, b); });
  }
};

/// Softmax; of the first `i % seen + 1` values of row `i` only, unless `seen` is 0. Backward, `x`
/// is the gradient of the input. A result may overwrite its input. `team` is the warps of a team
/// that holds a row, or 0.
struct SoftmaxJob { u64 x, y, dy; u32 rows, count, seen, team; };

DEVICE u32 seen_of(const SoftmaxJob& job, u32 row) {
  const u32 seen = job.seen ? row % job.seen + 1 : job.count;
  return seen < job.count ? seen : job.count;
}

DEVICE void held_softmax(const SoftmaxJob& job) {
  const Team team = {job.team};
  team.rows(job.rows, [&](u32 row) {
    const u64 base = (u64)row * job.count, x = at(job.x, base), y = at(job.y, base);
    const u32 seen = row < job.rows ? seen_of(job, row) : 0, count = row < job.rows ? job.count : 0;
    float held[HELD], most = -__uint_as_float(INFINITY_BITS), sum = 0;
    team.each(seen, [&](u32 j, u32 i) { held[j] = load_one<T>(x, i); });
    team.each(seen, [&](u32 j, u32) { most = fmaxf(most, held[j]); });
    most = team.largest(most);
    team.each(seen, [&](u32 j, u32) { sum += held[j] = expf(held[j] - most); });
    const float inverse = 1 / team.sum(sum);
    team.each(count, [&](u32 j, u32 i) { store_one<T>(y, i, i < seen ? held[j] * inverse : 0); });
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax(const SoftmaxJob job) {
  if (job.team) return held_softmax(job);
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), y = at(job.y, (u64)row * job.count);
    const u32 seen = seen_of(job, row);
    const float most = largest_of_line(seen, [&](u32 i) { return load_one<T>(x, i); });
    const auto share = [&](u32 i) { return expf(load_one<T>(x, i) - most); };
    const float inverse = 1 / sum_of_line(seen, share);
    for (u32 i = lane(); i < job.count; i += WARP) store_one<T>(y, i, i < seen ? share(i) * inverse : 0);
  }
}

DEVICE void held_softmax_backward(const SoftmaxJob& job) {
  const Team team = {job.team};
  team.rows(job.rows, [&](u32 row) {
    const u64 base = (u64)row * job.count, dx = at(job.x, base), from = at(job.y, base), of = at(job.dy, base);
    const u32 seen = row < job.rows ? seen_of(job, row) : 0, count = row < job.rows ? job.count : 0;
    float y[HELD], dy[HELD], along = 0;
    team.each(seen, [&](u32 j, u32 i) { y[j] = load_one<T>(from, i), dy[j] = load_one<T>(of, i); });
    team.each(seen, [&](u32 j, u32) { along += y[j] * dy[j]; });
    along = team.sum(along);
    team.each(count, [&](u32 j, u32 i) { store_one<T>(dx, i, i < seen ? y[j] * (dy[j] - along) : 0); });
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_backward(const SoftmaxJob job) {
  if (job.team) return held_softmax_backward(job);
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 base = (u64)row * job.count, dx = at(job.x, base), y = at(job.y, base), dy = at(job.dy, base);
    const u32 seen = seen_of(job, row);
    const float along = sum_of_line(seen, [&](u32 i) { return load_one<T>(y, i) * load_one<T>(dy, i); });
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float own = i < seen ? load_one<T>(y, i) * (load_one<T>(dy, i) - along) : 0;
      store_one<T>(dx, i, own);
    }
  }
}

/// Layer normalisation; parameters are f32. Forward writes each row's mean and inverse deviation to
/// `lines`, backward reads them. Backward of rows that a team holds writes the sums of `dy`, and of
/// `dy` times the normalised `x`, by column and block to `part`; `column_sums` sums those of longer
/// rows. `half` is a copy of an f32 `y` for `layer_norm_wide`.
struct LayerNormJob {
  u64 x, y, half, dy, dx, gamma, beta, lines;
  double* part;
  u32 rows, count;
  float eps;
  u32 team;
};

struct Line { float mean, inverse; };
DEVICE Line line_of(u64 lines, u32 row) {
  return {load_one<F32>(lines, 2 * (u64)row), load_one<F32>(lines, 2 * (u64)row + 1)};
}
DEVICE void write_line(u64 lines, u32 row, Line line) {
  store_one<F32>(lines, 2 * (u64)row, line.mean);
  store_one<F32>(lines, 2 * (u64)row + 1, line.inverse);
}

template <class X, bool HALF>
DEVICE void held_layer_norm(const LayerNormJob& job) {
  const Team team = {job.team};
  team.rows(job.rows, [&](u32 row) {
    // There are fewer than 2^31 elements.
    const u32 base = row * job.count, count = row < job.rows ? job.count : 0;
    float x[HELD], sum = 0, squares = 0;
    team.each(count, [&](u32 j, u32 i) { x[j] = load_one<X>(job.x, base + i); });
    team.each(count, [&](u32 j, u32) { sum += x[j]; });
    const float mean = team.sum(sum) / job.count;
    team.each(count, [&](u32 j, u32) { x[j] -= mean, squares += x[j] * x[j]; });
    const float inverse = 1 / sqrtf(team.sum(squares) / job.count + job.eps);
    team.each(count, [&](u32 j, u32 i) {
      const float own = x[j] * inverse * load_one<F32>(job.gamma, i) + load_one<F32>(job.beta, i);
      store_one<X>(job.y, base + i, own);
      if constexpr (HALF) store_one<T>(job.half, base + i, own);
    });
    if (row < job.rows && team.element(0) == 0) write_line(job.lines, row, {mean, inverse});
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) layer_norm(const LayerNormJob job) {
  if (job.team) return held_layer_norm<T, false>(job);
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), y = at(job.y, (u64)row * job.count);
    const float mean = sum_of_line(job.count, [&](u32 i) { return load_one<T>(x, i); }) / job.count;
    const float squares = sum_of_line(job.count, [&](u32 i) {
      const float off = load_one<T>(x, i) - mean;
      return off * off;
    });
    const float inverse = 1 / sqrtf(squares / job.count + job.eps);
    if (lane() == 0) write_line(job.lines, row, {mean, inverse});
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float normal = (load_one<T>(x, i) - mean) * inverse;
      store_one<T>(y, i, normal * load_one<F32>(job.gamma, i) + load_one<F32>(job.beta, i));
    }
  }
}

/// Of f32 rows that a team holds, with a copy of the result for a product of halves.
extern "C" __global__ void __launch_bounds__(THREADS, 3) layer_norm_wide(const LayerNormJob job) {
  held_layer_norm<F32, true>(job);
}

/// The sum of each thread's `x` over the teams of the block, in the first team.
DEVICE double sum_of_teams(const Team& team, float x) {
  __shared__ float all[THREADS];
  __syncthreads(); // The previous numbers were read.
  all[threadIdx.x] = x;
  __syncthreads();
  double sum = 0;
  for (u32 i = threadIdx.x; i < THREADS; i += team.threads()) sum += all[i];
  return sum;
}
template <class X, class Dy>
DEVICE void held_layer_norm_backward(const LayerNormJob& job) {
  const Team team = {job.team};
  float sums[HELD] = {}, dots[HELD] = {};
  team.rows(job.rows, [&](u32 row) {
    const u32 base = row * job.count, count = row < job.rows ? job.count : 0;
    const Line line = row < job.rows ? line_of(job.lines, row) : Line{};
    float x[HELD], dy[HELD], sum = 0, dot = 0;
    team.each(count, [&](u32 j, u32 i) {
      x[j] = load_one<X>(job.x, base + i);
      dy[j] = load_one<Dy>(job.dy, base + i);
    });
    team.each(count, [&](u32 j, u32 i) {
      x[j] = (x[j] - line.mean) * line.inverse;
      sums[j] += dy[j], dots[j] += dy[j] * x[j];
      dy[j] *= load_one<F32>(job.gamma, i);
      sum += dy[j], dot += dy[j] * x[j];
    });
    const float average = team.sum(sum) / job.count, along = team.sum(dot) / job.count;
    team.each(count, [&](u32 j, u32 i) {
      store_one<X>(job.dx, base + i, (dy[j] - average - x[j] * along) * line.inverse);
    });
  });
  double* to = job.part + 2 * (u64)blockIdx.x * job.count;
#pragma unroll
  for (u32 j = 0; j < HELD; j++) {
    const double sum = sum_of_teams(team, sums[j]), dot = sum_of_teams(team, dots[j]);
    if (team.own() == 0 && team.element(j) < job.count)
      to[team.element(j)] = sum, to[job.count + team.element(j)] = dot;
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) layer_norm_backward(const LayerNormJob job) {
  if (job.team) return held_layer_norm_backward<T, T>(job);
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 base = (u64)row * job.count, x = at(job.x, base), dy = at(job.dy, base), dx = at(job.dx, base);
    const Line line = line_of(job.lines, row);
    const auto g = [&](u32 i) { return load_one<T>(dy, i) * load_one<F32>(job.gamma, i); };
    const auto normal = [&](u32 i) { return (load_one<T>(x, i) - line.mean) * line.inverse; };
    const float average = sum_of_line(job.count, g) / job.count;
    const float along = sum_of_line(job.count, [&](u32 i) { return g(i) * normal(i); }) / job.count;
    for (u32 i = lane(); i < job.count; i += WARP)
      store_one<T>(dx, i, (g(i) - average - normal(i) * along) * line.inverse);
  }
}

/// Of f32 rows that a team holds, with a gradient of halves.
extern "C" __global__ void __launch_bounds__(THREADS, 3) layer_norm_wide_backward(const LayerNormJob job) {
  held_layer_norm_backward<F32, T>(job);
}

/// Sums of the columns of `dy`; and, if there is an `x`, of `dy` times the normalised `x`: those of
/// each part of the rows, for `fold_columns`.
struct ColumnSumsJob {
  u64 x, dy, lines;
  double* part;
  u32 rows, count, parts, unused;
};

/// Sums over the warps of a block: `x[j]` of lane `i` is column `i * WIDE + j` of the tile, or `j *
/// WARP + i` if it is not packed.
DEVICE void write_tile(const float (&x)[WIDE], bool packed, double* to, u32 columns) {
  __shared__ float all[THREADS / WARP][WARP * WIDE];
  __syncthreads(); // The previous numbers were read.
#pragma unroll
  for (u32 j = 0; j < WIDE; j++) all[threadIdx.x / WARP][packed ? lane() * WIDE + j : j * WARP + lane()] = x[j];
  __syncthreads();
  if (threadIdx.x >= columns) return;
  double sum = 0;
  for (u32 warp = 0; warp < THREADS / WARP; warp++) sum += all[warp][threadIdx.x];
  to[threadIdx.x] = sum;
}
/// A block takes `WARP * WIDE` columns of a part of the rows, a warp a row at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 2) column_sums(const ColumnSumsJob job) {
  constexpr u32 TILE = WARP * WIDE;
  const u32 tile = blockIdx.x / job.parts, part = blockIdx.x - tile * job.parts, from = tile * TILE;
  const u32 columns = job.count - from < TILE ? job.count - from : TILE;
  const bool packed = (job.x | job.dy) % 16 == 0 && job.count % WIDE == 0;
  const auto read = [&](float (&x)[WIDE], u64 base, u64 row) {
    if (packed) {
      if (lane() * WIDE < columns) load(x, base, row + lane() * WIDE, WIDE);
      return;
    }
#pragma unroll
    for (u32 j = 0; j < WIDE; j++)
      if (j * WARP + lane() < columns) x[j] = load_one<T>(base, row + j * WARP + lane());
  };
  float sums[WIDE] = {}, dots[WIDE] = {};
  const u32 step = THREADS / WARP * job.parts;
#pragma unroll 4
  for (u32 row = part * (THREADS / WARP) + threadIdx.x / WARP; row < job.rows; row += step) {
    const u64 at = (u64)row * job.count + from;
    float dy[WIDE] = {}, x[WIDE] = {};
    read(dy, job.dy, at);
    if (job.x) read(x, job.x, at);
    const Line line = job.x ? line_of(job.lines, row) : Line{};
#pragma unroll
    for (u32 j = 0; j < WIDE; j++) sums[j] += dy[j], dots[j] += dy[j] * ((x[j] - line.mean) * line.inverse);
  }
  const u32 all = job.x ? 2 * job.count : job.count;
  double* to = job.part + (u64)part * all + from;
  write_tile(sums, packed, to, columns);
  if (job.x) write_tile(dots, packed, to + job.count, columns);
}

/// `y = f(a, b)` of rows in packs, and the sums of its columns, as `column_sums` has them.
struct SummedJob { u64 a, b, y; double* part; u32 rows, count, parts, unused; };

template <class A, bool TWO, class F>
DEVICE void map_columns(const SummedJob& job, F f) {
  constexpr u32 TILE = WARP * WIDE, AT_ONCE = 2;
  const u32 tile = blockIdx.x / job.parts, part = blockIdx.x - tile * job.parts, from = tile * TILE;
  const u32 columns = job.count - from < TILE ? job.count - from : TILE, own = lane() * WIDE;
  const u32 step = THREADS / WARP * job.parts, end = own < columns ? job.rows : 0;
  const auto place = [&](u32 row) { return (u64)row * job.count + from + own; };
  float sums[WIDE] = {};
  for (u32 row = part * (THREADS / WARP) + threadIdx.x / WARP; row < end; row += AT_ONCE * step) {
    Pack<A, WIDE> a[AT_ONCE];
    Pack<T, WIDE> b[AT_ONCE];
    // All packs are loaded before the first is stored.
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
      if (row + k * step >= end) continue;
      a[k].load(a[k].at(job.a, place(row + k * step)));
      if constexpr (TWO) b[k].load(b[k].at(job.b, place(row + k * step)));
    }
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++) {
      if (row + k * step >= end) continue;
#pragma unroll
      for (u32 j = 0; j < WIDE; j++) {
        b[k].x[j] = T::narrow(f(A::widen(a[k].x[j]), TWO ? T::widen(b[k].x[j]) : 0));
        sums[j] += T::widen(b[k].x[j]);
      }
      b[k].store(b[k].at(job.y, place(row + k * step)));
    }
  }
  write_tile(sums, true, job.part + (u64)part * job.count + from, columns);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) gelu_backward_sums(const SummedJob job) {
  map_columns<T, true>(job, [](float x, float dy) { return dy * gelu_of(x).slope; });
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) cast_from_f32_sums(const SummedJob job) {
  map_columns<F32, false>(job, [](float x, float) { return x; });
}

/// Adds up the parts' numbers, `count` for `sum` and, if there is a `dot`, as many for that; f32.
struct FoldJob { const double* part; u64 sum, dot; u32 count, parts; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) fold_columns(const FoldJob job) {
  const u32 all = job.dot ? 2 * job.count : job.count, column = blockIdx.x * OWN + threadIdx.x % OWN;
  double sums[1] = {};
  fold_parts(sums, column < all ? job.parts : 0, [&](double (&sums)[1], u32 part) {
    sums[0] += job.part[(u64)part * all + column];
  });
  if (threadIdx.x >= OWN || column >= all) return;
  const double sum = sums[0];
  if (column < job.count) store_one<F32>(job.sum, column, (float)sum);
  else store_one<F32>(job.dot, column - job.count, (float)sum);
}

/// The mean of `-log softmax(x)[label]`, f32, or, given its gradient `dy`, f32, that of `x`.
/// Forward writes the largest number of each row to `lines`, and one over its sum of `exp(x -
/// largest)`. If it has a `dx`, it writes the gradient there for the `dy` that it expects, `guess`,
/// f32, and notes it as `guessed`; backward then computes the gradient only if `dy` is another one.
struct LossJob {
  u64 x, labels, y, dy, dx, lines, guess, guessed;
  double* part;
  u32* arrived;
  u32 rows, count;
};
/// Labels are 64 bits wide and were checked on the host.
DEVICE u32 label_of(const LossJob& job, u32 row) { return load4(job.labels + 8 * (u64)row); }

/// A row's largest number, NaN skipped, and its sum of `exp(x - largest)`, in one pass.
struct Shares { float most, sum; };
/// Of a row of negative infinity, `exp(x)` is 0 as well.
DEVICE float scaled(float x, float most) {
  return expf(x - (most == -__uint_as_float(INFINITY_BITS) ? 0 : most));
}
DEVICE Shares shares_of_line(u64 x, u32 count) {
  constexpr u32 AT_ONCE = 8;
  const float none = -__uint_as_float(INFINITY_BITS);
  float most = none, sum = 0;
  for (u32 first = lane(); first < count; first += AT_ONCE * WARP) {
    float own[AT_ONCE], larger = most;
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) own[j] = first + j * WARP < count ? load_one<T>(x, first + j * WARP) : none;
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) larger = fmaxf(larger, own[j]);
    sum = most == none ? sum : sum * scaled(most, larger);
    most = larger;
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; j++) sum += scaled(own[j], most);
  }
  const float all = largest_of_warp(most);
  return {all, sum_of_warp(most == none ? sum : sum * scaled(most, all))};
}

/// Elements of a thread at a time in long rows, of any type: the order of sums is the same for all.
constexpr u32 EACH = 8;

/// The same by a block, of a row in packs.
DEVICE Shares shares_of_row(u64 x, u32 count) {
  constexpr u32 AT_ONCE = 4;
  const Team team = {THREADS / WARP};
  const float none = -__uint_as_float(INFINITY_BITS);
  float most = none, sum = 0;
  constexpr u32 STEP = THREADS * EACH;
  for (u32 first = threadIdx.x * EACH; first < count; first += AT_ONCE * STEP) {
    Pack<T, EACH> own[AT_ONCE];
    float larger = most;
    // They stay in the cache for the gradient.
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++)
      if (first + k * STEP < count) own[k].load<true>(own[k].at(x, first + k * STEP));
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++)
#pragma unroll
      for (u32 j = 0; j < EACH; j++)
        if (first + k * STEP < count) larger = fmaxf(larger, T::widen(own[k].x[j]));
    sum = most == none ? sum : sum * scaled(most, larger);
    most = larger;
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++)
#pragma unroll
      for (u32 j = 0; j < EACH; j++)
        if (first + k * STEP < count) sum += scaled(T::widen(own[k].x[j]), most);
  }
  const float all = team.largest(most);
  return {all, team.sum(most == none ? sum : sum * scaled(most, all))};
}

DEVICE void write_loss(const LossJob& job, u32 row, const Shares& of) {
  const float own = load_one<T>(at(job.x, (u64)row * job.count), label_of(job, row));
  job.part[row] = (double)(logf(of.sum) - (own - of.most));
  write_line(job.lines, row, {of.most, 1 / of.sum});
}
/// The mean, by the last block.
DEVICE void fold_losses(const LossJob& job) {
  if (!is_last_block(job.arrived)) return;
  double sum = 0;
  for (u32 row = threadIdx.x; row < job.rows; row += THREADS) sum += job.part[row];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) store_one<F32>(job.y, 0, (float)(sum / job.rows));
}
/// By a block, of a row in packs; `scale` is the gradient of the row's loss.
DEVICE void write_loss_gradient(const LossJob& job, u32 row, const Line& line, float scale) {
  const u64 x = at(job.x, (u64)row * job.count), dx = at(job.dx, (u64)row * job.count);
  const u32 label = label_of(job, row);
  for (u32 i = threadIdx.x * EACH; i < job.count; i += THREADS * EACH) {
    Pack<T, EACH> own;
    own.load(own.at(x, i));
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      const float share = expf(T::widen(own.x[j]) - line.mean) * line.inverse;
      own.x[j] = T::narrow(share * scale - (i + j == label ? scale : 0));
    }
    own.store(own.at(dx, i));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy(const LossJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const Shares of = shares_of_line(at(job.x, (u64)row * job.count), job.count);
    if (lane() == 0) write_loss(job, row, of);
  }
  fold_losses(job);
}
/// Of long rows in packs: a block for a row.
extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy_wide(const LossJob job) {
  const float guess = job.dx ? load_one<F32>(job.guess, 0) : 0;
  for (u32 row = blockIdx.x; row < job.rows; row += gridDim.x) {
    const Shares of = shares_of_row(at(job.x, (u64)row * job.count), job.count);
    if (threadIdx.x == 0) write_loss(job, row, of);
    if (job.dx) write_loss_gradient(job, row, {of.most, 1 / of.sum}, guess / job.rows);
  }
  if (job.dx && blockIdx.x == 0 && threadIdx.x == 0) store_one<F32>(job.guessed, 0, guess);
  fold_losses(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy_backward(const LossJob job) {
  const float scale = load_one<F32>(job.dy, 0) / job.rows;
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), dx = at(job.dx, (u64)row * job.count);
    const Line line = line_of(job.lines, row);
    const u32 label = label_of(job, row);
#pragma unroll 4
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float share = expf(load_one<T>(x, i) - line.mean) * line.inverse;
      store_one<T>(dx, i, share * scale - (i == label ? scale : 0));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy_wide_backward(const LossJob job) {
  const float dy = load_one<F32>(job.dy, 0);
  if (job.guessed && load_one<F32>(job.guessed, 0) == dy) return;
  for (u32 row = blockIdx.x; row < job.rows; row += gridDim.x)
    write_loss_gradient(job, row, line_of(job.lines, row), dy / job.rows);
  if (blockIdx.x == 0 && threadIdx.x == 0) store_one<F32>(job.guess, 0, dy);
}

/// Row `ids[i]` of `table` for each `i`; backward, `table` is its gradient, all zeros, and `rows`
/// those of the result. Ids are 64 bits wide and were checked on the host. `ends` has two numbers
/// for each row of the table, zeros at first.
struct EmbeddingJob {
  u64 ids, table, rows;
  u32* ends;
  u32 count, width, padding, unused;
};

DEVICE u32 id_of(const EmbeddingJob& job, u32 i) { return load4<true>(job.ids + 8 * (u64)i); }

extern "C" __global__ void __launch_bounds__(THREADS, 2) embedding(const EmbeddingJob job) {
  // Where rows allow accesses of 16 bytes.
  const u64 addresses = job.table | job.rows | job.width * sizeof(T::Bits);
  for (u32 i = warp_index(); i < job.count; i += warp_count()) {
    const u64 from = (u64)id_of(job, i) * job.width, to = (u64)i * job.width;
    sweep(addresses, job.width, lane(), WARP, [&](u64 column, u32 many) {
      float x[WIDE];
      load(x, job.table, from + column, many);
      store(job.rows, to + column, many, x);
    });
  }
}

/// Writes the positions between which an id comes: `count` less the first, and one more than the
/// last.
extern "C" __global__ void __launch_bounds__(THREADS, 2) ends_of_ids(const EmbeddingJob job) {
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < job.count; i += gridDim.x * THREADS) {
    u32* const ends = job.ends + 2 * (u64)id_of(job, i);
    atomicMax(ends, job.count - i);
    atomicMax(ends + 1, i + 1);
  }
}

/// Writes to `found` which of `SEARCHED` positions from `first` on, before `end`, have this id, in
/// order. Returns their number.
constexpr u32 SEARCHED = 4 * THREADS;
DEVICE u32 find_id(const EmbeddingJob& job, u32 id, u32 first, u32 end, u32 (&found)[SEARCHED]) {
  constexpr u32 EACH = SEARCHED / THREADS;
  __shared__ u32 of_warp[THREADS / WARP];
  const u32 warp = threadIdx.x / WARP, from = first + warp * EACH * WARP + lane();
  u32 equal[EACH], before = 0, all = 0;
#pragma unroll
  for (u32 j = 0; j < EACH; j++) equal[j] = from + j * WARP < end ? id_of(job, from + j * WARP) : ~id;
#pragma unroll
  for (u32 j = 0; j < EACH; j++) equal[j] = __ballot_sync(ALL, equal[j] == id), all += __popc(equal[j]);
  __syncthreads(); // The previous numbers were read.
  if (lane() == 0) of_warp[warp] = all;
  __syncthreads();
  all = 0;
  for (u32 i = 0; i < THREADS / WARP; i++) before += i < warp ? of_warp[i] : 0, all += of_warp[i];
#pragma unroll
  for (u32 j = 0; j < EACH; j++) {
    if (equal[j] >> lane() & 1) found[before + __popc(equal[j] & ((1u << lane()) - 1))] = from + j * WARP;
    before += __popc(equal[j]);
  }
  __syncthreads();
  return all;
}

/// A block adds up `THREADS` columns of the rows of an id, in order, if its position is the id's
/// first.
extern "C" __global__ void __launch_bounds__(THREADS, 2) embedding_backward(const EmbeddingJob job) {
  // Loads in flight: an id that comes often is a long sum.
  constexpr u32 AT_ONCE = 16;
  __shared__ u32 found[SEARCHED];
  const u32 tiles = (job.width + THREADS - 1) / THREADS, all = job.count * tiles;
  for (u32 task = blockIdx.x; task < all; task += gridDim.x) {
    const u32 first = task / tiles, column = (task - first * tiles) * THREADS + threadIdx.x;
    const u32 id = id_of(job, first);
    if (id == job.padding || job.count - job.ends[2 * (u64)id] != first) continue;
    const u32 end = job.ends[2 * (u64)id + 1];
    float sum = 0;
    for (u32 from = first; from < end; from += SEARCHED) {
      const u32 count = find_id(job, id, from, end, found);
      for (u32 i = 0; i < count && column < job.width; i += AT_ONCE) {
        float dy[AT_ONCE];
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++)
          dy[j] = i + j < count ? load_one<T>(job.rows, (u64)found[i + j] * job.width + column) : 0;
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) sum += dy[j];
      }
    }
    if (column < job.width) store_one<T>(job.table, (u64)id * job.width + column, sum);
  }
}
