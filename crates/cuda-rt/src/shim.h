// CUDA for a host compiler: the names of `ptx.h` and of CUDA C++, with threads as fibers.
//
// A grid's blocks run one after another, in an order drawn from a seed. A block's threads are
// fibers; at each barrier or shuffle the next fiber is drawn, too. The launch reports faults: an
// access outside of the memory that the test has registered, a misaligned access, a barrier that
// not all threads reach. The launch counts the bytes that it reads and writes.

#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define threadIdx (shim::current->thread)
#define blockIdx (shim::block)
#define gridDim (shim::grid)

namespace shim {

struct Index { u32 x; };
struct Barrier { u32 arrived; std::vector<u32> waiting; };
struct Copy { void* to; u64 from; };
struct Fiber {
  ucontext_t first;
  jmp_buf at;
  std::vector<char> stack;
  Index thread;
  std::vector<Copy> copies;
  bool started, done;
};

thread_local Index block, grid;
thread_local Fiber* current;
thread_local std::vector<Fiber> fibers;
thread_local std::vector<u32> ready;
thread_local jmp_buf scheduler;
thread_local Barrier all, warps[32];
thread_local u64 words[32][32];
thread_local u32 tiles[32][32][6];
thread_local u32 votes;
thread_local u64 state;
thread_local char fault[200];
thread_local std::vector<u64> lent; // the test's memory: begin, end, begin, end, ...
// Bytes that the launch has read, and written: each counts once, as if caches held all. Accesses
// through pointers of C++, such as those to partial sums, do not count.
thread_local u64 moved[2];
thread_local std::unordered_map<u64, u64> touched[2]; // 64 bytes each, by number
thread_local void (*body)(const void*);
thread_local const void* job;

inline u32 draw(u32 below) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (u32)((state >> 33) % below);
}

inline void report(const char* what, u64 at) {
  if (!fault[0])
    snprintf(fault, sizeof fault, "%s at %#llx, block %u, thread %u", what, at, block.x,
             current ? current->thread.x : 0);
}

inline void yield() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier, u32 count) {
  if (++barrier.arrived < count) {
    barrier.waiting.push_back(current->thread.x);
    return yield();
  }
  barrier.arrived = 0;
  ready.insert(ready.end(), barrier.waiting.begin(), barrier.waiting.end());
  barrier.waiting.clear();
  ready.push_back(current->thread.x);
  yield();
}

inline void fiber() {
  for (;;) {
    body(job);
    current->done = true;
    yield();
  }
}

inline void run(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

inline void make_fibers(u32 count) {
  fibers.resize(count);
  for (u32 i = 0; i < count; i++) {
    Fiber& f = fibers[i];
    f.stack.resize(64 << 10);
    getcontext(&f.first);
    f.first.uc_stack.ss_sp = f.stack.data();
    f.first.uc_stack.ss_size = f.stack.size();
    makecontext(&f.first, fiber, 0);
    f.thread.x = i, f.started = false;
  }
}

inline void run_block(u32 threads) {
  ready.clear();
  for (u32 i = 0; i < threads; i++) fibers[i].done = false, fibers[i].copies.clear(), ready.push_back(i);
  while (!ready.empty() && !fault[0]) {
    u32 at = draw((u32)ready.size()), next = ready[at];
    ready[at] = ready.back();
    ready.pop_back();
    run(fibers[next]);
  }
  for (u32 i = 0; i < threads; i++)
    if (!fibers[i].done) report("a barrier that not all threads reach", i);
}

/// Runs a kernel; returns its first fault, or null.
inline const char* launch(void (*kernel)(const void*), const void* of, u32 blocks, u32 threads,
                          u64 seed, const u64* ranges, u32 range_count) {
  lent.assign(ranges, ranges + range_count);
  state = seed * 0x9e3779b97f4a7c15ull | 1;
  fault[0] = 0, body = kernel, job = of, grid.x = blocks;
  for (u32 i = 0; i < 2; i++) moved[i] = 0, touched[i].clear();
  // New fibers for each launch, since a fault leaves fibers unfinished.
  make_fibers(threads);
  all = Barrier();
  for (Barrier& warp : warps) warp = Barrier();
  std::vector<u32> order(blocks);
  for (u32 i = 0; i < blocks; i++) {
    u32 at = draw(i + 1);
    order[i] = order[at], order[at] = i;
  }
  for (u32 b : order) {
    block.x = b;
    if (!fault[0]) run_block(threads);
  }
  current = nullptr;
  return fault[0] ? fault : nullptr;
}

inline void count(u64 at, u32 bytes, bool written) {
  const u64 own = ((1ull << bytes) - 1) << at % 64;
  u64& seen = touched[written][at / 64];
  moved[written] += (u64)__builtin_popcountll(own & ~seen);
  seen |= own;
}

/// Returns the host address, or reports a fault and returns null.
inline char* access(u64 at, u32 bytes, bool written) {
  if (at % bytes) return report("a misaligned access", at), nullptr;
  size_t low = 0, high = lent.size() / 2;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (lent[2 * middle + 1] <= at) low = middle + 1;
    else high = middle;
  }
  if (low == lent.size() / 2 || at < lent[2 * low] || at + bytes > lent[2 * low + 1])
    return report("an access outside of memory", at), nullptr;
  count(at, bytes, written);
  return (char*)at;
}

