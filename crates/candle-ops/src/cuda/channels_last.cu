// Kernels over channels-last images, compiled after `images.cu`.

/// Matrices, one after another, each to be transposed.
struct TransposeJob { u64 x, y; u32 count, rows, columns, unused; };

/// A block takes a tile at a time: of 32 x 32, or all rows or columns where there are fewer, and as
/// many of the others as there is shared memory for.
extern "C" __global__ void __launch_bounds__(THREADS, 2) transpose(const TransposeJob job) {
  constexpr u32 MOST = 8192;
  __shared__ T::Bits tile[MOST + WARP];
  const u32 high = job.rows < WARP ? job.rows : job.columns < WARP ? MOST / (job.columns + 1) : WARP;
  const u32 wide = job.columns < WARP ? job.columns : job.rows < WARP ? MOST / (job.rows + 1) : WARP;
  const u32 across = (job.columns + wide - 1) / wide, down = (job.rows + high - 1) / high;
  for (u32 task = blockIdx.x; task < job.count * down * across; task += gridDim.x) {
    const u32 strip = task / across, row = strip % down * high, column = (task - strip * across) * wide;
    const u64 base = (u64)(strip / down) * job.rows * job.columns, from = at(job.x, base), to = at(job.y, base);
    const u32 rows = job.rows - row < high ? job.rows - row : high;
    const u32 columns = job.columns - column < wide ? job.columns - column : wide;
    __syncthreads(); // The previous tile was read.
    for (u32 i = threadIdx.x; i < rows * columns; i += THREADS) {
      const u32 r = i / columns, c = i - r * columns;
      tile[r * (wide + 1) + c] = T::load(at(from, (u64)(row + r) * job.columns + column + c));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < rows * columns; i += THREADS) {
      const u32 c = i / rows, r = i - c * rows;
      T::store(at(to, (u64)(column + c) * job.rows + row + r), tile[r * (wide + 1) + c]);
    }
  }
}

/// Whether threads take `WIDE` adjacent channels: where all `addresses`, or-ed together, allow it.
/// Else they take one.
DEVICE bool is_wide(u64 addresses, u32 channels) { return addresses % 16 == 0 && channels % WIDE == 0; }

/// Channels of a block: their numbers of a row lie together.
constexpr u32 SLICE = 64;

/// A block's part of the rows and its channels. Each thread has `MANY` adjacent channels, a pack,
/// of every `at_once`-th row between `from` and `to`.
template <u32 MANY>
struct Tile {
  u32 part, first, across, at_once, channel, from, to;
  DEVICE Tile(const NormJob& job) {
    const u32 slices = (job.channels + SLICE - 1) / SLICE;
    part = blockIdx.x / slices, first = (blockIdx.x - part * slices) * SLICE;
    across = (job.channels - first < SLICE ? job.channels - first : SLICE) / MANY, at_once = THREADS / across;
    const u32 row = threadIdx.x / across;
    channel = first + (threadIdx.x - row * across) * MANY;
    const u64 rows = (u64)job.images * job.pixels;
    from = (u32)(rows * part / job.parts) + row, to = (u32)(rows * (part + 1) / job.parts);
    if (row >= at_once) from = to;
  }
  /// Goes through the thread's packs, `AT_ONCE` at a time: calls `read(k, i)` for each, which
  /// begins at element `i`, then `use(k, i)`.
  template <u32 AT_ONCE, class Read, class Use>
  DEVICE void each(const NormJob& job, Read read, Use use) const {
    const auto place = [&](u32 row, u32 k) { return (u64)(row + k * at_once) * job.channels + channel; };
    u32 row = from;
    // Without conditions, so that all loads come before what needs them.
    for (; row < to && to - row > (AT_ONCE - 1) * at_once; row += AT_ONCE * at_once) {
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; k++) read(k, place(row, k));
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; k++) use(k, place(row, k));
    }
    for (; row < to; row += at_once) read(0, place(row, 0)), use(0, place(row, 0));
  }
};

