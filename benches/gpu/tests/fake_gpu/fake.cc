// A fake GPU in host memory, for tests: CUDA's driver and NVRTC, based on the fake NCCL of `collective`'s tests,
// which has the streams, events and ordering rules.
//
// NVRTC compiles the kernels with the system's C++ compiler and the shim of cuda-rt's tests; a "cubin" is the path
// of the compiled library. So everything above the hardware runs: tables of functions, the cubin cache, arguments,
// streams, the kernels' arithmetic. A kernel that accesses unallocated memory, or in which threads hang at a
// barrier, aborts the process with a message.
//
// Candle's kernels, which `tests/candle-cuda/fake/nvcc` compiles to modules, may have any launch configuration;
// their pointers must be device memory, and accesses must be ordered, as for copies.
//
// The macro LIKE_CUDARC adds what candle's cudarc needs: allocations of 0 bytes, copies to pageable memory that are
// done when the call returns, device synchronization; and has no memory for what is a GiB or more at once.
//
// The environment variable FAKE_GPU_DRIVER is the driver's version, 1130 for CUDA 1.13; code of a newer compiler is
// rejected. FAKE_GPU_CAPABILITY is the GPU's compute capability, by default 90; NVRTC compiles for 7.5, 8.0 and 9.0,
// for a newer GPU only to PTX. With FAKE_GPU_TRUSTS kernels may access any memory, for callers that do not register theirs. The macro
// KERNELS is the folder of `ptx.h` and `shim.h`, FOLDER the folder for compiled kernels.

#define FAKE_GPU
#include "../../../../crates/collective/tests/it/nccl/fake.cc"

#include <dlfcn.h>

#include <array>
#include <fstream>
#include <regex>
#include <sstream>

#include "graph.cc"

