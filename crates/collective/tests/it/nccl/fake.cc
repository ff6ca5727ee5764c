// NCCL and CUDA's driver over the memory of the host, for tests: slow, simple, and strict.
//
// Ranks are threads or processes that share a directory, which the unique id names; data from one rank
// to another is a file there. Streams are threads, device memory is host memory. Accesses to watched
// memory (that of ncclMemAlloc, and what a test registers) must be ordered by streams and events after
// earlier accesses. This is checked with vector clocks when work is put into a stream, so that a missing
// order is found however the threads happen to run. Every communicator must be non-blocking.
// Behaviour that NCCL leaves undefined ends the process with a message: using a communicator that was
// ended, two threads in calls on one communicator, a second abort, an operator that does not exist.
// Calls that do not match hang, as in NCCL, until an abort.
//
// Tests inject faults by function and device, and count calls the same way.

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fs = std::filesystem;
using std::string;
using Lock = std::unique_lock<std::mutex>;

static void violation(const string &what) {
  fprintf(stderr, "fake NCCL: rule broken: %s\n", what.c_str());
  fflush(stderr);
  abort();
}

// Faults and counts, by function and device. What is static is never destroyed: streams' threads run until the
// process has ended.

enum Kind { RETURN, ASYNC, HANG, PROGRESS, BLOCK };
struct Fault {
  string function;
  int device, nth, kind, argument;
};
static std::mutex books;
static std::vector<Fault> &faults = *new std::vector<Fault>;
static std::map<std::pair<string, int>, int> &calls = *new std::map<std::pair<string, int>, int>;
static string last_error;

// Counts a call, and returns the fault to inject, if any.
static Fault due(const string &function, int device) {
  Lock lock(books);
  calls[{function, device}]++;
  for (size_t i = 0; i < faults.size(); i++) {
    Fault &f = faults[i];
    if (f.function != function || f.device != device || --f.nth > 0) continue;
    Fault now = f;
    faults.erase(faults.begin() + i);
    last_error = "an injected fault in " + function;
    return now;
  }
  return {"", 0, 0, -1, 0};
}

extern "C" void fake_fault(const char *function, int device, int nth, int kind, int argument) {
  Lock lock(books);
  faults.push_back({function, device, nth, kind, argument});
}
extern "C" int fake_calls(const char *function, int device) {
  Lock lock(books);
  return calls[{function, device}];
}

// CUDA's driver.

static const int DEVICES = 4096;
struct Context { int device; };
static Context contexts[DEVICES];
static std::atomic<int> retained[DEVICES];
static thread_local std::vector<Context *> current;

