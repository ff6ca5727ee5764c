// CUDA C++ for a host compiler, as far as candle's kernels need it; put in front of each by `nvcc`.
//
// A grid's blocks run one after another. A block's threads are fibers, each of which runs until it
// ends or waits (at a barrier, in a shuffle); threads that never wait share one. Who has ended is
// waited for no more; waiting for ever is a fault that the launch reports, and a false assertion
// ends the process. Memory is the host's own: what a kernel touches is known from the types of its
// arguments alone.

#pragma once

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

// What candle has for compute capability 8.0: 16-bit types, but not yet those of 8 bits.
#define __CUDA_ARCH__ 800
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 3
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct uint3 { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }

static thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace fake {

// Threads that wait for those of their group: a block, or a warp.
struct Group {
  unsigned live = 0;
  std::vector<struct Fiber *> waiting;
};
struct Fiber {
  ucontext_t first;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  uint3 thread;
  unsigned number;
  bool started = false;
};

static thread_local std::vector<std::unique_ptr<Fiber>> fibers;
static thread_local std::vector<Fiber *> idle;
static thread_local std::deque<Fiber *> ready;
static thread_local Fiber *current;
static thread_local jmp_buf scheduler;
static thread_local Group block, warps[32];
static thread_local unsigned next_thread, thread_count;
static thread_local void (*body)(void **);
static thread_local void **arguments;
static thread_local char words[32][32][16];
// What `extern __shared__` arrays become.
static thread_local std::vector<double> dynamic_memory;

inline void yield() {
  Fiber *own = current;
  own->thread = threadIdx;
  if (!_setjmp(own->at)) _longjmp(scheduler, 1);
  threadIdx = own->thread;
}
inline void release(Group &group) {
  if (group.waiting.empty() || group.waiting.size() < group.live) return;
  ready.insert(ready.end(), group.waiting.begin(), group.waiting.end());
  group.waiting.clear();
}
inline void wait(Group &group) {
  group.waiting.push_back(current);
  release(group);
  yield();
}

// A fiber: one thread after another.
inline void fiber() {
  for (;;) {
    while (next_thread < thread_count) {
      unsigned n = current->number = next_thread++;
      threadIdx = {n % blockDim.x, n / blockDim.x % blockDim.y, n / (blockDim.x * blockDim.y)};
      body(arguments);
      // Who has ended is waited for no more.
      block.live--, warps[n / 32].live--;
      release(block), release(warps[n / 32]);
    }
    idle.push_back(current);
    yield();
  }
}

inline Fiber *idle_fiber() {
  if (idle.empty()) {
    fibers.push_back(std::make_unique<Fiber>());
    Fiber *f = fibers.back().get();
    const size_t bytes = 128 << 10;
    f->stack.reset(new char[bytes]);
    getcontext(&f->first);
    f->first.uc_stack.ss_sp = f->stack.get();
    f->first.uc_stack.ss_size = bytes;
    makecontext(&f->first, fiber, 0);
    return f;
  }
  Fiber *f = idle.back();
  idle.pop_back();
  return f;
}
inline void resume(Fiber *f) {
  current = f;
  if (_setjmp(scheduler)) return;
  if (f->started) _longjmp(f->at, 1);
  f->started = true;
  setcontext(&f->first);
}

// Whether all threads of a block came to their end.
inline bool run_block() {
  next_thread = 0, block.live = thread_count;
  for (unsigned warp = 0; warp * 32 < thread_count; warp++)
    warps[warp].live = std::min(32u, thread_count - warp * 32);
  for (;;) {
    if (!ready.empty()) {
      Fiber *f = ready.front();
      ready.pop_front();
      resume(f);
    } else if (next_thread < thread_count) {
      resume(idle_fiber());
    } else {
      return block.live == 0;
    }
  }
}

// A kernel's arguments: how large each is, and whether it is a value, a pointer to read by, or one
// to write by.
struct Argument { unsigned size, kind; };
struct Kernel {
  const char *name;
  const Argument *arguments;
  unsigned count;
  void (*call)(void **);
};
template <class A>
constexpr unsigned kind() {
  return !std::is_pointer_v<A> ? 0 : std::is_const_v<std::remove_pointer_t<A>> ? 1 : 2;
}
template <auto kernel, class... A, size_t... I>
void call(void (*)(A...), void **from, std::index_sequence<I...>) {
  kernel(*static_cast<A *>(from[I])...);
}
template <auto kernel, class... A>
Kernel entry(const char *name, void (*)(A...)) {
  static const Argument arguments[] = {{unsigned(sizeof(A)), kind<A>()}...};
  return {name, arguments, sizeof...(A),
          [](void **from) { call<kernel>(kernel, from, std::make_index_sequence<sizeof...(A)>()); }};
}

extern const Kernel kernels[];
inline const Kernel *find(const char *name) {
  for (const Kernel *k = kernels; k->name; k++)
    if (!strcmp(k->name, name)) return k;
  return nullptr;
}

// The value of another thread of the warp.
template <class T>
T shuffle(T x, unsigned mask) {
  static_assert(sizeof(T) <= sizeof(words[0][0]), "");
  unsigned warp = current->number / 32, lane = current->number % 32;
  memcpy(words[warp][lane], &x, sizeof(T));
  wait(warps[warp]);
  memcpy(&x, words[warp][lane ^ mask], sizeof(T));
  wait(warps[warp]);
  return x;
}

}  // namespace fake