/// Adds up what the threads of a block have for each channel, as one of the two numbers of its
/// part.
template <u32 MANY>
DEVICE void fold_rows(const NormJob& job, const Tile<MANY>& tile, u32 number, const double (&own)[MANY]) {
  __shared__ double all[MANY * THREADS];
  __syncthreads(); // The previous numbers were read.
#pragma unroll
  for (u32 j = 0; j < MANY; j++) all[j * THREADS + threadIdx.x] = own[j];
  __syncthreads();
  for (u32 i = threadIdx.x; i < MANY * tile.across; i += THREADS) {
    const u32 pack = i / MANY, j = i - pack * MANY;
    double sum = 0;
    for (u32 row = 0; row < tile.at_once; row++) sum += all[j * THREADS + row * tile.across + pack];
    job.part[2 * ((u64)tile.part * job.channels + tile.first + i) + number] = sum;
  }
}

/// Mean, and sum of the squares of the distances from it, of more and more values: as a difference
/// of sums the latter would cancel. Follows: Chan, Golub and LeVeque, Updating formulae and a
/// pairwise algorithm for computing sample variances, 1979.
struct Spread {
  float mean, squares;
  /// Adds `many` values with this mean and these squares to `count`; `share` is `many / (count +
  /// many)`.
  DEVICE void add(float of, float around, float count, float share) {
    const float apart = of - mean;
    mean += apart * share, squares += around + apart * apart * (count * share);
  }
};

template <u32 MANY>
DEVICE void moments_of_rows(const NormJob& job) {
  constexpr u32 AT_ONCE = 4;
  const Tile<MANY> tile(job);
  Spread spread[MANY] = {};
  float count = 0, x[AT_ONCE][WIDE];
  u32 row = tile.from;
  for (; row < tile.to && tile.to - row > (AT_ONCE - 1) * tile.at_once; row += AT_ONCE * tile.at_once) {
#pragma unroll
    for (u32 k = 0; k < AT_ONCE; k++)
      load(x[k], job.x, (u64)(row + k * tile.at_once) * job.channels + tile.channel, MANY);
    const float share = AT_ONCE / (count + AT_ONCE);
#pragma unroll
    for (u32 j = 0; j < MANY; j++) {
      float sum = 0, around = 0;
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; k++) sum += x[k][j];
      const float mean = sum / AT_ONCE;
#pragma unroll
      for (u32 k = 0; k < AT_ONCE; k++) around += (x[k][j] - mean) * (x[k][j] - mean);
      spread[j].add(mean, around, count, share);
    }
    count += AT_ONCE;
  }
  for (; row < tile.to; row += tile.at_once) {
    load(x[0], job.x, (u64)row * job.channels + tile.channel, MANY);
    const float share = 1 / (count + 1);
#pragma unroll
    for (u32 j = 0; j < MANY; j++) spread[j].add(x[0][j], 0, count, share);
    count++;
  }
  double sums[MANY], squares[MANY];
#pragma unroll
  for (u32 j = 0; j < MANY; j++) {
    sums[j] = (double)spread[j].mean * count;
    squares[j] = spread[j].squares + sums[j] * spread[j].mean;
  }
  fold_rows(job, tile, 0, sums);
  fold_rows(job, tile, 1, squares);
}

/// The sum and the sum of squares of each channel's part.
extern "C" __global__ void __launch_bounds__(THREADS, 3) moments_last(const NormJob job) {
  if (is_wide(job.x, job.channels)) moments_of_rows<WIDE>(job);
  else moments_of_rows<1>(job);
}

/// Columns of a block that adds up parts, and how many parts it takes at a time.
constexpr u32 OWN = 8, PARTS_AT_ONCE = THREADS / OWN;

/// Adds up what `add(sums, part)` adds for the parts of the thread's column, `threadIdx.x % OWN`:
/// in the first `OWN` threads.
template <u32 N, class Add>
DEVICE void fold_parts(double (&sums)[N], u32 parts, Add add) {
  __shared__ double all[N][THREADS / WARP][OWN];
#pragma unroll 4
  for (u32 part = threadIdx.x / OWN; part < parts; part += PARTS_AT_ONCE) add(sums, part);
#pragma unroll
  for (u32 n = 0; n < N; n++) {
    sums[n] = fold_threads(sums[n], OWN, WARP);
    if (lane() < OWN) all[n][threadIdx.x / WARP][lane()] = sums[n];
  }
  __syncthreads();
  if (threadIdx.x >= OWN) return;
  for (u32 warp = 1; warp < THREADS / WARP; warp++)
#pragma unroll
    for (u32 n = 0; n < N; n++) sums[n] += all[n][warp][threadIdx.x];
}