static string read_all(const string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) violation("no file " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Kernels of one library, from the lines that `compile` appends, or from candle's `device.h`, which describes each
// argument: its size, and whether it is a value, an input or an output.
using Launcher = const char *(*)(const char *, const void *, unsigned, unsigned long long,
                                 const unsigned long long *, unsigned);
enum { VALUE, READS, WRITES };
struct Argument { unsigned size, kind; };
struct Module {
  string path;
  Launcher launch;
  const unsigned long long *(*moved)();
  unsigned (*size)(const char *);
  int (*arguments)(const char *, const Argument **);
  const char *(*run)(const char *, void **, const unsigned *, unsigned);
};
struct Function {
  Module *module;
  string name;
};
static std::map<std::pair<string, int>, unsigned> &grids = *new std::map<std::pair<string, int>, unsigned>;
static thread_local std::map<string, uint64_t> launched, launches;
// Bytes that kernels launched by this thread have read, and written: counted in the streams' threads.
using Moved = std::array<std::atomic<uint64_t>, 2>;
static thread_local std::map<string, std::shared_ptr<Moved>> moved;
static std::shared_ptr<Moved> moved_by(const string &kernel) {
  std::shared_ptr<Moved> &of = moved[kernel];
  if (!of) of = std::make_shared<Moved>();
  return of;
}

// Frees in stream order: only earlier work may use the memory.
static int release(Stream *s, uintptr_t at) {
  if (s->graph || of_a_graph(at)) return release_in_graph(s, at);
  uintptr_t end = 0;
  {
    Lock order(ordering);
    auto found = watched.find(at);
    if (found == watched.end()) violation("memory freed that was not allocated");
    end = found->second;
    born.erase(at);
  }
  s->push([=] {
    Lock order(ordering);
    watched.erase(at);
    for (size_t i = 0; i < used.size();) {
      if (used[i].from < end && at < used[i].to) used.erase(used.begin() + i);
      else i++;
    }
    memset((void *)at, 0x5a, end - at);
    free((void *)at);
  }, {{at, end, true, "free"}});
  return 0;
}

// The range that a kernel may access by a pointer: from there to the end of the allocation.
static Access access_of(const string &kernel, uintptr_t at, unsigned kind) {
  Lock order(ordering);
  auto next = watched.upper_bound(at);
  if (next == watched.begin() || std::prev(next)->second < at)
    violation("kernel " + kernel + " is given an address that is no memory");
  return {at, std::prev(next)->second, kind == WRITES, "kernel"};
}

// Memory that our kernels may access: begin, end, begin, end, ...
static std::vector<unsigned long long> lent() {
  static const bool trusts = getenv("FAKE_GPU_TRUSTS");
  if (trusts) return {4096, ~0ull};
  std::vector<unsigned long long> ranges;
  Lock order(ordering);
  for (auto &[from, to] : watched) ranges.push_back(from), ranges.push_back(to);
  return ranges;
}
// The memory that one kernel may access: every word of its argument that is an address. With `written` all of it
// counts as written; otherwise as read, like its tables, and its writes are unknown.
static std::vector<Access> touched_by(const string &job, bool written) {
  std::vector<Access> accesses;
  Lock order(ordering);
  for (size_t i = 0; i + 8 <= job.size(); i += 8) {
    uintptr_t at = 0;
    memcpy(&at, job.data() + i, sizeof at);
    auto next = watched.upper_bound(at);
    if (next != watched.begin() && std::prev(next)->second > at)
      accesses.push_back({at, std::prev(next)->second, written, "kernel of a job"});
  }
  return accesses;
}

// A kernel of `device.h` with a copy of its arguments.
static void launch(Function *function, const std::array<unsigned, 6> &sizes, unsigned shared, void *stream,
                   void **arguments) {
  const Argument *kinds = nullptr;
  int count = function->module->arguments(function->name.c_str(), &kinds);
  std::vector<string> values;
  std::vector<Access> accesses;
  for (int i = 0; i < count; i++) {
    values.emplace_back(static_cast<char *>(arguments[i]), kinds[i].size);
    uintptr_t at = 0;
    if (kinds[i].kind != VALUE) memcpy(&at, arguments[i], sizeof at);
    if (at) accesses.push_back(access_of(function->name, at, kinds[i].kind));
  }
  stream_of(stream)->push([=]() mutable {
    std::vector<void *> pointers;
    for (string &value : values) pointers.push_back(value.data());
    const char *fault = function->module->run(function->name.c_str(), pointers.data(), sizes.data(), shared);
    if (fault) violation("kernel " + function->name + ": " + fault);
  }, accesses);
}

// Before the path of a library: of the same length.
static const string CUBIN = "fake cubin ", PTX = "fake PTX   ";

static int capability() {
  const char *given = getenv("FAKE_GPU_CAPABILITY");
  return given ? atoi(given) : 90;
}

extern "C" {
int cuDriverGetVersion(int *version) {
  const char *given = getenv("FAKE_GPU_DRIVER");
  *version = given ? atoi(given) : 13000;
  return 0;
}
// By which CUDA's runtime looks for the driver: PyTorch then finds no GPU.
int cuGetProcAddress_v2(const char *, void **function, int, uint64_t, void *) {
  *function = nullptr;
  return 500;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
  // Multiprocessors; compute capability; memory in order of streams.
  *value = attribute == 16 ? 1 : attribute == 75 ? capability() / 10 : attribute == 76 ? capability() % 10 : attribute == 115;
  return 0;
}
int cuDeviceGetName(char *name, int length, int) {
  snprintf(name, length, "fake GPU");
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = current.empty() ? nullptr : current.back();
  return 0;
}
int cuCtxSetCurrent(void *context) {
  if (!current.empty()) current.pop_back();
  if (context) current.push_back(static_cast<Context *>(context));
  return 0;
}
#ifndef LIKE_CUDARC
int cuCtxSynchronize() { violation("a wait for the whole device"); return 0; }
#endif
int cuGetErrorString(int error, const char **text) {
  *text = "of the fake";
  return error ? 0 : 1;
}
int cuMemAllocAsync(uintptr_t *memory, size_t bytes, void *stream) {
  Fault f = due("cuMemAllocAsync", here());
  if (f.kind == RETURN) return f.argument;
#ifdef LIKE_CUDARC
  launched["allocations of 0 bytes"] += bytes == 0;
  bytes += bytes == 0;
  // Out of memory: one of a GiB.
  if (bytes >> 30) {
    launched["allocations refused"]++;
    return 2;
  }
#endif
  if (here() < 0 || bytes == 0) return 1;
  Stream *s = stream_of(stream);
  if (int error = unfit_for_capture(s)) return error;
  void *made = nullptr;
  if (posix_memalign(&made, 256, bytes)) return 2;
  // NaN in every float type, so that unwritten memory shows.
  memset(made, 0xff, bytes);
  watch(made, bytes);
  allocated(s, uintptr_t(made), bytes);
  *memory = uintptr_t(made);
  return 0;
}
int cuMemFreeAsync(uintptr_t memory, void *stream) {
  Fault f = due("cuMemFreeAsync", here());
  if (f.kind == RETURN) return f.argument;
  return release(stream_of(stream), memory);
}
int cuMemAlloc_v2(uintptr_t *memory, size_t bytes) {
  if (int error = unsafe_call()) return error;
  return cuMemAllocAsync(memory, bytes, nullptr);
}
int cuMemFree_v2(uintptr_t memory) { return cuMemFreeAsync(memory, nullptr); }
// One pool for all devices. As long as it may not keep memory, each wait of the host returns it to the system.
static std::atomic<uint64_t> pool_threshold;
int cuDeviceGetDefaultMemPool(void **pool, int) {
  *pool = &pool_threshold;
  return 0;
}
int cuMemPoolSetAttribute(void *pool, int attribute, const void *value) {
  if (pool != &pool_threshold || attribute != 4) return 1;
  uint64_t threshold;
  memcpy(&threshold, value, sizeof threshold);
  pool_threshold = threshold;
  return 0;
}
int cuStreamSynchronize(void *stream) {
  Stream *s = stream_of(stream);
  if (s->graph) return not_in_capture(s);
  due("cuStreamSynchronize", here());
  if (pool_threshold == 0) due("memory returned", here());
  fake_stream_sync(s);
  Lock order(ordering);
  Lock lock(s->m);
  merge(witnessed, s->clock);
  witnessed[s] = s->done;
  return 0;
}
// Bytes that this thread copied to and from devices.
uint64_t *fake_gpu_copied() {
  static thread_local uint64_t copied[2];
  return copied;
}

// Pinned host memory.
static std::map<uintptr_t, size_t> &pinned = *new std::map<uintptr_t, size_t>;
static bool is_pinned(const void *at) {
  Lock lock(books);
  auto next = pinned.upper_bound(uintptr_t(at));
  return next != pinned.begin() && uintptr_t(at) < std::prev(next)->first + std::prev(next)->second;
}
int cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
  Fault f = due("cuMemHostAlloc", here());
  if (f.kind == RETURN) return f.argument;
  if (int error = unsafe_call()) return error;
  *memory = malloc(bytes);
  Lock lock(books);
  pinned[uintptr_t(*memory)] = bytes;
  return 0;
}
int cuMemFreeHost(void *memory) {
  Lock lock(books);
  auto found = pinned.find(uintptr_t(memory));
  if (found == pinned.end()) violation("pinned memory freed that was not allocated");
  memset(memory, 0x5a, found->second);
  pinned.erase(found);
  free(memory);
  return 0;
}
int cuEventSynchronize(void *event) {
  due("cuEventSynchronize", here());
  if (int error = unsafe_call()) return error;
  while (cuEventQuery(event) == 600) usleep(20);
  return 0;
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, void *stream) {
  // A GPU would read it again at each launch of the graph.
  if (stream_of(stream)->graph) violation("a copy of pageable memory in a capture");
  fake_gpu_copied()[0] += bytes;
  // Read when the stream reaches the copy: GPUs guarantee no more, also for pageable memory.
  std::function<void()> copy = [=] { memcpy((void *)to, from, bytes); };
#ifdef LIKE_CUDARC
  if (!is_pinned(from)) {
    due("a copy of pageable memory", here());
    string held(static_cast<const char *>(from), bytes);
    copy = [=] { memcpy((void *)to, held.data(), bytes); };
  }
#endif
  stream_of(stream)->push(copy, {{to, to + bytes, true, "copy to the device"}});
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, void *stream) {
  if (stream_of(stream)->graph) return not_in_capture(stream_of(stream));
  fake_gpu_copied()[1] += bytes;
  stream_of(stream)->push([=] { memcpy(to, (void *)from, bytes); },
                          {{from, from + bytes, false, "copy from the device"}});
#ifdef LIKE_CUDARC
  // Copies to pinned memory alone run later.
  if (!is_pinned(to)) cuStreamSynchronize(stream);
#endif
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  Fault f = due("cuModuleLoadData", here());
  if (f.kind == RETURN) return f.argument;
  if (capturing) return not_in_capture(capturing);
  string text = static_cast<const char *>(image);
  if (text.rfind(CUBIN, 0) != 0 && text.rfind(PTX, 0) != 0) return 200;
  size_t end = std::min(text.find('\n'), text.size());
  int driver = 0;
  cuDriverGetVersion(&driver);
  if (atoi(text.c_str() + end) > driver) return 222;
  Module *made = new Module{text.substr(11, end - 11), nullptr, nullptr, nullptr, nullptr, nullptr};
  *module = made;
  if (made->path == "none") return 0;
  void *library = dlopen(made->path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) violation(dlerror());
  made->launch = Launcher(dlsym(library, "fake_launch"));
  made->moved = decltype(made->moved)(dlsym(library, "fake_moved"));
  made->size = decltype(made->size)(dlsym(library, "fake_size"));
  made->arguments = decltype(made->arguments)(dlsym(library, "fake_arguments"));
  made->run = decltype(made->run)(dlsym(library, "fake_run"));
  return 0;
}
int cuModuleGetFunction(void **function, void *of, const char *name) {
  Fault f = due("cuModuleGetFunction", here());
  if (f.kind == RETURN) return f.argument;
  Module *module = static_cast<Module *>(of);
  const Argument *arguments;
  bool found = module->size ? module->size(name) : module->run && module->arguments(name, &arguments) >= 0;
  if (!found) {
    fprintf(stderr, "fake GPU: no kernel %s in %s\n", name, module->path.c_str());
    return 500;
  }
  *function = new Function{module, name};
  return 0;
}
int cuLaunchKernel(void *of, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  Function *function = static_cast<Function *>(of);
  int device = here();
  Fault f = due(function->name, device);
  if (f.kind == RETURN) return f.argument;
  if (int error = unfit_for_capture(stream_of(stream))) return error;
  fake_gpu_launched()[0] += !stream_of(stream)->graph;
  launches[function->name]++;
  if (function->module->run && x && y && z && a && b && c && a * b * c <= 1024 && !extra)
    return launch(function, {x, y, z, a, b, c}, shared, stream, arguments), 0;
  if (x == 0 || y != 1 || z != 1 || a != 256 || b != 1 || c != 1 || shared || extra)
    violation("a launch of another form than our kernels have");
  { Lock lock(books); grids[{function->name, device}] = x; }
  launched[function->name] += x;
  string job(static_cast<char *>(arguments[0]), function->module->size(function->name.c_str()));
  static std::atomic<unsigned long long> seed{1};
  unsigned long long number = seed++;
  // A captured kernel may access only memory that exists now.
  bool captured = stream_of(stream)->graph;
  std::vector<unsigned long long> then;
  std::vector<Access> accesses = touched_by(job, captured);
  if (captured) then = lent();
  std::shared_ptr<Moved> bytes = moved_by(function->name);
  stream_of(stream)->push([=] {
    std::vector<unsigned long long> ranges = captured ? then : lent();
    const char *fault = function->module->launch(function->name.c_str(), job.data(), x, number,
                                                 ranges.data(), ranges.size());
    if (fault) violation("kernel " + function->name + ": " + fault);
    for (int i = 0; i < 2; i++) (*bytes)[i] += function->module->moved()[i];
  }, accesses);
  return 0;
}
// Number of blocks of our kernels that this thread has launched.
uint64_t fake_gpu_blocks(const char *kernel) { return launched[kernel]; }
// Number of launches of a kernel, also of candle's, by this thread.
uint64_t fake_gpu_launches(const char *kernel) { return launches[kernel]; }
// Number of bytes that a kernel of ours, launched by this thread, has read, or written: of launches that are done.
uint64_t fake_gpu_moved(const char *kernel, int written) { return (*moved_by(kernel))[written]; }

// Number of blocks of the kernel's last launch on a device.
unsigned fake_grid(const char *kernel, int device) {
  Lock lock(books);
  return grids[{kernel, device}];
}
}