struct Stream;
static std::mutex streams_m;
static std::vector<Stream *> &streams = *new std::vector<Stream *>;  // all streams ever created; none is freed
static int here();
using Clock = std::map<Stream *, uint64_t>;
// Work that this thread has seen complete: what it puts into a stream from now on comes after it.
static thread_local Clock witnessed;
struct Access {
  uintptr_t from, to;
  bool write;
  const char *what;
};
// Work that a stream gets while it is captured, in order.
struct Node {
  std::function<void()> task;
  std::vector<Access> accesses;
};
struct Graph {
  std::vector<Node> nodes;
  std::atomic<bool> invalid{false};
};
struct Stream {
  Graph *graph = nullptr;  // while it is captured, by one thread
  Clock clock;  // work of other streams that precedes the next work of this one; under `ordering`
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::function<void()>> tasks;
  uint64_t submitted = 0, done = 0;
  bool stop = false, capturing = false;
  int blocked = 0, device = here();
  std::thread worker;
  Stream() : worker([this] { run(); }) {
    Lock lock(streams_m);
    streams.push_back(this);
  }
  void run() {
    Lock lock(m);
    for (;;) {
      cv.wait(lock, [&] { return stop || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      lock.lock();
      done++;
      cv.notify_all();
    }
  }
  void push(std::function<void()> task, const std::vector<Access> &accesses = {});
};

// Captures of mode GLOBAL and the threads that make them; and this thread's own mode, for calls while others capture.
enum { GLOBAL = 0, RELAXED = 2, CAPTURE_UNSUPPORTED = 900 };
static std::mutex captures_m;
static std::map<Graph *, std::thread::id> &global_captures = *new std::map<Graph *, std::thread::id>;
static thread_local int capture_mode = GLOBAL;

// "Potentially unsafe" calls fail in a thread of mode GLOBAL while another thread captures in that mode, and
// invalidate that capture.
static int unsafe_call() {
  if (capture_mode != GLOBAL) return 0;
  Lock lock(captures_m);
  int error = 0;
  for (auto &[graph, owner] : global_captures) {
    if (owner == std::this_thread::get_id()) continue;
    graph->invalid = true;
    error = CAPTURE_UNSUPPORTED;
  }
  return error;
}

// Memory that is watched, and its accesses.

struct Used : Access {
  Stream *stream;
  uint64_t ticket;
};
static std::mutex ordering;
static std::map<uintptr_t, uintptr_t> &watched = *new std::map<uintptr_t, uintptr_t>;
static std::vector<Used> &used = *new std::vector<Used>;
// Whether this thread's races are counted instead of fatal, and their number.
static thread_local bool lenient;
static thread_local int races;

static void race(const string &what) {
  if (!lenient) violation(what);
  races++;
}
static bool is_watched(const Access &a) {
  auto next = watched.lower_bound(a.to);
  return next != watched.begin() && std::prev(next)->second > a.from;
}
static void check_order(Stream *stream, uint64_t ticket, const std::vector<Access> &accesses) {
  for (const Access &a : accesses) {
    if (a.from == a.to || !is_watched(a)) continue;
    for (size_t i = 0; i < used.size();) {
      Used &u = used[i];
      bool touches = u.from < a.to && a.from < u.to && (u.write || a.write);
      bool before = u.stream == stream || u.ticket <= stream->clock[u.stream];
      if (touches && !before)
        race(string(a.what) + " uses memory that another stream's " + u.what + " may be using");
      // Work ordered after this access is ordered after the earlier one, too.
      bool covers = before && a.write && a.from <= u.from && u.to <= a.to;
      bool again = u.stream == stream && !u.write && a.from == u.from && u.to == a.to;
      if (covers || again) used.erase(used.begin() + i);
      else i++;
    }
    used.push_back({a, stream, ticket});
  }
}
static void merge(Clock &into, const Clock &from) {
  for (auto &[stream, at] : from) into[stream] = std::max(into[stream], at);
}
void Stream::push(std::function<void()> task, const std::vector<Access> &accesses) {
  if (graph) return graph->nodes.push_back({std::move(task), accesses});
  Lock order(ordering);
  merge(clock, witnessed);
  Lock lock(m);
  tasks.push_back(std::move(task));
  submitted++;
  check_order(this, submitted, accesses);
  cv.notify_all();
}
static void watch(void *memory, size_t bytes) {
  uintptr_t at = uintptr_t(memory);
  Lock order(ordering);
  if (bytes) watched[at] = at + bytes;
}
// The memory is freed: no work may be using it.
static void unwatch(void *memory) {
  uintptr_t at = uintptr_t(memory);
  Lock order(ordering);
  auto found = watched.find(at);
  if (found == watched.end()) return;
  for (size_t i = 0; i < used.size();) {
    Used &u = used[i];
    if (u.from >= found->second || u.to <= at) { i++; continue; }
    Lock inner(u.stream->m);
    if (u.stream->done < u.ticket) race(string("memory is freed that ") + u.what + " may be using");
    used.erase(used.begin() + i);
  }
  watched.erase(found);
}

struct Event {
  std::mutex m;
  Clock clock;  // under `ordering`
  Stream *stream = nullptr;
  uint64_t ticket = 0;
  bool reached() {
    Lock lock(m);
    if (!stream) return true;
    Lock inner(stream->m);
    return stream->done >= ticket;
  }
};
static std::atomic<int> live_events, live_streams;

static int here() { return current.empty() ? -1 : current.back()->device; }
static Stream *stream_of(void *stream) {
  // CU_STREAM_LEGACY, and CU_STREAM_PER_THREAD, which is another one to each thread that calls.
  static std::mutex m;
  static std::map<int, Stream *> defaults;
  static thread_local std::map<int, Stream *> own;
  if (uintptr_t(stream) > 2) return static_cast<Stream *>(stream);
  Lock lock(m);
  Stream *&s = (uintptr_t(stream) == 2 ? own : defaults)[here()];
  if (!s) s = new Stream;
  return s;
}

extern "C" {
int cuInit(unsigned) { return due("cuInit", 0).kind == RETURN ? 999 : 0; }
int cuDeviceGetCount(int *n) {
  const char *few = getenv("FAKE_GPUS");
  *n = few ? atoi(few) : DEVICES;
  return 0;
}
int cuDeviceGet(int *device, int n) {
  int count;
  cuDeviceGetCount(&count);
  *device = n;
  return n < count ? 0 : 101;  // CUDA_ERROR_INVALID_DEVICE
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, 0, 16);
  for (int i = 0; i < 4; i++) uuid[i] = device >> (24 - 8 * i);
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  Fault f = due("cuDevicePrimaryCtxRetain", device);
  if (f.kind == RETURN) return f.argument;
  contexts[device].device = device;
  retained[device]++;
  *context = &contexts[device];
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  if (retained[device]-- <= 0) violation("a context released that nobody had");
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  current.push_back(static_cast<Context *>(context));
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  if (current.empty()) violation("no context to pop");
  *context = current.back();
  current.pop_back();
  return 0;
}
int cuEventCreate(void **event, unsigned) {
  if (here() < 0) violation("an event without a context");
  live_events++;
  *event = new Event;
  return 0;
}
int cuEventDestroy_v2(void *event) {
  live_events--;
  delete static_cast<Event *>(event);
  return 0;
}
int cuEventRecord(void *event, void *stream) {
  Fault f = due("cuEventRecord", here());
  if (f.kind == RETURN) return f.argument;
  Stream *s = stream_of(stream);
  Event *e = static_cast<Event *>(event);
  if (s->graph) violation("an event recorded in a capture, which the fake has not");
  Lock order(ordering);
  Lock lock(e->m);
  Lock inner(s->m);
  e->stream = s;
  e->ticket = s->submitted;
  e->clock = s->clock;
  e->clock[s] = s->submitted;
  return 0;
}
int cuEventQuery(void *event) {
  due("cuEventQuery", here());
  if (int error = unsafe_call()) return error;
  Event *e = static_cast<Event *>(event);
  if (!e->reached()) return 600;
  Lock order(ordering);
  merge(witnessed, e->clock);
  return 0;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned) {
  Event *e = static_cast<Event *>(event);
  e->m.lock();
  Stream *of = e->stream;
  uint64_t ticket = e->ticket;
  e->m.unlock();
  Stream *waiting = stream_of(stream);
  if (waiting->graph) {
    // CUDA_ERROR_STREAM_CAPTURE_ISOLATION: the event is of work that is not captured.
    waiting->graph->invalid = true;
    return 905;
  }
  {
    Lock order(ordering);
    merge(waiting->clock, e->clock);
  }
  waiting->push([=] {
    if (!of) return;
    Lock lock(of->m);
    of->cv.wait(lock, [&] { return of->done >= ticket; });
  });
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  if (*mode < GLOBAL || *mode > RELAXED) return 1;
  std::swap(capture_mode, *mode);
  return 0;
}
int cuStreamIsCapturing(void *stream, int *status) {
  Stream *s = stream_of(stream);
  *status = s->graph ? 1 + s->graph->invalid : s->capturing;
  return 0;
}
int cuStreamCreate(void **stream, unsigned) {
  if (here() < 0) violation("a stream without a context");
  Fault f = due("cuStreamCreate", here());
  if (f.kind == RETURN) return f.argument;
  live_streams++;
  *stream = new Stream;
  return 0;
}
int cuStreamDestroy_v2(void *stream) {
  Stream *s = static_cast<Stream *>(stream);
  live_streams--;
  Lock lock(s->m);
  s->stop = true;
  s->cv.notify_all();
  // The object stays: events outlive their streams, and queued work is still executed.
  s->worker.detach();
  return 0;
}
// Waits until the stream has completed its work.
void fake_stream_sync(void *stream) {
  Stream *s = stream_of(stream);
  Lock lock(s->m);
  uint64_t ticket = s->submitted;
  s->cv.wait(lock, [&] { return s->done >= ticket; });
}
#ifndef FAKE_GPU  // The fake GPU, which includes this file, has its own, with the rules of captures.
int cuStreamSynchronize(void *stream) {
  if (here() < 0) violation("a stream without a context");
  fake_stream_sync(stream);
  return 0;
}
#endif
int cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t bytes) {
  if (here() < 0) violation("a copy without a context");
  if (int error = unsafe_call()) return error;
  memcpy((void *)to, from, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t bytes) {
  if (here() < 0) violation("a copy without a context");
  if (int error = unsafe_call()) return error;
  memcpy(to, (void *)from, bytes);
  return 0;
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void *stream) {
  Fault f = due("cuMemcpyDtoDAsync_v2", here());
  if (f.kind == RETURN) return f.argument;
  stream_of(stream)->push([=] { memcpy((void *)to, (void *)from, bytes); },
                          {{from, from + bytes, false, "copy"}, {to, to + bytes, true, "copy"}});
  return 0;
}
int cuMemsetD32Async(uintptr_t to, unsigned value, size_t words, void *stream) {
  auto set = [=] { for (size_t i = 0; i < words; i++) memcpy((void *)(to + 4 * i), &value, 4); };
  stream_of(stream)->push(set, {{to, to + 4 * words, true, "set"}});
  return 0;
}
int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void *stream) {
  Fault f = due("cuMemsetD8Async", here());
  if (f.kind == RETURN) return f.argument;
  stream_of(stream)->push([=] { memset((void *)to, value, bytes); }, {{to, to + bytes, true, "set"}});
  return 0;
}
int cuGetErrorName(int error, const char **name) {
  *name = error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : error == 200 ? "CUDA_ERROR_INVALID_IMAGE" : nullptr;
  return *name ? 0 : 1;
}

void *fake_stream() { return new Stream; }
void fake_stream_end(void *stream) {
  Stream *s = static_cast<Stream *>(stream);
  { Lock lock(s->m); s->stop = true; s->cv.notify_all(); }
  // The object stays: events outlive their streams.
  s->worker.join();
}
// Begins a capture of mode GLOBAL by this thread, or ends it; returns whether it is still valid.
int fake_capture(int on) {
  static thread_local Graph own;
  Lock lock(captures_m);
  if (on) global_captures[&own] = std::this_thread::get_id();
  else global_captures.erase(&own);
  return on ? 1 : !own.invalid.exchange(false);
}
void fake_stream_capture(void *stream, int on) { static_cast<Stream *>(stream)->capturing = on; }
// Keeps the stream busy for a time, or until it is unblocked.
void fake_stream_compute(void *stream, int ms) {
  static_cast<Stream *>(stream)->push([=] { usleep(ms * 1000); });
}
void fake_stream_block(void *stream) {
  Stream *s = static_cast<Stream *>(stream);
  { Lock lock(s->m); s->blocked++; }
  s->push([=] { Lock lock(s->m); s->cv.wait(lock, [&] { return s->blocked == 0; }); });
}
void fake_stream_unblock(void *stream) {
  Stream *s = static_cast<Stream *>(stream);
  Lock lock(s->m);
  s->blocked = 0;
  s->cv.notify_all();
}
// Enqueues a kernel: `ranges` are begin, end, and whether it writes, `count` times.
void fake_stream_run(void *stream, void (*kernel)(void *), void *of, const uintptr_t *ranges, int count) {
  std::vector<Access> accesses;
  for (int i = 0; i < count; i++)
    accesses.push_back({ranges[3 * i], ranges[3 * i + 1], ranges[3 * i + 2] != 0, "kernel"});
  stream_of(stream)->push([=] { kernel(of); }, accesses);
}
void fake_watch(void *memory, size_t bytes) { watch(memory, bytes); }
void fake_unwatch(void *memory) { unwatch(memory); }
// Starts or stops counting this thread's races; returns their number since the last call.
int fake_races(int count) {
  lenient = count;
  return std::exchange(races, 0);
}
int fake_live_streams() { return live_streams; }
int fake_live_events() { return live_events; }
int fake_retained(int device) { return retained[device]; }
}

