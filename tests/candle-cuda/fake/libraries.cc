// CUDA's libraries for candle over the memory of the host, in one: the driver, NVRTC and NCCL that
// `benches/gpu` tests with, and here what candle and its cudarc ask of the driver besides; cuBLAS, cuBLASLt,
// cuRAND and cuDNN beside it. Slow, obvious, strict: what it does not know ends the process with a word.

#define LIKE_CUDARC
#include "../../../benches/gpu/tests/fake_gpu/fake.cc"

extern "C" {
int cuDeviceTotalMem_v2(size_t *bytes, int) { *bytes = size_t(1) << 34; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = size_t(1) << 34; return 0; }
int cuModuleUnload(void *) { return 0; }
// NVIDIA's NVRTC asks for tables that are no part of the interface, and goes on without.
int cuGetExportTable(const void **, const void *) { return 1; }

int cuCtxSynchronize() {
  std::vector<Stream *> all;
  {
    Lock lock(streams_m);
    all = streams;
  }
  int error = 0;
  for (Stream *stream : all)
    if (stream->device == here() && !error) error = cuStreamSynchronize(stream);
  return error;
}
}

// Memory that a library's call touches must be the device's.
static Access within(const char *call, const void *at, size_t bytes, bool write) {
  Access a = access_of(call, uintptr_t(at), write ? WRITES : READS);
  if (a.from + bytes > a.to) violation(string(call) + " touches what lies behind its memory");
  return {a.from, a.from + bytes, write, call};
}

#include "blas.cc"
#include "lt.cc"
#include "rand.cc"
#include "dnn.cc"
