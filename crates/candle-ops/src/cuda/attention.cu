// Attention without scores in memory, of halves and heads of at most 64, forward and backward:
// FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691), with the gradients of queries and of
// keys in a kernel each, so that every sum has one order. Compiled after `rows.cu`. It needs tensor
// cores (`ptx.h`); programs without halves have no code for it.
//
// A warp has 16 rows of a block's 128, whose operand stays in registers, and goes through the other
// operands by tiles of 64 rows, which the block reads ahead and keeps twice. Columns past the
// head's depth are zeros.

template <class A, class B> struct Same { static constexpr bool YES = false; };
template <class A> struct Same<A, A> { static constexpr bool YES = true; };
constexpr bool IS_BF16 = Same<T, Bf16>::YES;

/// Blocks of a multiprocessor backward: from compute capability 10.0 on, registers for two would
/// spill.
#if __CUDA_ARCH__ >= 1000
constexpr u32 RESIDENT = 1;
#else
constexpr u32 RESIDENT = 2;
#endif

/// Minus infinity.
#define LEAST (-__uint_as_float(INFINITY_BITS))

constexpr u32 SIDE = 64, BAND = 16, BANDS = THREADS / WARP * BAND;
/// 8 halves. A row has a part more than it needs, so that eight rows lie in different banks.
struct alignas(16) HalfPack { u32 w[4]; };
typedef HalfPack SharedTile[SIDE][SIDE / 8 + 1];

/// Where the rows of an operand are: of head `h` of sample `n` from `h * head + n * step` on,
/// `line` elements apart.
struct Operand { u64 at; u32 head, step, line, depth; };

/// `y = softmax(scale * q * k^T) * v`. Query `i` sees its first `i % seen + 1` keys, or all if
/// `seen` is 0. `lse` is the binary logarithm of each row's sum of exponentials, `delta` the
/// product of `y` and `dy`, both of f32.
///
/// `hidden` and `dropped` have a bit for each key of a row, 16 to a number, `line` numbers a row; 0
/// if there are none. A weight that is not dropped is multiplied by `keep`. Rows of `hidden` are by
/// sample, head and query, with these strides. A pair's rows are those of `group` heads, and a
/// sample has `pairs` of them.
struct AttentionJob {
  Operand q, k, v, y, dy, dq, dk, dv;
  u64 lse, delta, hidden, dropped;
  u32 heads, samples, queries, keys, seen;
  float scale;
  u32 hidden_sample, hidden_head, hidden_query, line, group, pairs;
  float keep;
  u32 unused;
};

DEVICE u64 rows_of(const AttentionJob& job, const Operand& operand, u32 pair) {
  return at(operand.at, (u64)(pair % job.heads) * operand.head + (u64)(pair / job.heads) * operand.step);
}
/// Number of keys that query `row` sees, and the most that any of some rows sees.
DEVICE u32 limit_of(const AttentionJob& job, u32 row) {
  if (row >= job.queries) return 0;
  const u32 seen = job.seen ? row % job.seen + 1 : job.keys;
  return seen < job.keys ? seen : job.keys;
}
DEVICE u32 reach_of(const AttentionJob& job, u32 first, u32 count) {
  if (first >= job.queries) return 0;
  const u32 last = (first + count < job.queries ? first + count : job.queries) - 1;
  const bool wraps = job.seen && first / job.seen != last / job.seen;
  return limit_of(job, wraps ? first / job.seen * job.seen + job.seen - 1 : last);
}

