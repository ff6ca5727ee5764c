// Kernels over channels-last images, compiled after `images.cu`.

/// Matrices, one after another, each to be transposed.
struct TransposeJob { u64 x, y; u32 count, rows, columns, unused; };

/// A block takes a tile of `WARP` rows and columns at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 2) transpose(const TransposeJob job) {
  __shared__ T::Bits tile[WARP][WARP + 1];
  const u32 across = (job.columns + WARP - 1) / WARP, down = (job.rows + WARP - 1) / WARP;
  for (u32 task = blockIdx.x; task < job.count * down * across; task += gridDim.x) {
    const u32 strip = task / across, row = strip % down * WARP, column = (task - strip * across) * WARP;
    const u64 base = (u64)(strip / down) * job.rows * job.columns;
    const u64 from = at(job.x, base), to = at(job.y, base);
    __syncthreads(); // The previous tile was read.
    for (u32 i = threadIdx.x / WARP; i < WARP && row + i < job.rows; i += THREADS / WARP)
      if (column + lane() < job.columns) tile[i][lane()] = T::load(at(from, (u64)(row + i) * job.columns + column + lane()));
    __syncthreads();
    for (u32 i = threadIdx.x / WARP; i < WARP && column + i < job.columns; i += THREADS / WARP)
      if (row + lane() < job.rows) T::store(at(to, (u64)(column + i) * job.rows + row + lane()), tile[lane()][i]);
  }
}

/// Whether threads take `WIDE` adjacent channels: where all `addresses`, or-ed together, allow it. Else they take one.
DEVICE bool is_wide(u64 addresses, u32 channels) { return addresses % 16 == 0 && channels % WIDE == 0; }

/// The threads of a block over rows of channels: each has `MANY` adjacent channels, a pack, of every `at_once`-th row.
template <u32 MANY>
struct Tile {
  u32 packs, across, at_once, row, pack;
  DEVICE Tile(u32 channels) {
    packs = channels / MANY, across = packs < THREADS ? packs : THREADS, at_once = THREADS / across;
    row = threadIdx.x / across, pack = threadIdx.x - row * across;
  }
  /// Whether this thread has rows of the packs from `first` on.
  DEVICE bool has(u32 first) const { return row < at_once && first + pack < packs; }
};

/// Adds up what the threads of a block have for each channel: `done(i, channel, sum)`, one thread for each; `i` is below
/// `MANY * THREADS`, and `j * across + pack` for the `j`-th channel of a pack.
template <u32 MANY, class Done>
DEVICE void fold_rows(const Tile<MANY>& tile, u32 first, const float (&own)[MANY], Done done) {
  __shared__ float all[MANY * THREADS];
  __syncthreads(); // The previous numbers were read.
#pragma unroll
  for (u32 j = 0; j < MANY; j++) all[j * THREADS + threadIdx.x] = own[j];
  __syncthreads();
  for (u32 i = threadIdx.x; i < MANY * tile.across; i += THREADS) {
    const u32 j = i / tile.across, pack = i - j * tile.across;
    if (first + pack >= tile.packs) continue;
    double sum = 0;
    for (u32 row = 0; row < tile.at_once; row++) sum += all[j * THREADS + row * tile.across + pack];
    done(i, (first + pack) * MANY + j, sum);
  }
}

/// This block's two numbers for a channel.
DEVICE double* part_of(const NormJob& job, u32 channel) {
  return job.part + 2 * ((u64)blockIdx.x * job.channels + channel);
}

/// Adds up those of all blocks, in the last: `done(channel, first, second)`.
template <class Done>
DEVICE void fold_parts(const NormJob& job, Done done) {
  __shared__ double sums[2][THREADS];
  const u32 across = job.channels < THREADS ? job.channels : THREADS, slices = THREADS / across;
  const u32 slice = threadIdx.x / across, own = threadIdx.x - slice * across;
  for (u32 from = 0; from < job.channels; from += across) {
    const u32 channel = from + own;
    const bool has = slice < slices && channel < job.channels;
    double a = 0, b = 0;
#pragma unroll 8
    for (u32 p = has ? slice : job.parts; p < job.parts; p += slices) {
      const double* part = job.part + 2 * ((u64)p * job.channels + channel);
      a += part[0], b += part[1];
    }
    __syncthreads(); // The previous sums were read.
    sums[0][threadIdx.x] = a, sums[1][threadIdx.x] = b;
    __syncthreads();
    if (!has || slice > 0) continue;
    for (u32 s = 1; s < slices; s++) a += sums[0][s * across + own], b += sums[1][s * across + own];
    done(channel, a, b);
  }
}

