// Random words of the host's stream (`state/random.rs`), drawn where they are used: of ChaCha8 with
// 64 bits for a block's number, as `rand_chacha` has it. Compiled after `ops.cu`.

/// Where the words of some elements are: element `i` has word `position + i` of the stream with
/// this key, and as many more as the number at `base` says, if it is not 0. Words below `end` drop
/// an element; the others multiply it by `keep`.
struct Draws { u64 key0, key1, key2, key3, base, position; u32 end; float keep; };

DEVICE u32 turned(u32 x, u32 by) { return x << by | x >> (32 - by); }
DEVICE void quarter(u32& a, u32& b, u32& c, u32& d) {
  a += b, d = turned(d ^ a, 16), c += d, b = turned(b ^ c, 12);
  a += b, d = turned(d ^ a, 8), c += d, b = turned(b ^ c, 7);
}

/// A bit for each of the 16 words of a block: whether it is below `end`.
DEVICE u32 drops_of_block(const Draws& of, u64 block) {
  const u32 first[16] = {
      0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, (u32)of.key0, (u32)(of.key0 >> 32), (u32)of.key1,
      (u32)(of.key1 >> 32), (u32)of.key2, (u32)(of.key2 >> 32), (u32)of.key3, (u32)(of.key3 >> 32),
      (u32)block, (u32)(block >> 32), 0, 0,
  };
  u32 x[16];
#pragma unroll
  for (u32 i = 0; i < 16; i++) x[i] = first[i];
#pragma unroll
  for (u32 round = 0; round < 8; round += 2) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
  }
  u32 bits = 0;
#pragma unroll
  for (u32 i = 0; i < 16; i++) bits |= (u32)(x[i] + first[i] < of.end) << i;
  return bits;
}

/// The same words, with the number at `base` in `position`.
DEVICE Draws placed(Draws of) {
  u32 more[2] = {0, 0};
  if (of.base) load8<true>(more, of.base);
  of.position += (u64)more[1] << 32 | more[0];
  return of;
}

/// A bit for each of the elements from `i` to `i + 15`: whether it is dropped.
DEVICE u32 drops(const Draws& of, u64 i) {
  const u64 word = of.position + i, block = word / 16;
  const u32 after = word % 16;
  u32 bits = drops_of_block(of, block);
  if (after) bits |= drops_of_block(of, block + 1) << 16;
  return bits >> after & 0xffff;
}

/// `y` is `x` times 0, or times `keep` in this type.
struct DropoutJob { u64 x, y, count; Draws draws; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) dropout(const DropoutJob job) {
  const Draws draws = placed(job.draws);
  const float keep = T::widen(T::narrow(draws.keep));
  const bool is_aligned = (job.x | job.y) % 16 == 0;
  const u64 step = (u64)gridDim.x * THREADS * 16;
  for (u64 i = ((u64)blockIdx.x * THREADS + threadIdx.x) * 16; i < job.count; i += step) {
    const u32 bits = drops(draws, i);
    if (!is_aligned || i + 16 > job.count) {
      for (u32 j = 0; j < 16 && i + j < job.count; j++)
        store_one<T>(job.y, i + j, load_one<T>(job.x, i + j) * (bits >> j & 1 ? 0 : keep));
      continue;
    }
#pragma unroll
    for (u32 part = 0; part < 16; part += WIDE) {
      float x[WIDE];
      load(x, job.x, i + part, WIDE);
#pragma unroll
      for (u32 j = 0; j < WIDE; j++) x[j] *= bits >> (part + j) & 1 ? 0 : keep;
      store(job.y, i + part, WIDE, x);
    }
  }
}

/// Bits of rows of `keys` elements, 16 to a number, `line` numbers a row, 0 past its end: of the
/// weights of attention that are dropped; later than `row % seen` none, unless `seen` is 0.
struct DroppedJob { Draws draws; u64 bits, rows; u32 keys, line, seen, unused; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_dropped(const DroppedJob job) {
  const Draws draws = placed(job.draws);
  const u64 step = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < job.rows * job.line; i += step) {
    const u64 row = i / job.line;
    const u32 key = (u32)(i - row * job.line) * 16;
    const bool is_used = key < job.keys && (job.seen == 0 || key <= row % job.seen);
    store2<true>(job.bits + 2 * i, is_used ? (u16)drops(draws, row * job.keys + key) : 0);
  }
}

/// The same bits of keys that are hidden: those of bytes that are 0, and past the end.
struct HiddenJob { u64 mask, bits, rows; u32 keys, line; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_hidden(const HiddenJob job) {
  const u64 step = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < job.rows * job.line; i += step) {
    const u64 row = i / job.line;
    const u32 key = (u32)(i - row * job.line) * 16;
    u32 bits = 0;
    for (u32 j = 0; j < 16; j++)
      bits |= (u32)(key + j >= job.keys || load1(job.mask + row * job.keys + key + j) == 0) << j;
    store2<true>(job.bits + 2 * i, (u16)bits);
  }
}
