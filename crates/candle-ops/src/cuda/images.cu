// Kernels over images, compiled after `ops.cu`: conversion of bytes, convolution, batch
// normalisation, pooling.

/// `(byte / 255 - mean) / std`; plane `i` is of channel `i % channels`. `by` has the means of the
/// channels, then their deviations, as f32.
struct BytesJob { u64 x, y, by; u32 planes, pixels, channels, unused; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) scale_bytes(const BytesJob job) {
  const u32 all = job.planes * chunks(job.pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, job.pixels);
    const u32 c = s.row % job.channels;
    const float mean = load_one<F32>(job.by, c), std = load_one<F32>(job.by, job.channels + c);
    const u64 base = (u64)s.row * job.pixels + s.from, x = job.x + base, y = at(job.y, base);
    // An access is of 16 bytes of results and of `WIDE` bytes of the image.
    sweep(x * sizeof(T::Bits) | y, s.count, lane(), WARP, [&](u64 i, u32 many) {
      u32 bytes[WIDE / 4];
      if (many == 1) bytes[0] = load1(x + i);
      else if constexpr (WIDE == 4) bytes[0] = load4(x + i);
      else load8(bytes, x + i);
      float v[WIDE];
#pragma unroll
      for (u32 j = 0; j < many; j++) v[j] = ((float)(bytes[j / 4] >> 8 * (j % 4) & 255) / 255 - mean) / std;
      store(y, i, many, v);
    });
  }
}

// Convolution: the columns whose product with the weights it is.

/// Images `[image][channel][height][width]` and their columns: tap `d`, of `channels` times the
/// kernel's, of output pixel `p` of an image is at `image * per_image + d * per_tap + p`.
struct ColumnsJob {
  u64 x, columns, per_image, per_tap;
  u32 images, channels, height, width, out_height, out_width, kernel_height, kernel_width, stride, padding;
};

/// Unrolls images; padding is 0. With kernels of one pixel without padding, a transposition.
extern "C" __global__ void __launch_bounds__(THREADS, 2) im2col(const ColumnsJob job) {
  const u32 taps = job.kernel_height * job.kernel_width, pixels = job.out_height * job.out_width;
  const u32 depth = job.channels * taps, all = job.images * depth * chunks(pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, pixels);
    const u32 image = s.row / depth, d = s.row - image * depth, channel = d / taps, tap = d - channel * taps;
    const u64 to = at(job.columns, image * job.per_image + d * job.per_tap + s.from);
    const u64 from = at(job.x, (u64)(image * job.channels + channel) * job.height * job.width);
    if (taps == 1 && job.stride == 1 && job.padding == 0) {
      const u64 own = at(from, s.from);
      sweep(own | to, s.count, lane(), WARP, [&](u64 i, u32 many) {
        float x[WIDE];
        load(x, own, i, many);
        store(to, i, many, x);
      });
      continue;
    }
    // Position of the tap of output (0, 0); one before the image is larger than all in it.
    const u32 row = tap / job.kernel_width, y0 = row - job.padding;
    const u32 x0 = tap - row * job.kernel_width - job.padding;
    u32 oy = (s.from + lane()) / job.out_width, ox = s.from + lane() - oy * job.out_width;
    const u32 down = WARP / job.out_width, right = WARP - down * job.out_width;
    for (u32 i = lane(); i < s.count; i += WARP) {
      const u32 y = oy * job.stride + y0, x = ox * job.stride + x0;
      const bool inside = y < job.height && x < job.width;
      T::store(at(to, i), inside ? T::load(at(from, (u64)y * job.width + x)) : 0);
      ox += right, oy += down;
      if (ox >= job.out_width) ox -= job.out_width, oy++;
    }
  }
}