/// The rows of this block.
struct Part { u32 from, to; };
DEVICE Part part_rows(const NormJob& job) {
  const u64 rows = (u64)job.images * job.pixels;
  return {(u32)(rows * blockIdx.x / job.parts), (u32)(rows * (blockIdx.x + 1) / job.parts)};
}

template <u32 MANY>
DEVICE void moments_of_rows(const NormJob& job) {
  __shared__ float means[MANY * THREADS];
  const Tile<MANY> tile(job.channels);
  const Part part = part_rows(job);
  const u32 rows = part.to - part.from;
  for (u32 first = 0; first < tile.packs; first += tile.across) {
    const u32 channel = (first + tile.pack) * MANY, begin = tile.has(first) ? part.from + tile.row : part.to;
    float sum[MANY] = {}, squares[MANY] = {}, mean[MANY] = {}, x[WIDE];
#pragma unroll 4
    for (u32 row = begin; row < part.to; row += tile.at_once) {
      load(x, job.x, (u64)row * job.channels + channel, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) sum[j] += x[j];
    }
    fold_rows(tile, first, sum, [&](u32 i, u32 c, double total) {
      part_of(job, c)[0] = total, means[i] = rows ? (float)(total / rows) : 0;
    });
    __syncthreads();
#pragma unroll
    for (u32 j = 0; j < MANY; j++)
      if (tile.has(first)) mean[j] = means[j * tile.across + tile.pack];
    // A second pass: the difference of the mean square and the squared mean would cancel in f32.
#pragma unroll 4
    for (u32 row = begin; row < part.to; row += tile.at_once) {
      load(x, job.x, (u64)row * job.channels + channel, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) squares[j] += (x[j] - mean[j]) * (x[j] - mean[j]);
    }
    // The sum of squares, of that around the mean.
    fold_rows(tile, first, squares, [&](u32 i, u32 c, double around) {
      double* to = part_of(job, c);
      const double middle = means[i];
      to[1] = around + middle * (2 * to[0] - rows * middle);
    });
    __syncthreads(); // The means were read.
  }
}

/// As `moments`, of channels-last images: `parts` blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2) moments_last(const NormJob job) {
  if (is_wide(job.x, job.channels)) moments_of_rows<WIDE>(job);
  else moments_of_rows<1>(job);
  if (!is_last_block(job.arrived)) return;
  const double count = (double)job.images * job.pixels;
  fold_parts(job, [&](u32 c, double sum, double squares) {
    const double mean = sum / count, var = squares / count - mean * mean;
    store_one<F32>(job.mean, c, (float)mean);
    store_one<F32>(job.var, c, (float)(var < 0 ? 0 : var));
  });
}