// Numbers.

static float from_half(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  float f;
  if (exponent == 0) {
    f = float(mantissa) * 0x1p-24f;
    return sign ? -f : f;
  }
  uint32_t bits = exponent == 31 ? 0x7f800000 | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13;
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}
static uint16_t to_half(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  float a = f < 0 ? -f : f;
  if (a == 0) return sign;
  if (a != a) return 0x7e00;
  if (a >= 65520.0f) return sign | 0x7c00;
  // Adds a power of two such that the sum's last bit is the half's last bit: this rounds to even.
  int exponent = 0;
  frexpf(a, &exponent);
  if (exponent < -13) exponent = -13;
  float magic = ldexpf(1.5f, exponent + 12);
  volatile float shifted = a + magic;
  float rounded = shifted - magic;
  int units = int(ldexpf(rounded, 11 - exponent));
  int biased = exponent + 14;
  return sign | uint16_t(biased == 1 && units < 1024 ? units : (biased << 10) + (units - 1024));
}
static float from_bf16(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static uint16_t to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
struct RedOp {
  int kind;  // 5: multiplied first
  double factor;
};

template <class T> static T fold_one(const RedOp &op, T a, T b) {
  switch (op.kind) {
    case 1: return T(a * b);
    case 2: return b > a ? b : a;
    case 3: return b < a ? b : a;
    default: return T(a + b);
  }
}
template <class T, class Wide, class Load, class Store>
static void fold(const RedOp &op, std::vector<string> &in, size_t n, char *out, Load load, Store store) {
  for (size_t i = 0; i < n; i++) {
    auto at = [&](size_t rank) {
      T raw;
      memcpy(&raw, in[rank].data() + i * sizeof(T), sizeof(T));
      Wide x = load(raw);
      return op.kind == 5 ? Wide(x * Wide(op.factor)) : x;
    };
    Wide acc = at(0);
    for (size_t rank = 1; rank < in.size(); rank++) acc = fold_one<Wide>(op, acc, at(rank));
    if (op.kind == 4) acc = Wide(acc * Wide(Wide(1) / Wide(in.size())));
    T result = store(acc);
    memcpy(out + i * sizeof(T), &result, sizeof(T));
  }
}
static void reduce(int type, const RedOp &op, std::vector<string> in, size_t n, char *out) {
  auto same = [](auto x) { return x; };
  switch (type) {
    case 0: return fold<int8_t, int8_t>(op, in, n, out, same, same);
    case 1: return fold<uint8_t, uint8_t>(op, in, n, out, same, same);
    case 2:
      if (op.kind == 2 || op.kind == 3) return fold<int32_t, int32_t>(op, in, n, out, same, same);
      return fold<uint32_t, uint32_t>(op, in, n, out, same, same);
    case 3: return fold<uint32_t, uint32_t>(op, in, n, out, same, same);
    case 4:
      if (op.kind == 2 || op.kind == 3) return fold<int64_t, int64_t>(op, in, n, out, same, same);
      return fold<uint64_t, uint64_t>(op, in, n, out, same, same);
    case 5: return fold<uint64_t, uint64_t>(op, in, n, out, same, same);
    case 6: return fold<uint16_t, float>(op, in, n, out, from_half, to_half);
    case 7: return fold<float, float>(op, in, n, out, same, same);
    case 8: return fold<double, double>(op, in, n, out, same, same);
    case 9: return fold<uint16_t, float>(op, in, n, out, from_bf16, to_bf16);
    default: violation("a type that there is not");
  }
}

// NCCL.

enum Verb { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };
struct Call {
  Verb verb;
  const char *send;
  char *recv;
  size_t count;
  int type;
  RedOp op;
  int peer;  // or the root
  uint64_t number;
};
enum State { ALIVE, ABORTED, DESTROYED };
struct Comm {
  std::atomic<int> state{ALIVE};
  int rank = 0, world = 0, device = 0;
  string dir;
  std::vector<string> other_dirs;
  std::atomic<bool> aborting{false}, starting{true}, finalized{false};
  std::atomic<int> async{0}, inside{0}, running{0};
  int polls = 0;
  std::vector<std::function<void()>> pending;
  std::thread starter, splitter;
  std::atomic<bool> splitting{false};
  uint64_t collectives = 0, splits = 0;
  std::map<int, uint64_t> sent, received;
  std::map<int, std::pair<int, RedOp>> operators;
  int next_operator = 5;
  std::set<void *> registered;
};
static std::atomic<int> live_comms, last_ids;
static std::atomic<long> live_memory;

static bool write_file(const string &path, const string &data) {
  static std::atomic<int> number;
  string tmp = path + ".new" + std::to_string(number++) + "-" + std::to_string(getpid());
  FILE *f = fopen(tmp.c_str(), "wb");
  if (!f) return false;
  bool ok = data.empty() || fwrite(data.data(), 1, data.size(), f) == data.size();
  fclose(f);
  return ok && rename(tmp.c_str(), path.c_str()) == 0;
}
static bool read_file(const string &path, string *data) {
  FILE *f = fopen(path.c_str(), "rb");
  if (!f) return false;
  char buffer[1 << 16];
  size_t n;
  data->clear();
  while ((n = fread(buffer, 1, sizeof buffer, f)) > 0) data->append(buffer, n);
  fclose(f);
  return true;
}
// Waits for a file; false after an abort.
static bool wait_file(Comm *c, const string &path, string *data) {
  while (!read_file(path, data)) {
    if (c->aborting) return false;
    usleep(100);
  }
  return true;
}
static bool hang(Comm *c) {
  while (!c->aborting) usleep(200);
  return false;
}

static string header(const Call &call) {
  char text[160];
  bool rooted = call.verb == REDUCE || call.verb == BROADCAST;
  int op = call.verb == BROADCAST || call.verb >= SEND || call.verb == ALL_GATHER ? 0 : call.op.kind;
  snprintf(text, sizeof text, "%d %zu %d %d %g %d", call.verb, call.count, call.type, op,
           call.op.factor, rooted ? call.peer : 0);
  string padded(text);
  padded.resize(sizeof text);
  return padded;
}
static string path(Comm *c, const char *kind, int from, int to, uint64_t number) {
  return c->dir + "/" + kind + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}
// Takes a peer's data for this call; a call that does not match hangs.
static bool take(Comm *c, const string &path, const string &expected, string *data) {
  string all;
  if (!wait_file(c, path, &all)) return false;
  if (all.compare(0, expected.size(), expected) != 0) return hang(c);
  unlink(path.c_str());
  *data = all.substr(expected.size());
  return true;
}

static bool collective(Comm *c, const Call &call) {
  size_t size = SIZES[call.type], n = c->world;
  size_t in = (call.verb == REDUCE_SCATTER ? n : 1) * call.count * size;
  string head = header(call), own(call.send, in);
  bool silent = call.verb == BROADCAST && c->rank != call.peer;
  for (size_t to = 0; to < n; to++)
    if (int(to) != c->rank)
      write_file(path(c, "c", c->rank, to, call.number), head + (silent ? "" : own));
  std::vector<string> all(n);
  for (size_t from = 0; from < n; from++) {
    if (int(from) == c->rank) all[from] = own;
    else if (!take(c, path(c, "c", from, c->rank, call.number), head, &all[from])) return false;
  }
  switch (call.verb) {
    case ALL_REDUCE: reduce(call.type, call.op, all, call.count, call.recv); break;
    case REDUCE:
      if (c->rank == call.peer) reduce(call.type, call.op, all, call.count, call.recv);
      break;
    case BROADCAST: memcpy(call.recv, all[call.peer].data(), in); break;
    case ALL_GATHER:
      for (size_t i = 0; i < n; i++) memcpy(call.recv + i * in, all[i].data(), in);
      break;
    default: {
      size_t block = call.count * size;
      for (string &s : all) s = s.substr(c->rank * block, block);
      reduce(call.type, call.op, all, call.count, call.recv);
    }
  }
  return true;
}
static void perform(Comm *c, const std::vector<Call> &list, bool hanging) {
  if (hanging) hang(c);
  if (!c->aborting) {
    for (const Call &call : list)
      if (call.verb == SEND)
        write_file(path(c, "p", c->rank, call.peer, call.number),
                   header(Call{SEND, 0, 0, call.count, call.type, {0, 0}, 0, 0}) +
                       string(call.send, call.count * SIZES[call.type]));
    for (const Call &call : list) {
      if (call.verb < SEND && !collective(c, call)) break;
      if (call.verb != RECV) continue;
      string data, head = header(Call{SEND, 0, 0, call.count, call.type, {0, 0}, 0, 0});
      if (!take(c, path(c, "p", call.peer, c->rank, call.number), head, &data)) break;
      memcpy(call.recv, data.data(), data.size());
    }
  }
  c->running--;
}

// The scope of a call on a communicator.
struct Enter {
  Comm *c;
  Fault fault;
  Enter(Comm *comm, const char *function) : c(comm) {
    if (c->state != ALIVE) violation(string(function) + " on a communicator that has been ended");
    if (c->inside++ != 0) violation(string(function) + " beside another call");
    fault = due(function, c->device);
    if (fault.kind == BLOCK) hang(c);
  }
  ~Enter() {
    if (fault.kind == ASYNC) c->async = fault.argument;
    c->inside--;
  }
  bool fails() const { return fault.kind == RETURN || fault.kind == BLOCK; }
  int code() const { return fault.kind == BLOCK ? 3 : fault.argument; }
  // Whether the communicator accepts further operations.
  bool free() const { return !c->starting && !c->splitting && c->polls == 0 && c->async == 0; }
  void progress() { c->polls = fault.kind == PROGRESS ? fault.argument : 1; }
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
};
static bool good(const Config *k) {
  return k && k->size == sizeof(Config) && k->magic == 0xcafebeef && k->version >= 21400 && k->blocking == 0;
}

static void start(Comm *c, const string &ids) {
  string mine = std::to_string(c->world) + " " + ids;
  write_file(c->dir + "/here-" + std::to_string(c->rank), mine);
  for (int rank = 0; rank < c->world; rank++) {
    string theirs;
    if (!wait_file(c, c->dir + "/here-" + std::to_string(rank), &theirs)) return;
    if (theirs != mine) c->async = 3;
  }
  c->starting = false;
}
// The last rank removes the directory.
static void gone(Comm *c) {
  write_file(c->dir + "/gone-" + std::to_string(c->rank), "");
  for (int rank = 0; rank < c->world; rank++)
    if (access((c->dir + "/gone-" + std::to_string(rank)).c_str(), F_OK) != 0) return;
  std::error_code ignored;
  fs::remove_all(c->dir, ignored);
  for (const string &dir : c->other_dirs) fs::remove_all(dir, ignored);
}

static thread_local int depth;
static thread_local std::vector<std::pair<Comm *, std::pair<Stream *, Call>>> group;
static thread_local int group_error;

// The memory that a call reads and writes.
static void touched(Comm *c, const Call &call, std::vector<Access> &into) {
  size_t size = SIZES[call.type] * call.count, world = c->world;
  size_t in = call.verb == REDUCE_SCATTER ? world * size : size;
  size_t out = call.verb == ALL_GATHER ? world * size : size;
  bool reads = call.verb != RECV && !(call.verb == BROADCAST && c->rank != call.peer);
  bool writes = call.verb != SEND && !(call.verb == REDUCE && c->rank != call.peer);
  uintptr_t send = uintptr_t(call.send), recv = uintptr_t(call.recv);
  if (reads) into.push_back({send, send + in, false, "NCCL call"});
  if (writes) into.push_back({recv, recv + out, true, "NCCL call"});
}

static int flush() {
  std::map<Comm *, std::pair<Stream *, std::vector<Call>>> by;
  for (auto &[c, entry] : group) {
    by[c].first = entry.first;
    by[c].second.push_back(entry.second);
  }
  group.clear();
  int error = group_error;
  group_error = 0;
  if (error) return error;
  for (auto &[c, work] : by) {
    Enter call(c, "launch");
    if (call.fails()) return call.code();
    bool hanging = call.fault.kind == HANG;
    auto [stream, list] = work;
    std::vector<Access> accesses;
    for (const Call &one : list) touched(c, one, accesses);
    c->pending.push_back([=, c = c] {
      c->running++;
      stream->push([=] { perform(c, list, hanging); }, accesses);
    });
    call.progress();
  }
  return by.empty() ? 0 : 7;
}

static int issue(const char *name, Comm *c, void *stream, Call call, int op) {
  int error = 0;
  {
    Enter e(c, name);
    if (e.fails()) error = e.code();
    else if (!e.free()) error = 4;
    if (!error && (call.peer < 0 || call.peer >= c->world || call.type < 0 || call.type > 9)) error = 4;
    // NCCL would launch a kernel, and for a sum of one rank it copies at most.
    if (op == 4 && c->world == 1) violation("an average of one rank");
    if (!error && op >= 5) {
      auto found = c->operators.find(op);
      if (found == c->operators.end()) violation("an operator that does not exist");
      if (found->second.first != call.type) violation("an operator of another type");
      call.op = found->second.second;
    } else {
      call.op = {op, 0};
    }
    if (!error && call.verb == SEND) call.number = c->sent[call.peer]++;
    else if (!error && call.verb == RECV) call.number = c->received[call.peer]++;
    else if (!error) call.number = c->collectives++;
    if (!error) group.push_back({c, {stream_of(stream), call}});
  }
  if (error) group_error = error;
  if (depth == 0) return flush();
  return error;
}

extern "C" {
struct UniqueId { char text[128]; };

// Where groups create their directories, if not in TMPDIR.
static string folder;
void fake_folder(const char *path) { folder = path; }

#ifndef VERSION
#define VERSION 22707
#endif
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) {
  return code == 2 ? "unhandled system error" : code == 6 ? "remote process exited" : "some error";
}
const char *ncclGetLastError(void *) {
  static thread_local string text;
  Lock lock(books);
  text = last_error;
  return text.c_str();
}
int ncclGetUniqueId(UniqueId *id) {
  const char *base = getenv("TMPDIR");
  string dir = (!folder.empty() ? folder : base ? base : "/tmp") + "/fake-nccl-XXXXXX";
  if (dir.size() > 127 || !mkdtemp(dir.data())) return 2;
  memset(id, 0, sizeof *id);
  memcpy(id->text, dir.data(), dir.size());
  return 0;
}
static int init(const char *name, void **out, int world, int rank, int n, UniqueId *ids, Config *config) {
  *out = nullptr;
  int device = here();
  if (device < 0) violation("an init without a context");
  Fault f = due(name, device);
  if (f.kind == RETURN) return f.argument;
  if (!good(config) || rank < 0 || rank >= world) return 4;
  Comm *c = new Comm;
  live_comms++;
  c->rank = rank, c->world = world, c->device = device, c->dir = ids[0].text;
  string all;
  for (int i = 0; i < n; i++) all += string(ids[i].text) + "\n";
  for (int i = 1; i < n; i++) c->other_dirs.push_back(ids[i].text);
  last_ids = n;
  if (f.kind == ASYNC) c->async = f.argument;
  if (f.kind == PROGRESS) c->polls = f.argument;
  if (f.kind != HANG) c->starter = std::thread([=] { start(c, all); });
  *out = c;
  return 7;
}
int ncclCommInitRankConfig(void **out, int world, UniqueId id, int rank, Config *config) {
  return init("ncclCommInitRankConfig", out, world, rank, 1, &id, config);
}
int ncclCommInitRankScalable(void **out, int world, int rank, int n, UniqueId *ids, Config *config) {
  return init("ncclCommInitRankScalable", out, world, rank, n, ids, config);
}
int ncclCommGetAsyncError(void *comm, int *state) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclCommGetAsyncError");
  *state = 0;
  if (e.fails()) return e.code();
  if (c->async) *state = c->async;
  else if (c->starting || c->splitting) *state = 7;
  else if (c->polls > 0) {
    *state = 7;
    if (--c->polls == 0) {
      for (auto &task : c->pending) task();
      c->pending.clear();
    }
  }
  return 0;
}
static void end(Comm *c, State state) {
  c->state = state;
  c->aborting = true;
  while (c->running > 0) usleep(100);
  if (c->starter.joinable()) c->starter.join();
  if (c->splitter.joinable()) c->splitter.join();
  gone(c);
  live_comms--;
}
// Functions that free or allocate device memory apply to the current device.
static void on_its_device(Comm *c, const char *function) {
  if (here() != c->device) violation(string(function) + " without the communicator's device");
}
int ncclCommAbort(void *comm) {
  Comm *c = static_cast<Comm *>(comm);
  on_its_device(c, "ncclCommAbort");
  if (c->state != ALIVE) violation("an abort of a communicator that has been ended");
  Fault f = due("ncclCommAbort", c->device);
  if (f.kind == HANG) for (;;) sleep(1);
  end(c, ABORTED);
  return f.kind == RETURN ? f.argument : 0;
}
int ncclCommFinalize(void *comm) {
  Comm *c = static_cast<Comm *>(comm);
  on_its_device(c, "ncclCommFinalize");
  Enter e(c, "ncclCommFinalize");
  if (e.fails()) return e.code();
  if (!e.free()) return 4;
  if (c->finalized.exchange(true)) violation("finalized twice");
  e.progress();
  return 7;
}
int ncclCommDestroy(void *comm) {
  Comm *c = static_cast<Comm *>(comm);
  on_its_device(c, "ncclCommDestroy");
  {
    Enter e(c, "ncclCommDestroy");
    if (!c->finalized || !e.free()) violation("destroyed before it was finalized");
    if (c->running > 0) violation("destroyed with operations under way");
    if (!c->operators.empty()) violation("destroyed with operators");
  }
  end(c, DESTROYED);
  return 0;
}
int ncclCommSplit(void *comm, int color, int key, void **out, Config *config) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclCommSplit");
  on_its_device(c, "ncclCommSplit");
  *out = nullptr;
  if (e.fails()) return e.code();
  if (!e.free() || !good(config)) return 4;
  string number = std::to_string(c->splits++), base = c->dir + "/split" + number;
  Comm *made = nullptr;
  if (color >= 0) {
    made = new Comm;
    live_comms++;
    made->device = c->device;
  }
  *out = made;
  c->splitting = true;
  if (c->splitter.joinable()) c->splitter.join();
  bool hanging = e.fault.kind == HANG;
  if (e.fault.kind == PROGRESS) c->polls = e.fault.argument;
  c->splitter = std::thread([=] {
    if (hanging) { hang(c); return; }
    write_file(base + "-" + std::to_string(c->rank), std::to_string(color) + " " + std::to_string(key));
    std::vector<int> keys;
    for (int rank = 0; rank < c->world; rank++) {
      string theirs;
      if (!wait_file(c, base + "-" + std::to_string(rank), &theirs)) return;
      int their_color, their_key;
      sscanf(theirs.c_str(), "%d %d", &their_color, &their_key);
      if (their_color == color) keys.push_back(their_key);
    }
    if (made) {
      for (int other : keys) made->rank += other < key;
      made->world = keys.size();
      made->dir = c->dir + "-" + number + "-" + std::to_string(color);
      mkdir(made->dir.c_str(), 0700);
      made->starter = std::thread([=] { start(made, "split"); });
    }
    c->splitting = false;
  });
  return 7;
}
int ncclCommRegister(void *comm, void *memory, size_t, void **handle) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclCommRegister");
  on_its_device(c, "ncclCommRegister");
  if (e.fails()) return e.code();
  c->registered.insert(memory);
  *handle = memory;
  return 0;
}
int ncclCommDeregister(void *comm, void *handle) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclCommDeregister");
  on_its_device(c, "ncclCommDeregister");
  if (!c->registered.erase(handle)) violation("deregistered what was not registered");
  return 0;
}
int ncclMemAlloc(void **memory, size_t bytes) {
  if (here() < 0) violation("memory without a context");
  Fault f = due("ncclMemAlloc", here());
  if (f.kind == RETURN) return f.argument;
  if (bytes == 0) return 4;
  live_memory++;
  if (posix_memalign(memory, 4096, bytes)) return 2;
  // Makes reads of memory that was never written visible.
  memset(*memory, 0xa5, bytes);
  watch(*memory, bytes);
  return 0;
}
int ncclMemFree(void *memory) {
  due("ncclMemFree", here());
  live_memory--;
  unwatch(memory);
  memset(memory, 0x5a, malloc_usable_size(memory));
  free(memory);
  return 0;
}
int ncclGroupStart() { depth++; return 0; }
int ncclGroupEnd() {
  if (depth == 0) violation("the end of a group that has not begun");
  return --depth == 0 ? flush() : 0;
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *comm) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclRedOpCreatePreMulSum");
  if (e.fails()) return e.code();
  if (!e.free() || residence != 1) return 4;
  double factor;
  uint16_t half;
  float single;
  memcpy(&half, scalar, 2), memcpy(&single, scalar, 4);
  switch (type) {
    case 6: factor = from_half(half); break;
    case 9: factor = from_bf16(half); break;
    case 7: factor = single; break;
    case 8: memcpy(&factor, scalar, 8); break;
    default: return 4;
  }
  *op = c->next_operator++;
  c->operators[*op] = {type, {5, factor}};
  return 0;
}
int ncclRedOpDestroy(int op, void *comm) {
  Comm *c = static_cast<Comm *>(comm);
  Enter e(c, "ncclRedOpDestroy");
  if (!c->operators.erase(op)) violation("an operator destroyed that does not exist");
  return 0;
}