/// Adds columns to the pixels that `im2col` took them from.
extern "C" __global__ void __launch_bounds__(THREADS, 2) col2im(const ColumnsJob job) {
  const u32 taps = job.kernel_height * job.kernel_width, pixels = job.height * job.width;
  const u32 all = job.images * job.channels * chunks(pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, pixels);
    const u32 image = s.row / job.channels, channel = s.row - image * job.channels;
    const u64 from = at(job.columns, image * job.per_image + (u64)channel * taps * job.per_tap);
    const u64 to = at(job.x, (u64)s.row * pixels + s.from);
    u32 y = (s.from + lane()) / job.width, x = s.from + lane() - y * job.width;
    const u32 down = WARP / job.width, right = WARP - down * job.width;
    for (u32 i = lane(); i < s.count; i += WARP) {
      // Taps one stride apart belong to neighbouring outputs, the later tap to the earlier one.
      float sum = 0;
      const u32 py = y + job.padding, px = x + job.padding;
      u32 oy = py / job.stride;
      for (u32 ky = py - oy * job.stride; ky < job.kernel_height; ky += job.stride, oy--) {
        if (oy >= job.out_height) continue;
        u32 ox = px / job.stride;
        for (u32 kx = px - ox * job.stride; kx < job.kernel_width; kx += job.stride, ox--) {
          if (ox >= job.out_width) continue;
          sum += load_one<T>(from, (ky * job.kernel_width + kx) * job.per_tap + oy * job.out_width + ox);
        }
      }
      store_one<T>(to, i, sum);
      x += right, y += down;
      if (x >= job.width) x -= job.width, y++;
    }
  }
}

/// Batch normalisation of images `[image][channel][pixel]`; parameters, statistics and their
/// gradients are f32.
struct NormJob {
  u64 x, y, dy, dx, gamma, beta, mean, var;
  /// Gradients of the parameters, or 0. `along`: for each channel, the gradient through the
  /// statistics.
  u64 dgamma, dbeta, along;
  /// A bit for each element of a ReLU's result that is not 0 or below, a byte for each pack of
  /// channels-last images; or 0.
  u64 bits;
  /// Two numbers for each part of a channel.
  double* part;
  /// Number of finished blocks; 0 before and after a launch.
  u32* arrived;
  /// Running statistics that `fold_parts_last` updates as `track` does, or 0.
  u64 running_mean, running_var;
  u32 images, channels, pixels, parts;
  float eps;
  u32 relu;
  float momentum, factor;
};

/// Calls `visit(i, many)` for the elements of this block's part of a channel, over all images.
template <class Visit>
DEVICE void visit_part(const NormJob& job, u64 addresses, Visit visit) {
  const u32 channel = blockIdx.x / job.parts, part = blockIdx.x - channel * job.parts;
  const u32 all = job.images * chunks(job.pixels);
  const u32 from = (u32)((u64)all * part / job.parts), to = (u32)((u64)all * (part + 1) / job.parts);
  for (u32 task = from + threadIdx.x / WARP; task < to; task += THREADS / WARP) {
    const Chunk s = chunk_of(task, job.pixels);
    const u64 base = (u64)(s.row * job.channels + channel) * job.pixels + s.from;
    sweep(addresses | base * sizeof(T::Bits), s.count, lane(), WARP,
          [&](u64 i, u32 many) { visit(base + i, many); });
  }
}

/// Mean and biased variance of each channel: `channels * parts` blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2) moments(const NormJob job) {
  float sum = 0, squares = 0, count = 0;
  visit_part(job, job.x, [&](u64 i, u32 many) {
    float x[WIDE];
    load(x, job.x, i, many);
#pragma unroll
    for (u32 j = 0; j < many; j++) sum += x[j];
    count += many;
  });
  const double values = sum_of_block(count), total = sum_of_block(sum);
  // A second pass: the difference of the mean square and the squared mean would cancel.
  const float mean = values ? (float)(total / values) : 0;
  visit_part(job, job.x, [&](u64 i, u32 many) {
    float x[WIDE];
    load(x, job.x, i, many);
#pragma unroll
    for (u32 j = 0; j < many; j++) squares += (x[j] - mean) * (x[j] - mean);
  });
  const double around = sum_of_block(squares);
  if (threadIdx.x == 0) {
    double* part = job.part + 3 * (u64)blockIdx.x;
    part[0] = values, part[1] = mean, part[2] = around;
  }
  if (!is_last_block(job.arrived)) return;
  for (u32 c = threadIdx.x; c < job.channels; c += THREADS) {
    const double* part = job.part + 3 * (u64)c * job.parts;
    double n = 0, middle = 0, spread = 0;
#pragma unroll 1
    for (u32 p = 0; p < job.parts; p++) n += part[3 * p], middle += part[3 * p] * part[3 * p + 1];
    middle /= n;
#pragma unroll 1
    for (u32 p = 0; p < job.parts; p++) {
      const double off = part[3 * p + 1] - middle;
      spread += part[3 * p + 2] + part[3 * p] * off * off;
    }
    store_one<F32>(job.mean, c, (float)middle);
    store_one<F32>(job.var, c, (float)(spread / n));
  }
}