// NVRTC.

struct Program { string source, log, code; };

// Code appended to the kernels: a launch by name. Kernels that macros exclude are weak symbols, and null.
static string launchers(const string &source) {
  static const std::regex kernel("__global__ void __launch_bounds__\\([^)]*\\) (\\w+)\\(const (\\w+) job\\)");
  string declared, launches, sizes;
  for (std::sregex_iterator at(source.begin(), source.end(), kernel), end; at != end; ++at) {
    string name = (*at)[1], job = (*at)[2];
    declared += "extern \"C\" __attribute__((weak)) void " + name + "(const " + job + ");\n";
    launches += "  if (!strcmp(kernel, \"" + name + "\"))\n    body = [](const void* job) { " + name +
                "(*(const " + job + "*)job); };\n";
    sizes += "  if (!strcmp(kernel, \"" + name + "\")) return " + name + " ? sizeof(" + job + ") : 0;\n";
  }
  return declared +
         "extern \"C\" const char* fake_launch(const char* kernel, const void* job, u32 blocks, u64 seed,\n"
         "                                   const u64* ranges, u32 count) {\n"
         "  void (*body)(const void*) = nullptr;\n" + launches +
         "  return shim::launch(body, job, blocks, THREADS, seed, ranges, count);\n}\n"
         "extern \"C\" const u64* fake_moved() { return shim::moved; }\n"
         "extern \"C\" u32 fake_size(const char* kernel) {\n" + sizes + "  return 0;\n}\n";
}

