// cuBLAS: C = alpha op(A) op(B) + beta C, matrices by columns, sums in f32 (in f64 for f64). With a bias, of C's type, it
// is added to each column.

struct Blas {
  void *stream;
  int device;
};

namespace blas {

enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };
enum { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77, COMPUTE_64F = 70, INVALID_VALUE = 7 };

struct Matrix {
  char *at;
  int type;
  bool transposed;
  size_t rows, columns, leading, stride;  // rows and columns as stored

  size_t size() const { return type == F64 ? 8 : type == F32 ? 4 : 2; }
  size_t bytes(size_t batch) const {
    return ((batch - 1) * stride + (columns - 1) * leading + rows) * size();
  }
  char *element(size_t batch, size_t row, size_t column) const {
    if (transposed) std::swap(row, column);
    return at + (batch * stride + column * leading + row) * size();
  }
};

template <class T> static T load(const Matrix &m, const char *at) {
  auto raw = [&](auto x) { memcpy(&x, at, sizeof x); return x; };
  switch (m.type) {
    case F32: return T(raw(float()));
    case F64: return T(raw(double()));
    case F16: return from_half(raw(uint16_t()));
    default: return from_bf16(raw(uint16_t()));
  }
}
template <class T> static void store(const Matrix &m, char *at, T x) {
  float f = float(x);
  double d = double(x);
  uint16_t h = m.type == F16 ? to_half(f) : to_bf16(f);
  memcpy(at, m.type == F64 ? (void *)&d : m.type == F32 ? (void *)&f : (void *)&h, m.size());
}

template <class T>
static void multiply(size_t batch, size_t m, size_t n, size_t k, T alpha, const Matrix &a, const Matrix &b,
                     T beta, const Matrix &c, const char *bias = nullptr) {
  std::vector<T> left(m * k), column(m);
  for (size_t i = 0; i < batch; i++) {
    for (size_t p = 0; p < k; p++)
      for (size_t row = 0; row < m; row++) left[p * m + row] = load<T>(a, a.element(i, row, p));
    for (size_t j = 0; j < n; j++) {
      std::fill(column.begin(), column.end(), T(0));
      for (size_t p = 0; p < k; p++) {
        T factor = load<T>(b, b.element(i, p, j));
        for (size_t row = 0; row < m; row++) column[row] += left[p * m + row] * factor;
      }
      for (size_t row = 0; row < m; row++) {
        char *at = c.element(i, row, j);
        // With a beta of 0 nothing is read.
        T x = alpha * column[row] + (beta == 0 ? T(0) : beta * load<T>(c, at));
        store(c, at, bias ? x + load<T>(c, bias + row * c.size()) : x);
      }
    }
  }
}

template <class T>
static int gemm(const char *call, Blas *handle, int m, int n, int k, T alpha, Matrix a, Matrix b, T beta,
                Matrix c, int batch) {
  if (m < 0 || n < 0 || k < 0 || batch < 0) return INVALID_VALUE;
  if (here() != handle->device) violation(string(call) + " while the context of another device is current");
  for (Matrix *x : {&a, &b, &c}) {
    if (x->transposed) std::swap(x->rows, x->columns);
    if (x->leading < std::max<size_t>(x->rows, 1)) return INVALID_VALUE;
  }
  if (m == 0 || n == 0 || batch == 0) return 0;
  std::vector<Access> accesses = {within(call, c.at, c.bytes(batch), true)};
  if (k) {
    accesses.push_back(within(call, a.at, a.bytes(batch), false));
    accesses.push_back(within(call, b.at, b.bytes(batch), false));
  }
  fake_gpu_launched()[0] += !stream_of(handle->stream)->graph;
  stream_of(handle->stream)->push([=] { multiply<T>(batch, m, n, k, alpha, a, b, beta, c); }, accesses);
  return 0;
}

}  // namespace blas

extern "C" {
int cublasCreate_v2(Blas **handle) { *handle = new Blas{nullptr, here()}; return 0; }
int cublasDestroy_v2(Blas *handle) { delete handle; return 0; }
int cublasSetStream_v2(Blas *handle, void *stream) { handle->stream = stream; return 0; }

int cublasGemmStridedBatchedEx(Blas *handle, int ta, int tb, int m, int n, int k, const void *alpha,
                               const void *a, int type_a, int lda, long long stride_a, const void *b,
                               int type_b, int ldb, long long stride_b, const void *beta, void *c,
                               int type_c, int ldc, long long stride_c, int batch, int compute, int) {
  const bool floats = type_a == blas::F32 && type_b == blas::F32;
  if (floats) due(compute == blas::COMPUTE_32F ? "a product of f32" : "a product in TF32", here());
  for (int type : {type_a, type_b, type_c})
    if ((compute != blas::COMPUTE_32F && !(floats && compute == blas::COMPUTE_32F_FAST_TF32)) || (type != blas::F32 && type != blas::F16 && type != blas::BF16))
      violation("cublasGemmStridedBatchedEx of types that the fake has not: compute " +
                std::to_string(compute) + ", " + std::to_string(type));
  return blas::gemm<float>(
      "cublasGemmStridedBatchedEx", handle, m, n, k, *static_cast<const float *>(alpha),
      {(char *)a, type_a, ta != 0, size_t(m), size_t(k), size_t(lda), size_t(stride_a)},
      {(char *)b, type_b, tb != 0, size_t(k), size_t(n), size_t(ldb), size_t(stride_b)},
      *static_cast<const float *>(beta),
      {(char *)c, type_c, false, size_t(m), size_t(n), size_t(ldc), size_t(stride_c)}, batch);
}
int cublasDgemmStridedBatched(Blas *handle, int ta, int tb, int m, int n, int k, const double *alpha,
                              const double *a, int lda, long long stride_a, const double *b, int ldb,
                              long long stride_b, const double *beta, double *c, int ldc,
                              long long stride_c, int batch) {
  return blas::gemm<double>(
      "cublasDgemmStridedBatched", handle, m, n, k, *alpha,
      {(char *)a, blas::F64, ta != 0, size_t(m), size_t(k), size_t(lda), size_t(stride_a)},
      {(char *)b, blas::F64, tb != 0, size_t(k), size_t(n), size_t(ldb), size_t(stride_b)}, *beta,
      {(char *)c, blas::F64, false, size_t(m), size_t(n), size_t(ldc), size_t(stride_c)}, batch);
}
}