DEVICE float inverse_deviation(const NormJob& job, u32 c) {
  return 1 / sqrtf(load_one<F32>(job.var, c) + job.eps);
}

/// `(x - mean) * gamma / deviation + beta`, and ReLU.
extern "C" __global__ void __launch_bounds__(THREADS, 2) normalize(const NormJob job) {
  const u32 all = job.images * job.channels * chunks(job.pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, job.pixels);
    const u32 c = s.row % job.channels;
    const u64 base = (u64)s.row * job.pixels + s.from, x = at(job.x, base), y = at(job.y, base);
    const float scale = load_one<F32>(job.gamma, c) / sqrtf(load_one<F32>(job.var, c) + job.eps);
    const float shift = load_one<F32>(job.beta, c) - load_one<F32>(job.mean, c) * scale;
    sweep(x | y, s.count, lane(), WARP, [&](u64 i, u32 many) {
      float v[WIDE];
      load(v, x, i, many);
#pragma unroll
      for (u32 j = 0; j < many; j++) {
        v[j] = v[j] * scale + shift;
        if (job.relu) v[j] = relu_of(v[j]);
      }
      store(y, i, many, v);
    });
  }
}

/// The gradient before the ReLU, if there is one.
DEVICE void load_gradient(float (&dy)[WIDE], const NormJob& job, u64 i, u32 many, bool relu) {
  load(dy, job.dy, i, many);
  if (!relu) return;
  float y[WIDE];
  load(y, job.y, i, many);
#pragma unroll
  for (u32 j = 0; j < many; j++) dy[j] = y[j] <= 0 ? 0 : dy[j];
}

/// Gradients of the parameters, and the means of `dy` and of `dy * (x - mean)`: `channels * parts`
/// blocks. Without an `x`, that of a bias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) norm_sums(const NormJob job) {
  const u32 channel = blockIdx.x / job.parts;
  const float mean = job.x ? load_one<F32>(job.mean, channel) : 0;
  float sum = 0, dot = 0;
  visit_part(job, job.x | job.dy | job.y, [&](u64 i, u32 many) {
    float x[WIDE] = {}, dy[WIDE];
    load_gradient(dy, job, i, many, job.relu);
    if (job.x) load(x, job.x, i, many);
#pragma unroll
    for (u32 j = 0; j < many; j++) sum += dy[j], dot += dy[j] * (x[j] - mean);
  });
  const double total = sum_of_block(sum), along = sum_of_block(dot);
  if (threadIdx.x == 0) job.part[2 * (u64)blockIdx.x] = total, job.part[2 * (u64)blockIdx.x + 1] = along;
  if (!is_last_block(job.arrived)) return;
  const double count = (double)job.images * job.pixels;
  for (u32 c = threadIdx.x; c < job.channels; c += THREADS) {
    const double* part = job.part + 2 * (u64)c * job.parts;
    double all = 0, across = 0;
#pragma unroll 1
    for (u32 p = 0; p < job.parts; p++) all += part[2 * p], across += part[2 * p + 1];
    store_one<F32>(job.dbeta, c, (float)all);
    if (!job.x) continue;
    store_one<F32>(job.dgamma, c, (float)(across * inverse_deviation(job, c)));
    store_one<F32>(job.along, 2 * c, (float)(all / count));
    store_one<F32>(job.along, 2 * c + 1, (float)(across / count));
  }
}

/// The gradient of the input; without `along`, with constant statistics.
extern "C" __global__ void __launch_bounds__(THREADS, 2) norm_backward(const NormJob job) {
  const u32 all = job.images * job.channels * chunks(job.pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, job.pixels);
    const u32 c = s.row % job.channels;
    const u64 base = (u64)s.row * job.pixels + s.from;
    const float mean = load_one<F32>(job.mean, c), inverse = inverse_deviation(job, c);
    const float a = load_one<F32>(job.gamma, c) * inverse;
    const float shift = job.along ? -a * load_one<F32>(job.along, 2 * c) : 0;
    const float b = job.along ? -a * inverse * inverse * load_one<F32>(job.along, 2 * c + 1) : 0;
    const u64 addresses = job.x | job.dy | job.dx | job.y | base * sizeof(T::Bits);
    sweep(addresses, s.count, lane(), WARP, [&](u64 i, u32 many) {
      float x[WIDE], dy[WIDE];
      load(x, job.x, base + i, many);
      load_gradient(dy, job, base + i, many, job.relu);
#pragma unroll
      for (u32 j = 0; j < many; j++) x[j] = dy[j] * a + (x[j] - mean) * b + shift;
      store(job.dx, base + i, many, x);
    });
  }
}