/// Where the bits of a row are, hidden and dropped; 0 if there are none.
struct RowBits { u64 hidden, dropped; };
DEVICE RowBits bits_of(const AttentionJob& job, u32 pair, u32 row) {
  if (row >= job.queries) return {0, 0};
  const u32 queries = job.queries / job.group;
  const u64 head = pair % job.pairs * job.group + row / queries, sample = pair / job.pairs;
  const u64 at = sample * job.hidden_sample + head * job.hidden_head + (u64)(row % queries) * job.hidden_query;
  const u64 own = ((u64)pair * job.queries + row) * job.line;
  return {job.hidden ? job.hidden + 2 * at : 0, job.dropped ? job.dropped + 2 * own : 0};
}
/// The bits of 64 keys of a row.
struct TileBits {
  u32 hidden[2] = {}, dropped[2] = {};

  DEVICE void load(const RowBits& row, u32 first) {
    if (row.hidden) load8<true>(hidden, row.hidden + first / 8);
    if (row.dropped) load8<true>(dropped, row.dropped + first / 8);
  }
  DEVICE bool hides(u32 key) const { return hidden[key / 32] >> key % 32 & 1; }
  DEVICE bool drops(u32 key) const { return dropped[key / 32] >> key % 32 & 1; }
};

/// Begins to copy 64 rows of an operand.
DEVICE void read_ahead(SharedTile& tile, u64 base, const Operand& operand, u32 first, u32 rows) {
#pragma unroll
  for (u32 i = threadIdx.x; i < SIDE * (SIDE / 8); i += THREADS) {
    const u32 row = first + i / 8, column = i % 8 * 8;
    const bool are_there = row < rows && column < operand.depth;
    const u32 there = row < rows ? row : 0, from = column < operand.depth ? column : 0;
    copy_ahead(&tile[i / 8][i % 8], at(base, (u64)there * operand.line + from), are_there);
  }
}

DEVICE u32 band() { return threadIdx.x / WARP * BAND; }
/// The thread's columns in a product of 8 columns are this one and the next.
DEVICE u32 own_column() { return lane() % 4 * 2; }

/// Matrix A of a warp's products: 16 rows of an operand, 16 columns at a time.
struct FragmentA {
  u32 of[SIDE / 16][4];

  DEVICE void load(SharedTile& tile, u32 first) {
#pragma unroll
    for (u32 j = 0; j < SIDE / 16; j++)
      load_tiles(of[j], &tile[first + lane() % 16][2 * j + lane() / 16]);
  }
};
/// 16 rows of sums by `N` times 8 columns.
template <u32 N>
struct Sums {
  float of[N][4];

  /// The product with the rows `first..` of a tile, one for each column, of which the last are left
  /// out unless the tile is whole.
  template <bool WHOLE>
  DEVICE void multiply(const FragmentA& left, SharedTile& tile, u32 first, u32 columns) {
#pragma unroll
    for (u32 n = 0; n < N; n++) {
#pragma unroll
      for (u32 e = 0; e < 4; e++) of[n][e] = 0;
      if (!WHOLE && n * 8 >= columns) continue;
#pragma unroll
      for (u32 j = 0; j < SIDE / 16; j += 2) {
        u32 w[4];
        load_tiles(w, &tile[first + n * 8 + lane() % 8][2 * j + lane() / 8]);
        multiply_tiles<IS_BF16>(of[n], left.of[j], w[0], w[1]);
        multiply_tiles<IS_BF16>(of[n], left.of[j + 1], w[2], w[3]);
      }
    }
  }
  /// Adds the product of `left`, as halves, with the rows `first..` of a tile, of which the last
  /// are left out unless it is whole.
  template <bool WHOLE, u32 M>
  DEVICE void add(const Sums<M>& left, SharedTile& tile, u32 first, u32 rows) {
#pragma unroll
    for (u32 m = 0; m < M; m += 2) {
      if (!WHOLE && m * 8 >= rows) continue;
      add_one(left, m, tile, first + m * 8);
    }
  }
  /// Adds the product of 16 columns of `left`, from 8 times `m` on, with 16 rows.
  template <u32 M>
  DEVICE void add_one(const Sums<M>& left, u32 m, SharedTile& tile, u32 first) {
    const auto two = [&](u32 n, u32 e) { return narrow_two<IS_BF16>(left.of[n][e], left.of[n][e + 1]); };
    const u32 a[4] = {two(m, 0), two(m, 2), two(m + 1, 0), two(m + 1, 2)};
#pragma unroll
    for (u32 n = 0; n < N; n += 2) {
      u32 w[4];
      load_tiles_transposed(w, &tile[first + lane() % 16][n + lane() / 16]);
      multiply_tiles<IS_BF16>(of[n], a, w[0], w[1]);
      multiply_tiles<IS_BF16>(of[n + 1], a, w[2], w[3]);
    }
  }
  /// Writes the rows `first..`, times a factor for each half of the warp's rows.
  DEVICE void store(u64 base, const Operand& operand, u32 first, u32 rows, const float (&by)[2]) const {
#pragma unroll
    for (u32 n = 0; n < N; n++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 row = first + lane() / 4 + 8 * h, column = n * 8 + own_column();
        if (row >= rows || column >= operand.depth) continue;
        const u32 w = narrow_two<IS_BF16>(of[n][2 * h] * by[h], of[n][2 * h + 1] * by[h]);
        store4<true>(at(base, (u64)row * operand.line + column), w);
      }
  }
};

