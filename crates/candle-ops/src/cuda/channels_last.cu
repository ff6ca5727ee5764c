// Kernels over channels-last images, compiled after `images.cu`.

/// Matrices, one after another, each to be transposed.
struct TransposeJob { u64 x, y; u32 count, rows, columns, unused; };

/// A block takes a tile of `WARP` rows and columns at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 2) transpose(const TransposeJob job) {
  __shared__ T::Bits tile[WARP][WARP + 1];
  const u32 across = (job.columns + WARP - 1) / WARP, down = (job.rows + WARP - 1) / WARP;
  for (u32 task = blockIdx.x; task < job.count * down * across; task += gridDim.x) {
    const u32 strip = task / across, row = strip % down * WARP, column = (task - strip * across) * WARP;
    const u64 base = (u64)(strip / down) * job.rows * job.columns;
    const u64 from = at(job.x, base), to = at(job.y, base);
    __syncthreads(); // The previous tile was read.
    for (u32 i = threadIdx.x / WARP; i < WARP && row + i < job.rows; i += THREADS / WARP)
      if (column + lane() < job.columns) tile[i][lane()] = T::load(at(from, (u64)(row + i) * job.columns + column + lane()));
    __syncthreads();
    for (u32 i = threadIdx.x / WARP; i < WARP && column + i < job.columns; i += THREADS / WARP)
      if (row + lane() < job.rows) T::store(at(to, (u64)(column + i) * job.rows + row + lane()), tile[lane()][i]);
  }
}