// Pooling.

struct PoolJob {
  u64 x, y, taken;
  u32 planes, height, width, out_height, out_width, kernel, stride, padding, channels, unused;
};

/// The largest of each window, and its index in the plane: the first of several, or the last NaN.
extern "C" __global__ void __launch_bounds__(THREADS, 2) max_pool(const PoolJob job) {
  const u32 pixels = job.out_height * job.out_width, all = job.planes * chunks(pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, pixels);
    const u64 from = at(job.x, (u64)s.row * job.height * job.width), to = (u64)s.row * pixels + s.from;
    for (u32 i = lane(); i < s.count; i += WARP) {
      const u32 oy = (s.from + i) / job.out_width, ox = s.from + i - oy * job.out_width;
      const u32 y0 = oy * job.stride - job.padding, x0 = ox * job.stride - job.padding;
      float best = 0;
      u32 taken = ALL;
      for (u32 y = y0; y != y0 + job.kernel; y++) {
        for (u32 x = x0; x != x0 + job.kernel; x++) {
          if (y >= job.height || x >= job.width) continue;
          const float v = load_one<T>(from, y * job.width + x);
          if (taken == ALL || v > best || v != v) best = v, taken = y * job.width + x;
        }
      }
      store_one<T>(job.y, to + i, best);
      store4(job.taken + (to + i) * 4, taken);
    }
  }
}

/// `x` is the gradient of the input, `y` that of the result: each pixel gathers from the windows
/// that it is in.
extern "C" __global__ void __launch_bounds__(THREADS, 2) max_pool_backward(const PoolJob job) {
  const u32 pixels = job.height * job.width, all = job.planes * chunks(pixels);
  for (u32 task = warp_index(); task < all; task += warp_count()) {
    const Chunk s = chunk_of(task, pixels);
    const u64 plane = (u64)s.row * job.out_height * job.out_width;
    for (u32 i = lane(); i < s.count; i += WARP) {
      const u32 own = s.from + i, y = own / job.width + job.padding;
      const u32 x = own - own / job.width * job.width + job.padding;
      const u32 above = y < job.kernel ? 0 : (y - job.kernel) / job.stride + 1;
      const u32 before = x < job.kernel ? 0 : (x - job.kernel) / job.stride + 1;
      float sum = 0;
      for (u32 oy = above; oy < job.out_height && oy * job.stride <= y; oy++) {
        for (u32 ox = before; ox < job.out_width && ox * job.stride <= x; ox++) {
          const u64 window = plane + oy * job.out_width + ox;
          if (load4(job.taken + window * 4) == own) sum += load_one<T>(job.y, window);
        }
      }
      store_one<T>(job.x, (u64)s.row * pixels + own, sum);
    }
  }
}

struct MeanJob { u64 x, y; u32 planes, pixels, channels, unused; };

/// One warp per plane.
extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_pool(const MeanJob job) {
  for (u32 plane = warp_index(); plane < job.planes; plane += warp_count()) {
    const u64 from = at(job.x, (u64)plane * job.pixels);
    float sum = 0;
    sweep(from, job.pixels, lane(), WARP, [&](u64 i, u32 many) {
      float x[WIDE];
      load(x, from, i, many);
#pragma unroll
      for (u32 j = 0; j < many; j++) sum += x[j];
    });
    const double total = fold_threads(sum, 1, WARP);
    if (lane() == 0) store_one<T>(job.y, plane, (float)(total / job.pixels));
  }
}
/// `x` is the gradient of the input, `y` that of the result.
extern "C" __global__ void __launch_bounds__(THREADS, 2) mean_pool_backward(const MeanJob job) {
  for (u32 plane = warp_index(); plane < job.planes; plane += warp_count()) {
    const u64 to = at(job.x, (u64)plane * job.pixels);
    const float share = load_one<T>(job.y, plane) / job.pixels;
    sweep(to, job.pixels, lane(), WARP, [&](u64 i, u32 many) {
      float x[WIDE];
#pragma unroll
      for (int j = 0; j < WIDE; j++) x[j] = share;
      store(to, i, many, x);
    });
  }
}