/// A moving average: `running += momentum * (factor * batch - running)` of means, with a factor of
/// 1, and of variances.
DEVICE void follow(u64 running, u32 c, float batch, float factor, float momentum) {
  const float old = load_one<F32>(running, c);
  store_one<F32>(running, c, old + (batch * factor - old) * momentum);
}

/// Folds the parts of each channel to the results of `moments`, or of `norm_sums` with a gradient.
extern "C" __global__ void __launch_bounds__(THREADS, 2) fold_parts_last(const NormJob job) {
  const u32 c = blockIdx.x * OWN + threadIdx.x % OWN;
  double sums[2] = {};
  fold_parts(sums, c < job.channels ? job.parts : 0, [&](double (&sums)[2], u32 part) {
    const double* of = job.part + 2 * ((u64)part * job.channels + c);
    sums[0] += of[0], sums[1] += of[1];
  });
  if (threadIdx.x >= OWN || c >= job.channels) return;
  const double a = sums[0], b = sums[1];
  const double count = (double)job.images * job.pixels, mean = a / count;
  if (job.dy) {
    store_one<F32>(job.dbeta, c, (float)a);
    store_one<F32>(job.dgamma, c, (float)(b * inverse_deviation(job, c)));
    store_one<F32>(job.along, 2 * c, (float)mean);
    store_one<F32>(job.along, 2 * c + 1, (float)(b / count));
  } else {
    const double spread = b / count - mean * mean;
    const float var = (float)(spread < 0 ? 0 : spread);
    store_one<F32>(job.mean, c, (float)mean);
    store_one<F32>(job.var, c, var);
    if (!job.running_mean) return;
    follow(job.running_mean, c, (float)mean, 1, job.momentum);
    follow(job.running_var, c, var, job.factor, job.momentum);
  }
}

template <u32 MANY>
DEVICE void normalize_rows(const NormJob& job) {
  const Tile<MANY> tile(job);
  float scale[MANY], shift[MANY];
#pragma unroll
  for (u32 j = 0; j < MANY; j++) {
    const u32 c = tile.channel + j;
    scale[j] = load_one<F32>(job.gamma, c) / sqrtf(load_one<F32>(job.var, c) + job.eps);
    shift[j] = load_one<F32>(job.beta, c) - load_one<F32>(job.mean, c) * scale[j];
  }
  float v[4][WIDE];
  const auto read = [&](u32 k, u64 i) { load(v[k], job.x, i, MANY); };
  tile.template each<4>(job, read, [&](u32 k, u64 i) {
#pragma unroll
    for (u32 j = 0; j < MANY; j++) {
      v[k][j] = v[k][j] * scale[j] + shift[j];
      if (job.relu) v[k][j] = relu_of(v[k][j]);
    }
    store(job.y, i, MANY, v[k]);
    if (MANY == 1 || !job.bits) return;
    // Of NaN and positive numbers, as they are written.
    u32 bits = 0;
#pragma unroll
    for (u32 j = 0; j < MANY; j++) bits |= (T::narrow(v[k][j]) ? 1u : 0u) << j;
    store1(job.bits + i / WIDE, bits);
  });
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) normalize_last(const NormJob job) {
  if (is_wide(job.x | job.y, job.channels)) normalize_rows<WIDE>(job);
  else normalize_rows<1>(job);
}

/// How to know whether a ReLU passes an element's gradient on: there is no ReLU, by the result, or
/// by `bits`.
enum Passes { ALWAYS, BY_RESULT, BY_BITS };

/// The gradient before the ReLU, if there is one.
template <u32 MANY, Passes PASSES>
DEVICE void load_passed(float (&dy)[WIDE], const NormJob& job, u64 i) {
  if constexpr (PASSES != BY_BITS) return load_gradient(dy, job, i, MANY, PASSES == BY_RESULT);
  load(dy, job.dy, i, MANY);
  const u32 bits = load1(job.bits + i / WIDE) >> (MANY == 1 ? i % WIDE : 0);
#pragma unroll
  for (u32 j = 0; j < MANY; j++) dy[j] = bits >> j & 1 ? dy[j] : 0;
}