/// Reads 128 rows through two tiles.
DEVICE void load_band(FragmentA& left, SharedTile (&tiles)[2], u64 base, const Operand& operand, u32 first, u32 rows) {
  __syncthreads(); // The tiles' previous rows were read.
  for (u32 i = 0; i < 2; i++) read_ahead(tiles[i], base, operand, first + i * SIDE, rows);
  wait_for_copies();
  __syncthreads();
  left.load(tiles[band() / SIDE], band() % SIDE);
}

/// The sum of the four threads that hold a row.
DEVICE float sum_of_four(float x) { return x += exchange(x, 1), x + exchange(x, 2); }
DEVICE float largest_of_four(float x) { return x = fmaxf(x, exchange(x, 1)), fmaxf(x, exchange(x, 2)); }

/// A block's 128 queries, the later ones first: under a causal mask they take longest. In shared
/// memory, since the loops over keys need all registers.
struct Queries {
  u64 k, v;
  u32 pair, block;
  /// The most keys that a row of the block sees.
  u32 end;
  /// The number of keys that each row sees, and the most and the fewest of a warp's.
  u32 limits[BANDS], most_of[THREADS / WARP], fewest_of[THREADS / WARP];

  DEVICE void fill(const AttentionJob& job) {
    const u32 blocks = (job.queries + BANDS - 1) / BANDS;
    const u32 from = (blocks - 1 - blockIdx.x % blocks) * BANDS, warps = from + band();
    if (threadIdx.x == 0) {
      pair = blockIdx.x / blocks, block = from, end = reach_of(job, from, BANDS);
      k = rows_of(job, job.k, pair), v = rows_of(job, job.v, pair);
    }
    if (threadIdx.x < BANDS) limits[threadIdx.x] = limit_of(job, from + threadIdx.x);
    if (lane() == 0) {
      most_of[threadIdx.x / WARP] = reach_of(job, warps, BAND);
      const u32 causal = job.seen && warps % job.seen + BAND <= job.seen ? limit_of(job, warps) : 0;
      fewest_of[threadIdx.x / WARP] = job.seen ? causal : job.keys;
    }
    __syncthreads();
  }
  /// The warp's first row, and the thread's two rows.
  DEVICE u32 first() const { return block + band(); }
  DEVICE u32 row(u32 h) const { return first() + lane() / 4 + 8 * h; }
  DEVICE u32 limit(u32 h) const { return limits[band() + lane() / 4 + 8 * h]; }
  DEVICE u32 most() const { return most_of[threadIdx.x / WARP]; }
  DEVICE u32 fewest() const { return fewest_of[threadIdx.x / WARP]; }
};

