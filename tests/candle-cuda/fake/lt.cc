// cuBLASLt: D = A B of half matrices with a bias for each row, as cudarc's wrapper calls it. Enumerations are those of
// cublasLt.h 13.

namespace lt {

enum { TRANSA = 3, TRANSB = 4, TRANSC = 5, EPILOGUE = 7, BIAS_POINTER = 8 };
enum { MAX_WORKSPACE_BYTES = 1, EPILOGUE_BIAS = 4 };
struct Layout { int type; uint64_t rows, columns; int64_t leading; };
struct Product {
  int compute, scale;
  std::map<int, uint64_t> attributes;
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

static uint64_t number(const void *from, size_t bytes) {
  uint64_t x = 0;
  if (bytes != 4 && bytes != 8) violation("an attribute of cuBLASLt of " + std::to_string(bytes) + " bytes");
  memcpy(&x, from, bytes);
  return x;
}
static bool fits(const Product *p, const Layout *a, const Layout *b, const Layout *d) {
  auto at = [&](int name) { auto found = p->attributes.find(name); return found == p->attributes.end() ? 0 : found->second; };
  const bool ta = at(TRANSA), tb = at(TRANSB);
  for (auto &[name, value] : p->attributes)
    if (name != TRANSA && name != TRANSB && name != EPILOGUE && name != BIAS_POINTER && !(name == TRANSC && !value))
      violation("cuBLASLt with an attribute that the fake has not: " + std::to_string(name));
  if (p->compute != blas::COMPUTE_32F || p->scale != blas::F32 || at(EPILOGUE) != EPILOGUE_BIAS || !at(BIAS_POINTER) ||
      (d->type != blas::F16 && d->type != blas::BF16) || a->type != d->type || b->type != d->type)
    violation("cuBLASLt of types or with an epilogue that the fake has not");
  const uint64_t m = ta ? a->columns : a->rows, k = ta ? a->rows : a->columns;
  const uint64_t of_b = tb ? b->columns : b->rows, n = tb ? b->rows : b->columns;
  return m == d->rows && n == d->columns && k == of_b && a->leading >= int64_t(a->rows) &&
         b->leading >= int64_t(b->rows) && d->leading >= int64_t(d->rows);
}

}  // namespace lt

extern "C" {
int cublasLtCreate(int **device) { *device = new int(here()); return 0; }
int cublasLtDestroy(int *device) { delete device; return 0; }
int cublasLtMatrixLayoutCreate(lt::Layout **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  *made = new lt::Layout{type, rows, columns, leading};
  return 0;
}
int cublasLtMatrixLayoutDestroy(lt::Layout *layout) { delete layout; return 0; }
int cublasLtMatmulDescCreate(lt::Product **made, int compute, int scale) {
  *made = new lt::Product{compute, scale, {}};
  return 0;
}
int cublasLtMatmulDescSetAttribute(lt::Product *product, int name, const void *value, size_t bytes) {
  product->attributes[name] = lt::number(value, bytes);
  return 0;
}
int cublasLtMatmulDescDestroy(lt::Product *product) { delete product; return 0; }
int cublasLtMatmulPreferenceCreate(uint64_t **made) { *made = new uint64_t(0); return 0; }
int cublasLtMatmulPreferenceSetAttribute(uint64_t *preference, int name, const void *value, size_t bytes) {
  if (name != lt::MAX_WORKSPACE_BYTES) violation("cuBLASLt with a preference that the fake has not");
  *preference = lt::number(value, bytes);
  return 0;
}
int cublasLtMatmulPreferenceDestroy(uint64_t *preference) { delete preference; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *, lt::Product *product, lt::Layout *a, lt::Layout *b, lt::Layout *c,
                                   lt::Layout *d, uint64_t *, int wanted, lt::Heuristic *found, int *count) {
  if (wanted < 1 || c->rows != d->rows || c->columns != d->columns || !lt::fits(product, a, b, d))
    return blas::INVALID_VALUE;
  *found = {};
  *count = 1;
  return 0;
}
int cublasLtMatmul(const int *device, lt::Product *product, const float *alpha, void *a, lt::Layout *of_a, void *b,
                   lt::Layout *of_b, const float *beta, void *c, lt::Layout *of_c, void *d, lt::Layout *of_d,
                   const void *algorithm, void *workspace, size_t bytes, void *stream) {
  if (!algorithm || c != d || of_c != of_d || *beta != 0 || !lt::fits(product, of_a, of_b, of_d))
    return blas::INVALID_VALUE;
  if (here() != *device) violation("cublasLtMatmul while the context of another device is current");
  // Algorithms are chosen for addresses that all types' vectors fit.
  for (void *at : {a, b, d})
    if (uintptr_t(at) % 256) violation("cuBLASLt with a matrix that is not aligned to 256 bytes");
  within("cublasLtMatmul's workspace", workspace, bytes, true);
  const bool ta = product->attributes[lt::TRANSA], tb = product->attributes[lt::TRANSB];
  auto matrix = [](void *at, lt::Layout *of, bool transposed) {
    return blas::Matrix{(char *)at, of->type, transposed, of->rows, of->columns, size_t(of->leading), 0};
  };
  const blas::Matrix left = matrix(a, of_a, ta), right = matrix(b, of_b, tb), to = matrix(d, of_d, false);
  const size_t m = of_d->rows, n = of_d->columns, k = ta ? of_a->rows : of_a->columns;
  const auto bias = reinterpret_cast<char *>(product->attributes[lt::BIAS_POINTER]);
  const float factor = *alpha;
  fake_gpu_launched()[0] += !stream_of(stream)->graph;
  due("a product with a bias", here());
  stream_of(stream)->push(
      [=] { blas::multiply<float>(1, m, n, k, factor, left, right, 0, to, bias); },
      {within("cublasLtMatmul", d, to.bytes(1), true), within("cublasLtMatmul", a, left.bytes(1), false),
       within("cublasLtMatmul", b, right.bytes(1), false), within("cublasLtMatmul", bias, m * to.size(), false)});
  return 0;
}
}
