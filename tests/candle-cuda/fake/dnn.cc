// cuDNN: convolutions of channels-last images by their definition, sums in f32. Of each pass there are algorithms that are
// not deterministic, too large, not supported, and one that the caller may take, with a workspace, of some convolutions of 0
// bytes, that it fills with NaN.

namespace dnn {

enum Type { F32 = 0, F16 = 2, BF16 = 9 };
enum { NOT_INITIALIZED = 1001, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, INTERNAL_ERROR = 4000 };
enum { NHWC = 1, CROSS_CORRELATION = 1, FMA_MATH = 3 };
enum Pass { FORWARD, DATA, FILTER };
static const char *const CALLS[] = {"cudnnConvolutionForward", "cudnnConvolutionBackwardData",
                                    "cudnnConvolutionBackwardFilter"};

struct Handle { void *stream = nullptr; };
struct Tensor {
  int type, n, c, h, w;
  bool set = false;
  size_t count() const { return size_t(n) * c * h * w; }
  size_t bytes() const { return count() * (type == F32 ? 4 : 2); }
};
struct Convolution {
  int pad[2], stride[2], dilation[2], groups = 1, math = 0;
  bool set = false;
};
struct Perf {
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
};

// The one that may be taken.
static const int USABLE = 1;
// One that is offered, and not supported when it is run.
static const int REFUSED = 2;
static size_t workspace(const Tensor &y) { return y.count() % 4 ? 256 + y.count() % 64 : 0; }

static std::vector<float> read(const Tensor &t, const void *from) {
  std::vector<float> values(t.count());
  for (size_t i = 0; i < values.size(); i++) {
    if (t.type == F32) memcpy(&values[i], static_cast<const float *>(from) + i, 4);
    else {
      uint16_t bits;
      memcpy(&bits, static_cast<const uint16_t *>(from) + i, 2);
      values[i] = t.type == F16 ? from_half(bits) : from_bf16(bits);
    }
  }
  return values;
}
static void write(const Tensor &t, const std::vector<float> &values, void *to) {
  for (size_t i = 0; i < values.size(); i++) {
    if (t.type == F32) memcpy(static_cast<float *>(to) + i, &values[i], 4);
    else {
      uint16_t bits = t.type == F16 ? to_half(values[i]) : to_bf16(values[i]);
      memcpy(static_cast<uint16_t *>(to) + i, &bits, 2);
    }
  }
}

// Whether these are a convolution's images, weight and result.
static bool fit(const Tensor &x, const Tensor &w, const Tensor &y, const Convolution &c) {
  auto extent = [&](int i, int size, int kernel) {
    return (size + 2 * c.pad[i] - c.dilation[i] * (kernel - 1) - 1) / c.stride[i] + 1;
  };
  return x.set && w.set && y.set && c.set && x.type == w.type && x.type == y.type && x.n == y.n &&
         x.c == w.c * c.groups && y.c == w.n && w.n % c.groups == 0 && y.h == extent(0, x.h, w.h) &&
         y.w == extent(1, x.w, w.w);
}

// Calls `visit(image, weight, result)` with the places of all products.
template <class Visit>
static void products(const Tensor &x, const Tensor &w, const Tensor &y, const Convolution &c, Visit visit) {
  const int per_group = w.n / c.groups;
  for (int n = 0; n < y.n; n++)
    for (int oy = 0; oy < y.h; oy++)
      for (int ox = 0; ox < y.w; ox++)
        for (int ky = 0; ky < w.h; ky++)
          for (int kx = 0; kx < w.w; kx++) {
            const int iy = oy * c.stride[0] + ky * c.dilation[0] - c.pad[0];
            const int ix = ox * c.stride[1] + kx * c.dilation[1] - c.pad[1];
            if (iy < 0 || iy >= x.h || ix < 0 || ix >= x.w) continue;
            const size_t image = (size_t(n) * x.h + iy) * x.w + ix, result = (size_t(n) * y.h + oy) * y.w + ox;
            for (int o = 0; o < y.c; o++)
              for (int i = 0; i < w.c; i++)
                visit(image * x.c + o / per_group * w.c + i, ((size_t(o) * w.h + ky) * w.w + kx) * w.c + i,
                      result * y.c + o);
          }
}

static int find(bool timed, Handle *handle, const Tensor &x, const Tensor &w, const Tensor &y, const Convolution &c,
                int wanted, int *count, Perf *found) {
  launched[timed ? "algorithms timed" : "algorithms asked for"]++;
  if (timed && stream_of(handle->stream)->graph) violation("algorithms are timed in a capture");
  if (here() < 0) return NOT_INITIALIZED;
  if (!fit(x, w, y, c)) return BAD_PARAM;
  if (x.type != F32 && c.math == FMA_MATH) violation("a convolution of halves without the matrix units");
  std::vector<Perf> all = {
      {0, 0, 0.1f, 0, 0, c.math, {}},
      {6, NOT_SUPPORTED, -1, 0, 1, c.math, {}},
      {5, 0, 0.2f, size_t(3) << 30, 1, c.math, {}},
      {USABLE, 0, 0.3f, workspace(y), 1, c.math, {}},
  };
  // Kernels that it has nothing for, fails on, has nothing deterministic for, or has what there is no memory for and what
  // it does not support after all.
  if (w.h == 6 && w.w == 6) return NOT_SUPPORTED;
  if (w.h == 6 && w.w == 5) return INTERNAL_ERROR;
  if (w.h == 5 && w.w == 5) all.pop_back();
  if (w.h == 5 && w.w == 6)
    all.insert(all.end() - 1, {{4, 0, 0.25f, size_t(1) << 30, 1, c.math, {}}, {REFUSED, 0, 0.26f, 1, 1, c.math, {}}});
  *count = std::min<int>(wanted, all.size());
  std::copy(all.begin(), all.begin() + *count, found);
  return 0;
}

static int run(Pass pass, Handle *handle, float alpha, float beta, const Tensor &x, void *x_at, const Tensor &w,
               void *w_at, const Tensor &y, void *y_at, const Convolution &c, int algorithm, void *space,
               size_t size) {
  const char *call = CALLS[pass];
  due(call, here());
  launched[call]++;
  if (x.type == F32) due(c.math == FMA_MATH ? "a product of f32" : "a product in TF32", here());
  Stream *stream = stream_of(handle->stream);
  if (int error = unfit_for_capture(stream)) return error;
  if (!fit(x, w, y, c)) return BAD_PARAM;
  if (algorithm == REFUSED) return NOT_SUPPORTED;
  if (algorithm != USABLE) violation(string(call) + " by an algorithm that is not deterministic or not there");
  if (size < workspace(y)) return BAD_PARAM;
  if (alpha != 1 || beta != 0) violation(string(call) + " of factors that the fake has not");
  fake_gpu_launched()[0] += !stream->graph;
  stream->push([=] {
    memset(space, 0xff, size);
    const std::vector<float> a = read(x, x_at), b = read(w, w_at), d = read(y, y_at);
    if (pass == FORWARD) {
      std::vector<float> to(y.count());
      products(x, w, y, c, [&](size_t i, size_t j, size_t k) { to[k] += a[i] * b[j]; });
      write(y, to, y_at);
    } else if (pass == DATA) {
      std::vector<float> to(x.count());
      products(x, w, y, c, [&](size_t i, size_t j, size_t k) { to[i] += b[j] * d[k]; });
      write(x, to, x_at);
    } else {
      std::vector<float> to(w.count());
      products(x, w, y, c, [&](size_t i, size_t j, size_t k) { to[j] += a[i] * d[k]; });
      write(w, to, w_at);
    }
  }, {within(call, x_at, x.bytes(), pass == DATA), within(call, w_at, w.bytes(), pass == FILTER),
      within(call, y_at, y.bytes(), pass == FORWARD), within(call, space, size, true)});
  return 0;
}

static int set(Tensor *to, int type, int format, int n, int c, int h, int w) {
  if (format != NHWC || (type != F32 && type != F16 && type != BF16)) violation("cuDNN's tensors of another form than channels-last");
  if (n < 1 || c < 1 || h < 1 || w < 1) return BAD_PARAM;
  *to = {type, n, c, h, w, true};
  return 0;
}

}  // namespace dnn