template <class T>
inline void load(T* to, u64 at, u32 bytes) {
  char* from = access(at, bytes, false);
  if (from) memcpy(to, from, bytes);
  else memset(to, 0, bytes);
}
inline void store(u64 at, const void* from, u32 bytes) {
  if (char* to = access(at, bytes, true)) memcpy(to, from, bytes);
}

} // namespace shim

template <bool KEEP = false> inline void load16(u32* w, u64 at) { shim::load(w, at, 16); }
template <bool KEEP = false> inline void load8(u32* w, u64 at) { shim::load(w, at, 8); }
template <bool KEEP = false> inline u32 load4(u64 at) { u32 w; shim::load(&w, at, 4); return w; }
template <bool KEEP = false> inline u16 load2(u64 at) { u16 w; shim::load(&w, at, 2); return w; }
inline u32 load1(u64 at) { u8 w; shim::load(&w, at, 1); return w; }
template <bool KEEP = false> inline void store16(u64 at, const u32* w) { shim::store(at, w, 16); }
template <bool KEEP = false> inline void store8(u64 at, const u32* w) { shim::store(at, w, 8); }
template <bool KEEP = false> inline void store4(u64 at, u32 w) { shim::store(at, &w, 4); }
template <bool KEEP = false> inline void store2(u64 at, u16 w) { shim::store(at, &w, 2); }
inline void store1(u64 at, u32 w) { shim::store(at, &w, 1); }

inline float __uint_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 __float_as_uint(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }

inline float f16_to_f32(u16 bits) {
  u32 magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u);
  // Multiplying by a power of two adjusts the exponent, also of subnormals.
  float x = __uint_as_float(magnitude << 13) * 0x1p112f;
  return __uint_as_float(sign | __float_as_uint(x));
}
inline u16 f32_to_f16(float x) {
  u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x47800000u) return (u16)(sign | 0x7c00u);
  if (magnitude < 0x38800000u) { // Subnormal: in units of 2^-24, rounded by the addition.
    float units = __uint_as_float(magnitude) * 0x1p24f + 0x1p23f;
    return (u16)(sign | (__float_as_uint(units) - 0x4b000000u));
  }
  u32 rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  return (u16)(sign | rounded);
}