#define BYTES(p) static_cast<const char *>(p), static_cast<char *>(const_cast<void *>(static_cast<const void *>(r)))
int ncclAllReduce(const void *s, void *r, size_t n, int type, int op, void *comm, void *stream) {
  return issue("ncclAllReduce", static_cast<Comm *>(comm), stream, {ALL_REDUCE, BYTES(s), n, type, {}, 0, 0}, op);
}
int ncclReduce(const void *s, void *r, size_t n, int type, int op, int root, void *comm, void *stream) {
  return issue("ncclReduce", static_cast<Comm *>(comm), stream, {REDUCE, BYTES(s), n, type, {}, root, 0}, op);
}
int ncclBroadcast(const void *s, void *r, size_t n, int type, int root, void *comm, void *stream) {
  return issue("ncclBroadcast", static_cast<Comm *>(comm), stream, {BROADCAST, BYTES(s), n, type, {}, root, 0}, 0);
}
int ncclAllGather(const void *s, void *r, size_t n, int type, void *comm, void *stream) {
  return issue("ncclAllGather", static_cast<Comm *>(comm), stream, {ALL_GATHER, BYTES(s), n, type, {}, 0, 0}, 0);
}
int ncclReduceScatter(const void *s, void *r, size_t n, int type, int op, void *comm, void *stream) {
  return issue("ncclReduceScatter", static_cast<Comm *>(comm), stream, {REDUCE_SCATTER, BYTES(s), n, type, {}, 0, 0}, op);
}
int ncclSend(const void *s, size_t n, int type, int peer, void *comm, void *stream) {
  void *r = nullptr;
  return issue("ncclSend", static_cast<Comm *>(comm), stream, {SEND, BYTES(s), n, type, {}, peer, 0}, 0);
}
int ncclRecv(void *r, size_t n, int type, int peer, void *comm, void *stream) {
  return issue("ncclRecv", static_cast<Comm *>(comm), stream, {RECV, BYTES(r), n, type, {}, peer, 0}, 0);
}

int fake_live_comms() { return live_comms; }
int fake_last_ids() { return last_ids; }
int fake_live_memory() { return int(live_memory); }
}