extern "C" {
size_t cudnnGetVersion() { return 90000; }
const char *cudnnGetErrorString(int status) {
  return status == dnn::BAD_PARAM        ? "CUDNN_STATUS_BAD_PARAM"
         : status == dnn::INTERNAL_ERROR ? "CUDNN_STATUS_INTERNAL_ERROR"
                                         : "CUDNN_STATUS";
}
int cudnnCreate(dnn::Handle **handle) { *handle = new dnn::Handle; return 0; }
int cudnnDestroy(dnn::Handle *handle) {
  if (here() < 0) violation("cuDNN ends without a context");
  delete handle;
  return 0;
}
int cudnnSetStream(dnn::Handle *handle, void *stream) { handle->stream = stream; return 0; }
int cudnnCreateTensorDescriptor(dnn::Tensor **made) { *made = new dnn::Tensor{}; return 0; }
int cudnnDestroyTensorDescriptor(dnn::Tensor *made) { delete made; return 0; }
int cudnnSetTensor4dDescriptor(dnn::Tensor *to, int format, int type, int n, int c, int h, int w) {
  return dnn::set(to, type, format, n, c, h, w);
}
int cudnnCreateFilterDescriptor(dnn::Tensor **made) { *made = new dnn::Tensor{}; return 0; }
int cudnnDestroyFilterDescriptor(dnn::Tensor *made) { delete made; return 0; }
int cudnnSetFilter4dDescriptor(dnn::Tensor *to, int type, int format, int n, int c, int h, int w) {
  return dnn::set(to, type, format, n, c, h, w);
}
int cudnnCreateConvolutionDescriptor(dnn::Convolution **made) { *made = new dnn::Convolution{}; return 0; }
int cudnnDestroyConvolutionDescriptor(dnn::Convolution *made) { delete made; return 0; }
int cudnnSetConvolution2dDescriptor(dnn::Convolution *to, int pad_h, int pad_w, int stride_h, int stride_w,
                                    int dilation_h, int dilation_w, int mode, int type) {
  if (mode != dnn::CROSS_CORRELATION || type != dnn::F32) violation("a convolution of another kind than cross-correlation in f32");
  if (pad_h < 0 || pad_w < 0 || stride_h < 1 || stride_w < 1 || dilation_h < 1 || dilation_w < 1) return dnn::BAD_PARAM;
  to->pad[0] = pad_h, to->pad[1] = pad_w, to->stride[0] = stride_h, to->stride[1] = stride_w;
  to->dilation[0] = dilation_h, to->dilation[1] = dilation_w, to->set = true;
  return 0;
}
int cudnnSetConvolutionGroupCount(dnn::Convolution *to, int groups) { to->groups = groups; return 0; }
int cudnnSetConvolutionMathType(dnn::Convolution *to, int math) { to->math = math; return 0; }

#define FIND(name, timed, a, b, to, x, w, y)                                                                     \
  int name(dnn::Handle *handle, dnn::Tensor *a, dnn::Tensor *b, dnn::Convolution *c, dnn::Tensor *to, int wanted, \
           int *count, dnn::Perf *found) {                                                                        \
    return dnn::find(timed, handle, *x, *w, *y, *c, wanted, count, found);                                        \
  }
FIND(cudnnGetConvolutionForwardAlgorithm_v7, false, x, w, y, x, w, y)
FIND(cudnnGetConvolutionBackwardDataAlgorithm_v7, false, w, y, x, x, w, y)
FIND(cudnnGetConvolutionBackwardFilterAlgorithm_v7, false, x, y, w, x, w, y)
FIND(cudnnFindConvolutionForwardAlgorithm, true, x, w, y, x, w, y)
FIND(cudnnFindConvolutionBackwardDataAlgorithm, true, w, y, x, x, w, y)
FIND(cudnnFindConvolutionBackwardFilterAlgorithm, true, x, y, w, x, w, y)

#define RUN(name, pass, a, b, to)                                                                                   \
  int name(dnn::Handle *handle, const float *alpha, dnn::Tensor *a, void *a##_at, dnn::Tensor *b, void *b##_at,     \
           dnn::Convolution *c, int algorithm, void *space, size_t size, const float *beta, dnn::Tensor *to,        \
           void *to##_at) {                                                                                         \
    return dnn::run(dnn::pass, handle, *alpha, *beta, *x, x_at, *w, w_at, *y, y_at, *c, algorithm, space, size);    \
  }
RUN(cudnnConvolutionForward, FORWARD, x, w, y)
RUN(cudnnConvolutionBackwardData, DATA, w, y, x)
RUN(cudnnConvolutionBackwardFilter, FILTER, x, y, w)
}
