// Launches a kernel by name on the CPU. The tests compile it after `amp.cu`.

// The sizes that `scaler.rs` and `mod.rs` assume.
static_assert(sizeof(Scaler) == 80 && sizeof(UnscaleJob) == 40 && sizeof(CastJob) == 24 &&
              sizeof(Tensor) == 24 && sizeof(Chunk) == 8, "");

extern "C" const char* shim_launch(const char* kernel, u32, const void* job, u32 blocks,
                                   u64 seed, const u64* ranges, u32 range_count) {
  void (*body)(const void*) = nullptr;
#ifdef FROM
  if (!strcmp(kernel, "cast")) body = [](const void* job) { cast(*(const CastJob*)job); };
#else
  if (!strcmp(kernel, "unscale")) body = [](const void* job) { unscale(*(const UnscaleJob*)job); };
  if (!strcmp(kernel, "update")) body = [](const void* job) { update(*(const UnscaleJob*)job); };
#endif
  if (!body) return "no such kernel";
  return shim::launch(body, job, blocks, THREADS, seed, ranges, range_count);
}