// A copy of this library with the name `libnvrtc.so.N` is NVRTC 1.N, older than any real one.
static std::pair<int, int> compiler_version() {
  static char own;
  Dl_info info;
  string name = dladdr(&own, &info) ? info.dli_fname : "";
  size_t at = name.rfind("libnvrtc.so.");
  return at == string::npos ? std::make_pair(0, 1) : std::make_pair(1, atoi(name.c_str() + at + 12));
}

extern "C" {
int nvrtcVersion(int *major, int *minor) { std::tie(*major, *minor) = compiler_version(); return 0; }
static const int ARCHS[] = {75, 80, 90};
int nvrtcGetNumSupportedArchs(int *count) { *count = std::size(ARCHS); return 0; }
int nvrtcGetSupportedArchs(int *archs) { std::copy(std::begin(ARCHS), std::end(ARCHS), archs); return 0; }
const char *nvrtcGetErrorString(int code) { return code == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcCreateProgram(void **program, const char *source, const char *, int headers, const char **, const char **) {
  if (headers) return 1;
  *program = new Program{source, "", ""};
  return 0;
}
int nvrtcCompileProgram(void *of, int count, const char **options) {
  Program *program = static_cast<Program *>(of);
  string ptx = read_all(KERNELS "/ptx.h"), flags, all;
  if (program->source.rfind(ptx, 0) != 0) violation("a source that does not begin with ptx.h");
  string kind;
  for (int i = 0; i < count; i++) {
    string option = options[i];
    for (int arch : ARCHS) {
      // Machine code that the GPU runs, or PTX that its driver compiles.
      string number = std::to_string(arch);
      if (option == "--gpu-architecture=sm_" + number && arch == capability()) kind = CUBIN;
      if (option == "--gpu-architecture=compute_" + number && arch <= capability()) kind = PTX;
    }
    if (option.rfind("-D", 0) == 0) flags += " '" + option + "'";
  }
  if (kind.empty()) return 5;
  string kernels = program->source.substr(ptx.size());
  string text = read_all(KERNELS "/shim.h") + kernels + launchers(kernels);
  string base = string(FOLDER) + "/kernels-" + std::to_string(std::hash<string>()(text + flags));
  // Threads that compile the same program share a file.
  static std::mutex compiling;
  std::lock_guard<std::mutex> alone(compiling);
  if (access((base + ".so").c_str(), F_OK) != 0) {
    string own = base + "." + std::to_string(getpid());
    std::ofstream(own + ".cc") << text;
    const char *compiler = getenv("CXX");
    string command = string(compiler ? compiler : "c++") +
                     " -std=c++17 -O1 -ffp-contract=off -shared -fPIC -Wl,-Bsymbolic -w -U_FORTIFY_SOURCE" +
                     flags + " -o " + own + ".so " + own + ".cc > " + own + ".log 2>&1";
    int status = system(command.c_str());
    program->log = read_all(own + ".log");
    unlink((own + ".log").c_str());
    unlink((own + ".cc").c_str());
    if (status) return 6;
    rename((own + ".so").c_str(), (base + ".so").c_str());
  }
  auto [major, minor] = compiler_version();
  program->code = kind + base + ".so\n" + std::to_string(1000 * major + 10 * minor);
  return 0;
}
int nvrtcDestroyProgram(void **program) { delete static_cast<Program *>(*program); return 0; }
static int give(const string &text, char *into) { memcpy(into, text.c_str(), text.size() + 1); return 0; }
int nvrtcGetProgramLogSize(void *of, size_t *n) { *n = static_cast<Program *>(of)->log.size() + 1; return 0; }
int nvrtcGetProgramLog(void *of, char *into) { return give(static_cast<Program *>(of)->log, into); }
static bool is_ptx(void *of) { return static_cast<Program *>(of)->code.rfind(PTX, 0) == 0; }
int nvrtcGetPTXSize(void *of, size_t *n) { *n = static_cast<Program *>(of)->code.size() + 1; return 0; }
int nvrtcGetPTX(void *of, char *into) { return give(static_cast<Program *>(of)->code, into); }
int nvrtcGetCUBINSize(void *of, size_t *n) { return is_ptx(of) ? *n = 0 : nvrtcGetPTXSize(of, n); }
int nvrtcGetCUBIN(void *of, char *into) { return is_ptx(of) ? 0 : nvrtcGetPTX(of, into); }
}