/// The forward pass of a warp's 16 queries.
template <bool MASKED>
struct Forward {
  const Queries& own;
  RowBits rows[2] = {};
  FragmentA q;
  float factor, largest[2], sum[2] = {};
  Sums<8> y = {};

  DEVICE Forward(const AttentionJob& job, const Queries& of) : own(of) {
    factor = job.scale * LOG2_E, largest[0] = largest[1] = LEAST;
    if constexpr (MASKED)
      for (u32 h = 0; h < 2; h++) rows[h] = bits_of(job, own.pair, own.row(h));
  }
  /// Takes a tile of keys and values. It is whole if each row of the warp sees all its keys, but
  /// for hidden ones: then nothing is left out, so there is no branch between products.
  template <bool WHOLE>
  DEVICE void take(u32 first, SharedTile (&tile)[2]) {
    const u32 columns = own.most() - first, limit[2] = {own.limit(0), own.limit(1)};
    TileBits bits[2];
    if constexpr (MASKED) {
      for (u32 h = 0; h < 2; h++) bits[h].load(rows[h], first);
      const u32 all = bits[0].hidden[0] & bits[0].hidden[1] & bits[1].hidden[0] & bits[1].hidden[1];
      if (__ballot_sync(ALL, all != ALL) == 0) return;
    }
    Sums<8> p;
    p.template multiply<WHOLE>(q, tile[0], 0, columns);
    float base[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      float tile_largest = LEAST;
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        float& x = p.of[i / 2][2 * h + i % 2];
        const u32 key = i / 2 * 8 + own_column() + i % 2;
        const bool sees = (WHOLE || first + key < limit[h]) && !(MASKED && bits[h].hides(key));
        x = sees ? x * factor : LEAST;
        tile_largest = fmaxf(tile_largest, x);
      }
      const float now = fmaxf(largest[h], largest_of_four(tile_largest));
      base[h] = now == LEAST ? 0 : now;
      const float kept = exp2_of(largest[h] - base[h]);
      largest[h] = now, sum[h] *= kept;
#pragma unroll
      for (u32 i = 0; i < 16; i++) y.of[i / 2][2 * h + i % 2] *= kept;
    }
#pragma unroll
    for (u32 m = 0; m < 8; m += 2) {
      if (!WHOLE && m * 8 >= columns) continue;
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u32 h = i / 2 % 2;
        float& x = p.of[m + i / 4][i % 4];
        x = exp2_of(x - base[h]), sum[h] += x;
        if (MASKED && bits[h].drops((m + i / 4) * 8 + own_column() + i % 2)) x = 0;
      }
      y.add_one(p, m, tile[1], m * 8);
    }
  }
};

template <bool MASKED>
DEVICE void attend(const AttentionJob& job) {
  __shared__ SharedTile tiles[2][2];
  __shared__ Queries own;
  own.fill(job);
  Forward<MASKED> all(job, own);
  const auto read_keys = [&](u32 first, SharedTile (&to)[2]) {
    read_ahead(to[0], own.k, job.k, first, job.keys), read_ahead(to[1], own.v, job.v, first, job.keys);
  };
  read_keys(0, tiles[0]);
  load_band(all.q, tiles[1], rows_of(job, job.q, own.pair), job.q, own.block, job.queries);
#pragma unroll 1
  for (u32 first = 0; first < own.end; first += SIDE) {
    const u32 turn = first / SIDE % 2;
    wait_for_copies();
    __syncthreads();
    if (first + SIDE < own.end) read_keys(first + SIDE, tiles[turn ^ 1]);
    if (first >= own.most()) continue;
    if (first + SIDE <= own.fewest()) all.template take<true>(first, tiles[turn]);
    else all.template take<false>(first, tiles[turn]);
  }
  float by[2];
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const float sum = sum_of_four(all.sum[h]);
    // All keys are hidden: the result is 0.
    const bool has_none = MASKED && sum == 0;
    if (lane() % 4 == 0 && own.row(h) < job.queries)
      store_one<F32>(job.lse, (u64)own.pair * job.queries + own.row(h), has_none ? 0 : all.largest[h] + log2f(sum));
    by[h] = has_none ? 0 : (MASKED ? job.keep : 1) / sum;
  }
  all.y.store(rows_of(job, job.y, own.pair), job.y, own.first(), job.queries, by);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention(const AttentionJob job) {
  if constexpr (IS_HALF) attend<false>(job);
}
/// With bits: the registers of two blocks would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_masked(const AttentionJob job) {
  if constexpr (IS_HALF) attend<true>(job);
}