template <u32 MANY>
DEVICE void normalize_rows(const NormJob& job) {
  const Tile<MANY> tile(job.channels);
  const u32 rows = job.images * job.pixels, step = gridDim.x * tile.at_once;
  for (u32 first = 0; first < tile.packs; first += tile.across) {
    if (!tile.has(first)) continue;
    const u32 channel = (first + tile.pack) * MANY;
    float scale[MANY], shift[MANY];
#pragma unroll
    for (u32 j = 0; j < MANY; j++) {
      const u32 c = channel + j;
      scale[j] = load_one<F32>(job.gamma, c) / sqrtf(load_one<F32>(job.var, c) + job.eps);
      shift[j] = load_one<F32>(job.beta, c) - load_one<F32>(job.mean, c) * scale[j];
    }
    for (u32 row = blockIdx.x * tile.at_once + tile.row; row < rows; row += step) {
      const u64 i = (u64)row * job.channels + channel;
      float v[WIDE];
      load(v, job.x, i, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) {
        v[j] = v[j] * scale[j] + shift[j];
        if (job.relu) v[j] = relu_of(v[j]);
      }
      store(job.y, i, MANY, v);
    }
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) normalize_last(const NormJob job) {
  if (is_wide(job.x | job.y, job.channels)) normalize_rows<WIDE>(job);
  else normalize_rows<1>(job);
}

template <u32 MANY>
DEVICE void sums_of_rows(const NormJob& job) {
  const Tile<MANY> tile(job.channels);
  const Part part = part_rows(job);
  for (u32 first = 0; first < tile.packs; first += tile.across) {
    const u32 channel = (first + tile.pack) * MANY, begin = tile.has(first) ? part.from + tile.row : part.to;
    float sum[MANY] = {}, dot[MANY] = {}, mean[MANY] = {};
#pragma unroll
    for (u32 j = 0; j < MANY; j++)
      if (tile.has(first)) mean[j] = load_one<F32>(job.mean, channel + j);
#pragma unroll 2
    for (u32 row = begin; row < part.to; row += tile.at_once) {
      const u64 i = (u64)row * job.channels + channel;
      float x[WIDE], dy[WIDE];
      load_gradient(dy, job, i, MANY);
      load(x, job.x, i, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) sum[j] += dy[j], dot[j] += dy[j] * (x[j] - mean[j]);
    }
    fold_rows(tile, first, sum, [&](u32, u32 c, double total) { part_of(job, c)[0] = total; });
    fold_rows(tile, first, dot, [&](u32, u32 c, double total) { part_of(job, c)[1] = total; });
  }
}

/// As `norm_sums`: `parts` blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2) norm_sums_last(const NormJob job) {
  if (is_wide(job.x | job.dy | job.y, job.channels)) sums_of_rows<WIDE>(job);
  else sums_of_rows<1>(job);
  if (!is_last_block(job.arrived)) return;
  const double count = (double)job.images * job.pixels;
  fold_parts(job, [&](u32 c, double all, double across) {
    store_one<F32>(job.dbeta, c, (float)all);
    store_one<F32>(job.dgamma, c, (float)(across * inverse_deviation(job, c)));
    store_one<F32>(job.along, 2 * c, (float)(all / count));
    store_one<F32>(job.along, 2 * c + 1, (float)(across / count));
  });
}

