// The last part of the file that the shim compiles: launches the kernels of one rule, for all
// types.

// The sizes in `table.rs`.
static_assert(sizeof(Tensor) == 112 && sizeof(Group) == 112 && sizeof(Progress) == 24 &&
              sizeof(Ctl) == 80 + 48 && sizeof(Job) == 120 && sizeof(Fold) == 12 &&
              sizeof(Chunk) == 8, "");

template <class G, class W, bool COPY>
static const char* launch_of(const char* kernel, const Job* job, u32 blocks, u64 seed,
                             const u64* ranges, u32 range_count) {
  void (*body)(const void*) = nullptr;
#ifdef RULE
  if (!strcmp(kernel, "step")) body = [](const void* job) { step_of<RULE, G, W, COPY>(*(const Job*)job); };
#if SWEEPS == 2
  if (!strcmp(kernel, "first_sweep"))
    body = [](const void* job) { first_sweep_of<RULE, G, W, COPY>(*(const Job*)job); };
  if (!strcmp(kernel, "row_factors")) body = [](const void* job) { row_factors_of<RULE>(*(const Job*)job); };
#endif
#else
  if (!strcmp(kernel, "finish_grad_stats")) body = [](const void* job) { finish_grad_stats(*(const Job*)job); };
  if (!strcmp(kernel, "average")) body = [](const void* job) { average(*(const Job*)job); };
  if (!strcmp(kernel, "grad_stats")) body = [](const void* job) { grad_stats(*(const Job*)job); };
#endif
  if (!body) return "no such kernel";
  return shim::launch(body, job, blocks, THREADS, seed, ranges, range_count);
}

/// `types` is the number of the gradient's type (F32, F16, Bf16), plus 3 times the weight's, plus 9
/// with a master.
extern "C" const char* shim_launch(const char* kernel, u32 types, const Job* job, u32 blocks,
                                   u64 seed, const u64* ranges, u32 range_count) {
#define TYPES(number, G, W, COPY) \
  if (types == number) return launch_of<G, W, COPY>(kernel, job, blocks, seed, ranges, range_count);
#ifdef RULE
#ifdef ONLY
  TYPES(ONLY, GRAD, WEIGHT, MASTER)
#else
  TYPES(0, F32, F32, false) TYPES(1, F16, F32, false) TYPES(2, Bf16, F32, false)
  TYPES(3, F32, F16, false) TYPES(4, F16, F16, false) TYPES(5, Bf16, F16, false)
  TYPES(6, F32, Bf16, false) TYPES(7, F16, Bf16, false) TYPES(8, Bf16, Bf16, false)
  TYPES(12, F32, F16, true) TYPES(13, F16, F16, true) TYPES(14, Bf16, F16, true)
  TYPES(15, F32, Bf16, true) TYPES(16, F16, Bf16, true) TYPES(17, Bf16, Bf16, true)
#endif
#else
  TYPES(0, F32, F32, false)
#endif
  return "no such types";
}