template <bool MASKED>
DEVICE void attend_backward(const AttentionJob& job) {
  __shared__ SharedTile tiles[2][2];
  __shared__ Queries own;
  own.fill(job);
  RowBits rows[2] = {};
  if constexpr (MASKED)
    for (u32 h = 0; h < 2; h++) rows[h] = bits_of(job, own.pair, own.row(h));
  const auto read_keys = [&](u32 first, SharedTile (&to)[2]) {
    read_ahead(to[0], own.k, job.k, first, job.keys), read_ahead(to[1], own.v, job.v, first, job.keys);
  };
  read_keys(0, tiles[0]);
  FragmentA q, dy;
  float delta[2] = {}, lse[2] = {};
  {
    FragmentA y;
    load_band(y, tiles[1], rows_of(job, job.y, own.pair), job.y, own.block, job.queries);
    load_band(dy, tiles[1], rows_of(job, job.dy, own.pair), job.dy, own.block, job.queries);
#pragma unroll
    for (u32 i = 0; i < 4 * SIDE / 16; i++)
#pragma unroll
      for (u32 shift = 0; shift < 32; shift += 16) {
        const auto of = [&](const FragmentA& left) { return T::widen((T::Bits)(left.of[i / 4][i % 4] >> shift)); };
        delta[i % 2] += of(y) * of(dy);
      }
  }
  load_band(q, tiles[1], rows_of(job, job.q, own.pair), job.q, own.block, job.queries);
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    delta[h] = sum_of_four(delta[h]);
    if (own.row(h) >= job.queries) continue;
    const u64 i = (u64)own.pair * job.queries + own.row(h);
    lse[h] = load_one<F32>(job.lse, i);
    if (lane() % 4 == 0) store_one<F32>(job.delta, i, delta[h]);
  }
  const float factor = job.scale * LOG2_E;
  Sums<8> dq = {};
