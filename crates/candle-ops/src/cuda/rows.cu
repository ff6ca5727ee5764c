// Kernels over rows, compiled after `ops.cu`: softmax, layer normalisation, cross entropy, sums of columns.

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

/// Softmax; of the first `i % seen + 1` values of row `i` only, unless `seen` is 0. Backward, `x` is the gradient of
/// the input. A result may overwrite its input.
struct SoftmaxJob { u64 x, y, dy; u32 rows, count, seen, unused; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax(const SoftmaxJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), y = at(job.y, (u64)row * job.count);
    const u32 seen = job.seen ? row % job.seen + 1 : job.count;
    const float most = largest_of_line(seen, [&](u32 i) { return load_one<T>(x, i); });
    const auto share = [&](u32 i) { return expf(load_one<T>(x, i) - most); };
    const float inverse = 1 / sum_of_line(seen, share);
    for (u32 i = lane(); i < job.count; i += WARP) store_one<T>(y, i, i < seen ? share(i) * inverse : 0);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) softmax_backward(const SoftmaxJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 base = (u64)row * job.count, dx = at(job.x, base), y = at(job.y, base), dy = at(job.dy, base);
    const u32 seen = job.seen ? row % job.seen + 1 : job.count;
    const float along = sum_of_line(seen, [&](u32 i) { return load_one<T>(y, i) * load_one<T>(dy, i); });
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float own = i < seen ? load_one<T>(y, i) * (load_one<T>(dy, i) - along) : 0;
      store_one<T>(dx, i, own);
    }
  }
}

/// Layer normalisation; parameters are f32. Backward writes each row's mean and inverse deviation to `lines`.
struct LayerNormJob { u64 x, y, dy, dx, gamma, beta, lines; u32 rows, count; float eps; u32 unused; };

struct Line { float mean, inverse; };
DEVICE Line measure(u64 x, const LayerNormJob& job) {
  const float mean = sum_of_line(job.count, [&](u32 i) { return load_one<T>(x, i); }) / job.count;
  const float squares = sum_of_line(job.count, [&](u32 i) {
    const float off = load_one<T>(x, i) - mean;
    return off * off;
  });
  return {mean, 1 / sqrtf(squares / job.count + job.eps)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) layer_norm(const LayerNormJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), y = at(job.y, (u64)row * job.count);
    const Line line = measure(x, job);
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float normal = (load_one<T>(x, i) - line.mean) * line.inverse;
      store_one<T>(y, i, normal * load_one<F32>(job.gamma, i) + load_one<F32>(job.beta, i));
    }
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) layer_norm_backward(const LayerNormJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 base = (u64)row * job.count, x = at(job.x, base), dy = at(job.dy, base), dx = at(job.dx, base);
    const Line line = measure(x, job);
    if (lane() == 0) {
      store_one<F32>(job.lines, 2 * (u64)row, line.mean);
      store_one<F32>(job.lines, 2 * (u64)row + 1, line.inverse);
    }
    const auto g = [&](u32 i) { return load_one<T>(dy, i) * load_one<F32>(job.gamma, i); };
    const float average = sum_of_line(job.count, g) / job.count;
    const float dot = sum_of_line(job.count, [&](u32 i) { return g(i) * (load_one<T>(x, i) - line.mean); });
    const float along = dot * line.inverse * line.inverse / job.count;
    for (u32 i = lane(); i < job.count; i += WARP) {
      const float off = load_one<T>(x, i) - line.mean;
      store_one<T>(dx, i, (g(i) - average - off * along) * line.inverse);
    }
  }
}

/// Sums of the columns of `dy`, f32; and, if there is an `x`, of `dy` times the normalised `x`.
struct ColumnSumsJob {
  u64 x, dy, lines, sum, dot;
  double* part;
  u32* arrived;
  u32 rows, count, parts, unused;
};

/// A block takes `WARP` columns of a part of the rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2) column_sums(const ColumnSumsJob job) {
  __shared__ double sums[THREADS], dots[THREADS];
  const u32 tile = blockIdx.x / job.parts, part = blockIdx.x - tile * job.parts;
  const u32 column = tile * WARP + lane(), step = THREADS / WARP * job.parts;
  float sum = 0, dot = 0;
  if (column < job.count) {
    for (u32 row = part * (THREADS / WARP) + threadIdx.x / WARP; row < job.rows; row += step) {
      const u64 i = (u64)row * job.count + column;
      const float dy = load_one<T>(job.dy, i);
      sum += dy;
      if (!job.x) continue;
      const float mean = load_one<F32>(job.lines, 2 * (u64)row);
      dot += dy * (load_one<T>(job.x, i) - mean) * load_one<F32>(job.lines, 2 * (u64)row + 1);
    }
  }
  sums[threadIdx.x] = sum, dots[threadIdx.x] = dot;
  __syncthreads();
  if (threadIdx.x < WARP && column < job.count) {
    double all = 0, across = 0;
    for (u32 i = lane(); i < THREADS; i += WARP) all += sums[i], across += dots[i];
    double* to = job.part + 2 * ((u64)part * job.count + column);
    to[0] = all, to[1] = across;
  }
  if (!is_last_block(job.arrived)) return;
  for (u32 c = threadIdx.x; c < job.count; c += THREADS) {
    double all = 0, across = 0;
#pragma unroll 1
    for (u32 p = 0; p < job.parts; p++) {
      const double* from = job.part + 2 * ((u64)p * job.count + c);
      all += from[0], across += from[1];
    }
    store_one<F32>(job.sum, c, (float)all);
    if (job.x) store_one<F32>(job.dot, c, (float)across);
  }
}

/// The mean of `-log softmax(x)[label]`, f32, or, given its gradient `dy`, f32, that of `x`.
struct LossJob {
  u64 x, labels, y, dy, dx;
  double* part;
  u32* arrived;
  u32 rows, count;
};
/// Labels are 64 bits wide and were checked on the host.
DEVICE u32 label_of(const LossJob& job, u32 row) { return load4(job.labels + 8 * (u64)row); }

extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy(const LossJob job) {
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count);
    const float most = largest_of_line(job.count, [&](u32 i) { return load_one<T>(x, i); });
    const float sum = sum_of_line(job.count, [&](u32 i) { return expf(load_one<T>(x, i) - most); });
    if (lane() == 0) job.part[row] = (double)(logf(sum) - (load_one<T>(x, label_of(job, row)) - most));
  }
  if (!is_last_block(job.arrived)) return;
  double sum = 0;
  for (u32 row = threadIdx.x; row < job.rows; row += THREADS) sum += job.part[row];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) store_one<F32>(job.y, 0, (float)(sum / job.rows));
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) cross_entropy_backward(const LossJob job) {
  const float scale = load_one<F32>(job.dy, 0) / job.rows;
  for (u32 row = warp_index(); row < job.rows; row += warp_count()) {
    const u64 x = at(job.x, (u64)row * job.count), dx = at(job.dx, (u64)row * job.count);
    const float most = largest_of_line(job.count, [&](u32 i) { return load_one<T>(x, i); });
    const auto share = [&](u32 i) { return expf(load_one<T>(x, i) - most); };
    const float factor = scale / sum_of_line(job.count, share);
    const u32 label = label_of(job, row);
    for (u32 i = lane(); i < job.count; i += WARP)
      store_one<T>(dx, i, share(i) * factor - (i == label ? scale : 0));
  }
}