// What the driver asks of a module.
extern "C" int fake_arguments(const char *kernel, const fake::Argument **arguments) {
  const fake::Kernel *k = fake::find(kernel);
  if (!k) return -1;
  *arguments = k->arguments;
  return int(k->count);
}
extern "C" const char *fake_run(const char *kernel, void **arguments, const unsigned *sizes,
                                unsigned shared) {
  fake::body = fake::find(kernel)->call, fake::arguments = arguments;
  gridDim = {sizes[0], sizes[1], sizes[2]}, blockDim = {sizes[3], sizes[4], sizes[5]};
  fake::thread_count = blockDim.x * blockDim.y * blockDim.z;
  fake::dynamic_memory.resize((shared + 7) / 8);
  for (unsigned z = 0; z < gridDim.z; z++)
    for (unsigned y = 0; y < gridDim.y; y++)
      for (unsigned x = 0; x < gridDim.x; x++) {
        blockIdx = {x, y, z};
        if (!fake::run_block()) return "a barrier that not all threads reach";
      }
  return nullptr;
}
#define KERNEL(name) fake::entry<name>(#name, name),

inline void __syncthreads() { fake::wait(fake::block); }
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {
  if (mask != 0xffffffff || width != 32) abort();
  return fake::shuffle(x, unsigned(lanes));
}

// Blocks run one after another and fibers take turns, so nothing comes between.
template <class T>
T atomicAdd(T *at, T x) { return std::exchange(*at, T(*at + x)); }
template <class T, class U>
T atomicMin(T *at, U x) { return std::exchange(*at, std::min(*at, T(x))); }
template <class T, class U>
T atomicMax(T *at, U x) { return std::exchange(*at, std::max(*at, T(x))); }
template <class T, class U>
T atomicCAS(T *at, T expected, U x) { return std::exchange(*at, *at == expected ? T(x) : *at); }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}

namespace fake {
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace fake
inline unsigned __float_as_uint(float x) { return fake::bits<unsigned>(x); }
inline int __float_as_int(float x) { return fake::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return fake::bits<float>(x); }
inline float __int_as_float(int x) { return fake::bits<float>(x); }
inline long long __double_as_longlong(double x) { return fake::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return fake::bits<double>(x); }

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * float(M_SQRT1_2)); }
inline double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