#pragma unroll 1
  for (u32 first = 0; first < own.end; first += SIDE) {
    const u32 turn = first / SIDE % 2;
    wait_for_copies();
    __syncthreads();
    if (first + SIDE < own.end) read_keys(first + SIDE, tiles[turn ^ 1]);
    const u32 limit[2] = {own.limit(0), own.limit(1)};
    TileBits bits[2];
    if constexpr (MASKED) {
      for (u32 h = 0; h < 2; h++) bits[h].load(rows[h], first);
      const u32 all = bits[0].hidden[0] & bits[0].hidden[1] & bits[1].hidden[0] & bits[1].hidden[1];
      if (__ballot_sync(ALL, all != ALL) == 0) continue;
    }
#pragma unroll
    for (u32 half = 0; half < SIDE; half += SIDE / 2) {
      const u32 from = first + half;
      if (from >= own.most()) continue;
      Sums<4> p, dp;
      p.multiply<false>(q, tiles[turn][0], half, own.most() - from);
      dp.multiply<false>(dy, tiles[turn][1], half, own.most() - from);
      const bool whole = from + SIDE / 2 <= own.fewest();
#pragma unroll
      for (u32 i = 0; i < 16; i++) {
        const u32 h = i / 2 % 2, key = half + i / 4 * 8 + own_column() + i % 2;
        const float share = exp2_of(fmaf(p.of[i / 4][i % 4], factor, -lse[h]));
        const bool sees = (whole || first + key < limit[h]) && !(MASKED && bits[h].hides(key));
        float& x = dp.of[i / 4][i % 4];
        if (MASKED) x = bits[h].drops(key) ? 0 : x * job.keep;
        x = sees ? share * (x - delta[h]) : 0;
      }
      dq.add<false>(dp, tiles[turn][0], half, own.most() - from);
    }
  }
  const float by[2] = {job.scale, job.scale};
  dq.store(rows_of(job, job.dq, own.pair), job.dq, own.first(), job.queries, by);
}
/// The gradient of the queries, and `delta`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_backward(const AttentionJob job) {
  if constexpr (IS_HALF) attend_backward<false>(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_masked(const AttentionJob job) {
  if constexpr (IS_HALF) attend_backward<true>(job);
}

/// 64 queries, tile by tile. Divisions are outside of the loop over tiles: `place` is the first
/// row's place among the `seen` rows after which the causal mask begins again, `own` that of the
/// thread's row. Without such a mask both are the number of keys.
struct QueryTile {
  u32 first, place, own, step;

  DEVICE QueryTile(const AttentionJob& job) {
    const u32 row = threadIdx.x % SIDE;
    first = 0, step = job.seen ? SIDE % job.seen : 0;
    place = job.seen ? 0 : job.keys, own = job.seen ? row % job.seen : job.keys;
  }
  DEVICE void advance(const AttentionJob& job) {
    const auto moved = [&](u32 x) { return x += step, job.seen && x >= job.seen ? x - job.seen : x; };
    first += SIDE, place = moved(place), own = moved(own);
  }
  /// Number of keys that the thread's row sees, and the most that any row sees.
  DEVICE u32 limit(const AttentionJob& job) const {
    if (first + threadIdx.x % SIDE >= job.queries) return 0;
    return own < job.keys ? own + 1 : job.keys;
  }
  DEVICE u32 reach(const AttentionJob& job) const {
    const u32 rows = job.queries - first < SIDE ? job.queries - first : SIDE;
    const u32 most = job.seen && place + rows > job.seen ? job.seen : place + rows;
    return most < job.keys ? most : job.keys;
  }
};

template <bool MASKED>
DEVICE void attend_backward_keys(const AttentionJob& job) {
  __shared__ SharedTile tiles[2][2];
  __shared__ float lse[2][SIDE], delta[2][SIDE];
  __shared__ u32 limit[2][SIDE];
  __shared__ RowBits bits[2][MASKED ? SIDE : 1];
  const u32 blocks = (job.keys + BANDS - 1) / BANDS, pair = blockIdx.x / blocks;
  const u32 block = blockIdx.x % blocks * BANDS, own = block + band();
  const u64 q = rows_of(job, job.q, pair), dy = rows_of(job, job.dy, pair);
  FragmentA k, v;
  load_band(k, tiles[1], rows_of(job, job.k, pair), job.k, block, job.keys);
  load_band(v, tiles[1], rows_of(job, job.v, pair), job.v, block, job.keys);
  // Skips tiles of which no row sees a key of the block.
  const auto skip_unseen = [&](QueryTile& tile) {
    while (tile.first < job.queries && tile.reach(job) <= block) tile.advance(job);
  };
  float next_lse = 0, next_delta = 0;
  const auto read_queries = [&](u32 first, SharedTile (&to)[2]) {
    read_ahead(to[0], q, job.q, first, job.queries), read_ahead(to[1], dy, job.dy, first, job.queries);
    const u32 row = first + threadIdx.x % SIDE;
    const u64 i = (u64)pair * job.queries + row;
    next_lse = row < job.queries ? load_one<F32>(job.lse, i) : 0;
    next_delta = row < job.queries ? load_one<F32>(job.delta, i) : 0;
  };
  const float factor = job.scale * LOG2_E;
  Sums<8> dk = {}, dv = {};
  QueryTile next(job);
  skip_unseen(next);
  if (next.first < job.queries) read_queries(next.first, tiles[0]);
#pragma unroll 1
  for (u32 turn = 0; next.first < job.queries; turn ^= 1) {
    const u32 first = next.first, reach = next.reach(job);
    if (threadIdx.x < SIDE) {
      lse[turn][threadIdx.x] = next_lse, delta[turn][threadIdx.x] = next_delta;
      limit[turn][threadIdx.x] = next.limit(job);
      if constexpr (MASKED) bits[turn][threadIdx.x] = bits_of(job, pair, first + threadIdx.x);
    }
    wait_for_copies();
    __syncthreads();
    next.advance(job), skip_unseen(next);
    if (next.first < job.queries) read_queries(next.first, tiles[turn ^ 1]);
    if (own >= job.keys || reach <= own) continue;
#pragma unroll
    for (u32 part = 0; part < SIDE; part += BAND) {
      if (first + part >= job.queries) continue;
      const u32 rows = job.queries - first - part;
      // The bits of the warp's 16 keys, of the thread's four queries.
      u32 hidden[4] = {}, dropped[4] = {};
      if constexpr (MASKED) {
        bool is_hidden = true;
        for (u32 i = 0; i < 4; i++) {
          const RowBits row = bits[turn][part + i / 2 * 8 + own_column() + i % 2];
          if (row.hidden) hidden[i] = load2<true>(row.hidden + own / 8);
          if (row.dropped) dropped[i] = load2<true>(row.dropped + own / 8);
          is_hidden = is_hidden && hidden[i] == 0xffff;
        }
        if (__ballot_sync(ALL, !is_hidden) == 0) continue;
      }
      Sums<2> p, dp;
      p.multiply<false>(k, tiles[turn][0], part, rows);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u32 row = part + i / 4 * 8 + own_column() + i % 2, key = lane() / 4 + i / 2 % 2 * 8;
        const float share = exp2_of(fmaf(p.of[i / 4][i % 4], factor, -lse[turn][row]));
        const bool sees = own + key < limit[turn][row] && !(hidden[i / 4 * 2 + i % 2] >> key & 1);
        p.of[i / 4][i % 4] = sees ? share : 0;
      }
      Sums<2> kept = p;
      if constexpr (MASKED)
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
          const u32 key = lane() / 4 + i / 2 % 2 * 8;
          kept.of[i / 4][i % 4] *= dropped[i / 4 * 2 + i % 2] >> key & 1 ? 0 : job.keep;
        }
      dv.add<false>(kept, tiles[turn][1], part, rows);
      dp.multiply<false>(v, tiles[turn][1], part, rows);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u32 row = part + i / 4 * 8 + own_column() + i % 2, key = lane() / 4 + i / 2 % 2 * 8;
        float& x = dp.of[i / 4][i % 4];
        if (MASKED) x = dropped[i / 4 * 2 + i % 2] >> key & 1 ? 0 : x * job.keep;
        const float dshare = p.of[i / 4][i % 4] * (x - delta[turn][row]);
        x = own + key < limit[turn][row] ? dshare : 0;
      }
      dk.add<false>(dp, tiles[turn][0], part, rows);
    }
  }
  const float by[2] = {job.scale, job.scale}, once[2] = {1, 1};
  dk.store(rows_of(job, job.dk, pair), job.dk, own, job.keys, by);
  dv.store(rows_of(job, job.dv, pair), job.dv, own, job.keys, once);
}
/// The gradients of keys and values, by blocks of 128 of them; after `attention_backward`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attention_backward_keys(const AttentionJob job) {
  if constexpr (IS_HALF) attend_backward_keys<false>(job);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_keys_masked(const AttentionJob job) {
  if constexpr (IS_HALF) attend_backward_keys<true>(job);
}