template <u32 MANY, Passes PASSES>
DEVICE void sums_of_rows(const NormJob& job) {
  const Tile<MANY> tile(job);
  float sum[MANY] = {}, dot[MANY] = {}, mean[MANY];
#pragma unroll
  for (u32 j = 0; j < MANY; j++) mean[j] = load_one<F32>(job.mean, tile.channel + j);
  float x[2][WIDE], dy[2][WIDE];
  const auto read = [&](u32 k, u64 i) { load(x[k], job.x, i, MANY), load_passed<MANY, PASSES>(dy[k], job, i); };
  tile.template each<2>(job, read, [&](u32 k, u64) {
#pragma unroll
    for (u32 j = 0; j < MANY; j++) sum[j] += dy[k][j], dot[j] += dy[k][j] * (x[k][j] - mean[j]);
  });
  double sums[MANY], dots[MANY];
#pragma unroll
  for (u32 j = 0; j < MANY; j++) sums[j] = sum[j], dots[j] = dot[j];
  fold_rows(job, tile, 0, sums);
  fold_rows(job, tile, 1, dots);
}

template <u32 MANY>
DEVICE void sums_of_rows(const NormJob& job) {
  if (job.bits) sums_of_rows<MANY, BY_BITS>(job);
  else if (job.relu) sums_of_rows<MANY, BY_RESULT>(job);
  else sums_of_rows<MANY, ALWAYS>(job);
}

/// The sums of `dy` and of `dy * (x - mean)` of each channel's part.
extern "C" __global__ void __launch_bounds__(THREADS, 3) norm_sums_last(const NormJob job) {
  if (is_wide(job.x | job.dy | job.y, job.channels)) sums_of_rows<WIDE>(job);
  else sums_of_rows<1>(job);
}

template <u32 MANY, Passes PASSES>
DEVICE void backward_of_rows(const NormJob& job) {
  const Tile<MANY> tile(job);
  float mean[MANY], a[MANY], b[MANY], shift[MANY];
#pragma unroll
  for (u32 j = 0; j < MANY; j++) {
    const u32 c = tile.channel + j;
    const float inverse = inverse_deviation(job, c);
    mean[j] = load_one<F32>(job.mean, c), a[j] = load_one<F32>(job.gamma, c) * inverse;
    shift[j] = job.along ? -a[j] * load_one<F32>(job.along, 2 * c) : 0;
    b[j] = job.along ? -a[j] * inverse * inverse * load_one<F32>(job.along, 2 * c + 1) : 0;
  }
  float x[2][WIDE], dy[2][WIDE];
  const auto read = [&](u32 k, u64 i) { load(x[k], job.x, i, MANY), load_passed<MANY, PASSES>(dy[k], job, i); };
  tile.template each<2>(job, read, [&](u32 k, u64 i) {
#pragma unroll
    for (u32 j = 0; j < MANY; j++) x[k][j] = dy[k][j] * a[j] + (x[k][j] - mean[j]) * b[j] + shift[j];
    store(job.dx, i, MANY, x[k]);
  });
}
template <u32 MANY>
DEVICE void backward_of_rows(const NormJob& job) {
  if (job.bits) backward_of_rows<MANY, BY_BITS>(job);
  else if (job.relu) backward_of_rows<MANY, BY_RESULT>(job);
  else backward_of_rows<MANY, ALWAYS>(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 3) norm_backward_last(const NormJob job) {
  if (is_wide(job.x | job.dy | job.dx | job.y, job.channels)) backward_of_rows<WIDE>(job);
  else backward_of_rows<1>(job);
}

struct TrackJob { u64 mean, var, batch_mean, batch_var; u32 channels; float momentum, factor; u32 unused; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) track(const TrackJob job) {
  for (u32 c = blockIdx.x * THREADS + threadIdx.x; c < job.channels; c += gridDim.x * THREADS) {
    follow(job.mean, c, load_one<F32>(job.batch_mean, c), 1, job.momentum);
    follow(job.var, c, load_one<F32>(job.batch_var, c), job.factor, job.momentum);
  }
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