inline void __syncthreads() { shim::wait(shim::all, (u32)shim::fibers.size()); }
inline bool __syncthreads_and(bool vote) {
  shim::votes += vote;
  __syncthreads();
  bool all = shim::votes == shim::fibers.size();
  __syncthreads();
  shim::votes = 0;
  __syncthreads();
  return all;
}
inline double __shfl_xor_sync(u32, double x, u32 step) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(&shim::words[warp][lane], &x, 8);
  shim::wait(shim::warps[warp], 32);
  double other;
  memcpy(&other, &shim::words[warp][lane ^ step], 8);
  shim::wait(shim::warps[warp], 32);
  return other;
}
inline u32 __ballot_sync(u32, bool vote) {
  u32 warp = threadIdx.x / 32, votes = 0;
  shim::words[warp][threadIdx.x % 32] = vote;
  shim::wait(shim::warps[warp], 32);
  for (u32 lane = 0; lane < 32; lane++) votes |= (u32)shim::words[warp][lane] << lane;
  shim::wait(shim::warps[warp], 32);
  return votes;
}
inline u32 __popc(u32 bits) { return (u32)__builtin_popcount(bits); }
inline void __threadfence() {}
inline void __syncwarp() { shim::wait(shim::warps[threadIdx.x / 32], 32); }
inline u32 atomicAdd(u32* at, u32 x) { u32 old = *at; *at = old + x; return old; }
inline u32 atomicOr(u32* at, u32 x) { u32 old = *at; *at = old | x; return old; }
inline u32 atomicMax(u32* at, u32 x) { u32 old = *at; *at = old < x ? x : old; return old; }
inline float exchange(float x, u32 step) { return (float)__shfl_xor_sync(0xffffffffu, x, step); }
inline float exp2_of(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}
inline float reciprocal_of(float x) { return 1 / x; }

// As a GPU may: not before they are waited for.
inline void copy_ahead(void* to, u64 from, bool are_there) {
  if ((u64)to % 16) shim::report("a misaligned access", (u64)to);
  shim::current->copies.push_back({to, are_there ? from : 0});
}
inline void wait_for_copies() {
  for (shim::Copy copy : shim::current->copies) {
    if (copy.from) shim::load((char*)copy.to, copy.from, 16);
    else memset(copy.to, 0, 16);
  }
  shim::current->copies.clear();
}

namespace shim {
/// Calls `half(matrix, row, column)`'s twice for each word; `row` as for `load_tiles`.
template <class Half>
inline void load_tiles(u32 (&w)[4], const void* row, Half half) {
  u32 warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4, j = threadIdx.x % 4 * 2;
  if ((u64)row % 16) report("a misaligned access", (u64)row);
  words[warp][threadIdx.x % 32] = (u64)row;
  wait(warps[warp], 32);
  const auto at = [&](u32 m, u32 row, u32 column) { return (u32)((const u16*)words[warp][8 * m + row])[column]; };
  for (u32 m = 0; m < 4; m++) w[m] = half(at, m, i, j) | half(at, m, i, j + 1) << 16;
  wait(warps[warp], 32);
}
template <bool BF16>
inline float widen_half(u32 bits) {
  if (BF16) return __uint_as_float(bits << 16);
  return (bits & 0x7fffu) > 0x7c00u ? NAN : f16_to_f32((u16)bits);
}
template <bool BF16>
inline u32 narrow_half(float x) {
  if (std::isnan(x)) return 0x7fffu;
  if (!BF16) return f32_to_f16(x);
  u32 bits = __float_as_uint(x);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
} // namespace shim

inline void load_tiles(u32 (&w)[4], const void* row) {
  shim::load_tiles(w, row, [](auto at, u32 m, u32 i, u32 j) { return at(m, i, j); });
}
inline void load_tiles_transposed(u32 (&w)[4], const void* row) {
  shim::load_tiles(w, row, [](auto at, u32 m, u32 i, u32 j) { return at(m, j, i); });
}
template <bool BF16>
inline void multiply_tiles(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u32 warp = threadIdx.x / 32, i = threadIdx.x % 32 / 4, j = threadIdx.x % 4 * 2;
  auto& all = shim::tiles[warp];
  u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(all[threadIdx.x % 32], own, sizeof own);
  shim::wait(shim::warps[warp], 32);
  const auto half = [&](u32 thread, u32 word, u32 k) {
    return shim::widen_half<BF16>(all[thread][word] >> k % 2 * 16 & 0xffffu);
  };
  for (u32 e = 0; e < 4; e++)
    for (u32 k = 0; k < 16; k++)
      c[e] += half(4 * i + k % 8 / 2, k / 8 * 2 + e / 2, k) * half(4 * (j + e % 2) + k % 8 / 2, 4 + k / 8, k);
  shim::wait(shim::warps[warp], 32);
}
template <bool BF16>
inline u32 narrow_two(float low, float high) {
  return shim::narrow_half<BF16>(low) | shim::narrow_half<BF16>(high) << 16;
}