template <u32 MANY>
DEVICE void backward_of_rows(const NormJob& job) {
  const Tile<MANY> tile(job.channels);
  const u32 rows = job.images * job.pixels, step = gridDim.x * tile.at_once;
  for (u32 first = 0; first < tile.packs; first += tile.across) {
    if (!tile.has(first)) continue;
    const u32 channel = (first + tile.pack) * MANY;
    float mean[MANY], a[MANY], b[MANY], shift[MANY];
#pragma unroll
    for (u32 j = 0; j < MANY; j++) {
      const u32 c = channel + j;
      const float inverse = inverse_deviation(job, c);
      mean[j] = load_one<F32>(job.mean, c), a[j] = load_one<F32>(job.gamma, c) * inverse;
      shift[j] = job.along ? -a[j] * load_one<F32>(job.along, 2 * c) : 0;
      b[j] = job.along ? -a[j] * inverse * inverse * load_one<F32>(job.along, 2 * c + 1) : 0;
    }
    for (u32 row = blockIdx.x * tile.at_once + tile.row; row < rows; row += step) {
      const u64 i = (u64)row * job.channels + channel;
      float x[WIDE], dy[WIDE];
      load(x, job.x, i, MANY);
      load_gradient(dy, job, i, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) x[j] = dy[j] * a[j] + (x[j] - mean[j]) * b[j] + shift[j];
      store(job.dx, i, MANY, x);
    }
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) norm_backward_last(const NormJob job) {
  if (is_wide(job.x | job.dy | job.dx | job.y, job.channels)) backward_of_rows<WIDE>(job);
  else backward_of_rows<1>(job);
}

/// Calls `visit(image, pixel, channel)` for each pack of `MANY` channels of images.
template <u32 MANY, class Visit>
DEVICE void visit_packs(u32 planes, u32 pixels, u32 channels, Visit visit) {
  const u32 packs = channels / MANY, all = planes / MANY * pixels;
  for (u32 task = blockIdx.x * THREADS + threadIdx.x; task < all; task += gridDim.x * THREADS) {
    const u32 place = task / packs, image = place / pixels;
    visit(image, place - image * pixels, (task - place * packs) * MANY);
  }
}

template <u32 MANY>
DEVICE void pool_rows(const PoolJob& job) {
  const u32 pixels = job.out_height * job.out_width;
  visit_packs<MANY>(job.planes, pixels, job.channels, [&](u32 image, u32 pixel, u32 channel) {
    const u32 oy = pixel / job.out_width, ox = pixel - oy * job.out_width;
    const u32 y0 = oy * job.stride - job.padding, x0 = ox * job.stride - job.padding;
    const u64 from = (u64)image * job.height * job.width;
    const u64 to = ((u64)image * pixels + pixel) * job.channels + channel;
    float best[WIDE] = {}, v[WIDE];
    u32 taken[MANY];
#pragma unroll
    for (u32 j = 0; j < MANY; j++) taken[j] = ALL;
    for (u32 y = y0; y != y0 + job.kernel; y++) {
      for (u32 x = x0; x != x0 + job.kernel; x++) {
        if (y >= job.height || x >= job.width) continue;
        const u32 own = y * job.width + x;
        load(v, job.x, (from + own) * job.channels + channel, MANY);
#pragma unroll
        for (u32 j = 0; j < MANY; j++)
          if (taken[j] == ALL || v[j] > best[j] || v[j] != v[j]) best[j] = v[j], taken[j] = own;
      }
    }
    store(job.y, to, MANY, best);
#pragma unroll
    for (u32 j = 0; j < MANY; j++) store4(job.taken + (to + j) * 4, taken[j]);
  });
}
/// As `max_pool`, of channels-last images.
extern "C" __global__ void __launch_bounds__(THREADS, 2) max_pool_last(const PoolJob job) {
  if (is_wide(job.x | job.y, job.channels)) pool_rows<WIDE>(job);
  else pool_rows<1>(job);
}

template <u32 MANY>
DEVICE void pool_backward_rows(const PoolJob& job) {
  const u32 pixels = job.height * job.width;
  visit_packs<MANY>(job.planes, pixels, job.channels, [&](u32 image, u32 own, u32 channel) {
    const u32 row = own / job.width, y = row + job.padding, x = own - row * job.width + job.padding;
    const u32 above = y < job.kernel ? 0 : (y - job.kernel) / job.stride + 1;
    const u32 before = x < job.kernel ? 0 : (x - job.kernel) / job.stride + 1;
    const u64 plane = (u64)image * job.out_height * job.out_width;
    float sum[WIDE] = {}, dy[WIDE];
    for (u32 oy = above; oy < job.out_height && oy * job.stride <= y; oy++) {
      for (u32 ox = before; ox < job.out_width && ox * job.stride <= x; ox++) {
        const u64 window = (plane + oy * job.out_width + ox) * job.channels + channel;
        load(dy, job.y, window, MANY);
#pragma unroll
        for (u32 j = 0; j < MANY; j++)
          if (load4(job.taken + (window + j) * 4) == own) sum[j] += dy[j];
      }
    }
    store(job.x, ((u64)image * pixels + own) * job.channels + channel, MANY, sum);
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) max_pool_last_backward(const PoolJob job) {
  if (is_wide(job.x | job.y, job.channels)) pool_backward_rows<WIDE>(job);
  else pool_backward_rows<1>(job);
}

template <u32 MANY>
DEVICE void mean_rows(const MeanJob& job) {
  visit_packs<MANY>(job.planes, 1, job.channels, [&](u32 image, u32, u32 channel) {
    float sum[WIDE] = {}, x[WIDE];
    for (u32 p = 0; p < job.pixels; p++) {
      load(x, job.x, ((u64)image * job.pixels + p) * job.channels + channel, MANY);
#pragma unroll
      for (u32 j = 0; j < MANY; j++) sum[j] += x[j];
    }
#pragma unroll
    for (u32 j = 0; j < MANY; j++) sum[j] /= job.pixels;
    store(job.y, (u64)image * job.channels + channel, MANY, sum);
  });
}
/// As `mean_pool`, of channels-last images.
extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_pool_last(const MeanJob job) {
  if (is_wide(job.x | job.y, job.channels)) mean_rows<WIDE>(job);
  else mean_rows<1>(job);
}

template <u32 MANY>
DEVICE void mean_backward_rows(const MeanJob& job) {
  visit_packs<MANY>(job.planes, job.pixels, job.channels, [&](u32 image, u32 pixel, u32 channel) {
    float dy[WIDE];
    load(dy, job.y, (u64)image * job.channels + channel, MANY);
#pragma unroll
    for (u32 j = 0; j < MANY; j++) dy[j] /= job.pixels;
    store(job.x, ((u64)image * job.pixels + pixel) * job.channels + channel, MANY, dy);
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_pool_last_backward(const MeanJob job) {
  if (is_wide(job.x | job.y, job.channels)) mean_backward_rows<WIDE>(job);
  else mean_backward_rows<1>(job);
}
