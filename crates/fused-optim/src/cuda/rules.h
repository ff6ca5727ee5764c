// The nine rules: for each the numbers of one step and the arithmetic of one element, line by line
// as in `src/rules/*.rs`, which document them. `h` is the result of `DeviceHyper::numbers`.
//
// Numbers are computed in f64, only by operations that IEEE 754 rounds correctly, so they have the
// host's bits.

/// `base` to the power of `exponent`, by squaring: as `rule::power`.
DEVICE double power(double base, u64 exponent) {
  double result = 1;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

DEVICE float reciprocal_bias(double beta, u64 step, double times) {
  return (float)(times * (1 / (1 - power(beta, step))));
}
DEVICE float reciprocal_root_bias(double beta, u64 step) {
  return (float)(1 / sqrt(1 - power(beta, step)));
}

/// Decay rates of two moments.
struct Moments {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  DEVICE void set(double b1, double b2) {
    beta1 = (float)b1, one_minus_beta1 = (float)(1 - b1);
    beta2 = (float)b2, one_minus_beta2 = (float)(1 - b2);
  }
  DEVICE void update(float g, float& m, float& v) const {
    m = m * beta1 + g * one_minus_beta1;
    v = v * beta2 + g * g * one_minus_beta2;
  }
  DEVICE float ahead(float g, float m) const { return m * beta1 + g * one_minus_beta1; }
};

struct Adadelta {
  enum { SLOTS = 2 };
  float weight_decay, rho, one_minus_rho, eps, lr;

  DEVICE Adadelta(const double* h, u64) {
    lr = (float)h[0], rho = (float)h[1], one_minus_rho = (float)(1 - h[1]);
    eps = (float)h[2], weight_decay = (float)h[3];
  }
  DEVICE float update(float p, float g, float* state) const {
    float &s = state[0], &a = state[1];
    g = g + p * weight_decay;
    s = s * rho + g * g * one_minus_rho;
    const float d = sqrtf(a + eps) / sqrtf(s + eps) * g;
    a = a * rho + d * d * one_minus_rho;
    return p - lr * d;
  }
};

/// Adam has `decay` 1, AdamW `weight_decay` 0.
template <bool DECOUPLED, bool AMSGRAD>
struct AdamRule {
  enum { SLOTS = AMSGRAD ? 3 : 2 };
  float decay, weight_decay, root_factor, eps, step_size;
  Moments moments;

  DEVICE AdamRule(const double* h, u64 step) {
    moments.set(h[1], h[2]);
    eps = (float)h[3];
    decay = DECOUPLED ? (float)(1 - h[0] * h[4]) : 1;
    weight_decay = DECOUPLED ? 0 : (float)h[4];
    root_factor = reciprocal_root_bias(h[2], step);
    step_size = reciprocal_bias(h[1], step, h[0]);
  }
  DEVICE float update(float p, float g, float* state) const {
    moments.update(g + p * weight_decay, state[0], state[1]);
    // Written so that a NaN in the second moment wins.
    if constexpr (AMSGRAD) state[2] = state[2] > state[1] ? state[2] : state[1];
    const float v = state[SLOTS - 1];
    return p * decay - step_size * (state[0] / (sqrtf(v) * root_factor + eps));
  }
};
template <bool AMSGRAD> using Adam = AdamRule<false, AMSGRAD>;
template <bool AMSGRAD> using AdamW = AdamRule<true, AMSGRAD>;

/// `cos(πx)` for `x` of 0 or more, as `rule::cos_pi`.
DEVICE double cos_pi(double x) {
  x = x - 2 * floor(x / 2);
  x = x > 1 ? 2 - x : x;
  const double s = x > 0.5 ? 1 - x : x, square = s * 3.141592653589793 * (s * 3.141592653589793);
  double cosine = 1;
  for (int n = 22; n > 0; n -= 2) cosine = 1 - square / (n * (n - 1)) * cosine;
  return x > 0.5 ? -cosine : cosine;
}

struct BertAdam {
  enum { SLOTS = 2 };
  float eps, weight_decay, lr;
  Moments moments;

  DEVICE BertAdam(const double* h, u64 step) {
    moments.set(h[1], h[2]);
    eps = (float)h[3], weight_decay = (float)h[4];
    const double factor = h[5] == -1 ? 1 : schedule((int)h[7], (double)(step - 1) / h[5], h[6]);
    lr = (float)(h[0] * factor);
  }
  /// `kind` is the number of a `Schedule`.
  static DEVICE double schedule(int kind, double x, double warmup) {
    if (x < warmup) return x / warmup;
    const double linear = (x - 1) / (warmup - 1);
    if (kind == 0) return linear > 0 ? linear : 0;
    if (kind == 1) return 0.5 * (1 + cos_pi(x));
    if (kind == 2) return 1;
    return x < 1 ? sqrt(1 - x) : 0;
  }
  DEVICE float update(float p, float g, float* state) const {
    moments.update(g, state[0], state[1]);
    const float u = state[0] / (sqrtf(state[1]) + eps) + p * weight_decay;
    return p - lr * u;
  }
};

/// `s − a²`, at least 0; a NaN stays NaN.
DEVICE float variance(float s, float a) {
  const float variance = s - a * a;
  return variance < 0 ? 0 : variance;
}

template <bool CENTERED, bool MOMENTUM>
struct RmsProp {
  enum { SLOTS = 1 + CENTERED + MOMENTUM };
  float weight_decay, alpha, one_minus_alpha, eps, momentum, lr;

  DEVICE RmsProp(const double* h, u64) {
    lr = (float)h[0], alpha = (float)h[1], one_minus_alpha = (float)(1 - h[1]);
    eps = (float)h[2], weight_decay = (float)h[3], momentum = (float)h[4];
  }
  DEVICE float update(float p, float g, float* state) const {
    float &s = state[0], &a = state[CENTERED], &b = state[CENTERED + MOMENTUM];
    g = g + p * weight_decay;
    s = s * alpha + g * g * one_minus_alpha;
    if constexpr (CENTERED) a = a * alpha + g * one_minus_alpha;
    const float d = sqrtf(CENTERED ? variance(s, a) : s) + eps;
    if constexpr (MOMENTUM) b = b * momentum + g / d;
    return p - lr * (MOMENTUM ? b : g / d);
  }
};

template <bool CENTERED, bool MOMENTUM>
struct RmsPropTf {
  enum { SLOTS = 1 + CENTERED + MOMENTUM };
  float decay, weight_decay, one_minus_alpha, eps, momentum, lr_before, lr_after;

  /// `h[5]`: the decay is coupled (0), decoupled (1), or decoupled and multiplied by `lr` (2).
  /// `h[6]`: `lr` is inside the momentum.
  DEVICE RmsPropTf(const double* h, u64) {
    one_minus_alpha = (float)(1 - h[1]), eps = (float)h[2], momentum = (float)h[4];
    decay = h[5] == 0 ? 0 : (float)(h[3] * (h[5] == 2 ? h[0] : 1));
    weight_decay = h[5] == 0 ? (float)h[3] : 0;
    const bool before = MOMENTUM && h[6] != 0;
    lr_before = before ? (float)h[0] : 1, lr_after = before ? 1 : (float)h[0];
  }
  DEVICE float update(float p, float g, float* state) const {
    float &s = state[0], &a = state[CENTERED], &b = state[CENTERED + MOMENTUM];
    g = g + p * weight_decay;
    p = p - p * decay;
    s = s + one_minus_alpha * (g * g - s);
    if constexpr (CENTERED) a = a + one_minus_alpha * (g - a);
    const float d = sqrtf((CENTERED ? variance(s, a) : s) + eps);
    const float u = lr_before * (g / d);
    if constexpr (MOMENTUM) b = b * momentum + u;
    return p - lr_after * (MOMENTUM ? b : u);
  }
};

template <bool MOMENTUM, bool NESTEROV>
struct Sgd {
  enum { SLOTS = MOMENTUM };
  float weight_decay, momentum, damp, lr;

  DEVICE Sgd(const double* h, u64 step) {
    lr = (float)h[0], momentum = (float)h[1], weight_decay = (float)h[3];
    damp = (float)(step == 1 ? 1 : 1 - h[2]);
  }
  DEVICE float update(float p, float g, float* state) const {
    g = g + p * weight_decay;
    if constexpr (!MOMENTUM) return p - lr * g;
    float& b = state[0];
    b = b * momentum + g * damp;
    return p - lr * (NESTEROV ? g + b * momentum : b);
  }
};

// Rules of two sweeps: the first calls `state` and `direction`, the second `direction` and `apply`,
// with the `factor` and `projected` computed from the sums.
//
// Products of two f32 are exact in f64, so `fma` rounds as an addition of them does.

struct Lamb {
  enum { SLOTS = 2, SUMS = 2, BY_ROWS = false };
  float eps, weight_decay;
  Moments moments;

  DEVICE Lamb(const double* h, u64, bool) {
    moments.set(h[1], h[2]);
    eps = (float)h[3], weight_decay = (float)h[4];
  }
  DEVICE void state(float g, float* state) const { moments.update(g, state[0], state[1]); }
  DEVICE float direction(float p, float, const float* state) const {
    return state[0] / (sqrtf(state[1]) + eps) + p * weight_decay;
  }
  DEVICE float apply(float factor, float p, float u) const { return p - factor * u; }
  /// Of `p·p` and `u·u`.
  static DEVICE void add(double (&lanes)[SUMS][4], int j, double p, double u, double) {
    lanes[0][j] = fma(p, p, lanes[0][j]), lanes[1][j] = fma(u, u, lanes[1][j]);
  }

  /// `lr·r`. `h[5]`: without the ratio of norms.
  static DEVICE float factor(const double* h, const double* sums) {
    const double root = sqrt(sums[0]), weight = root < 10 ? root : 10, direction = sqrt(sums[1]);
    const bool one = h[5] != 0 || weight == 0 || direction == 0;
    return (float)(h[0] * (one ? 1 : weight / direction));
  }
};

struct AdamP {
  enum { SLOTS = 2, SUMS = 4, BY_ROWS = true };
  float root_factor, eps, decay, step_size;
  bool nesterov;
  Moments moments;

  DEVICE AdamP(const double* h, u64 step, bool projected) {
    moments.set(h[1], h[2]);
    eps = (float)h[3];
    decay = (float)(1 - (projected ? h[0] * h[4] * h[6] : h[0] * h[4]));
    root_factor = reciprocal_root_bias(h[2], step);
    step_size = reciprocal_bias(h[1], step, h[0]);
    nesterov = h[7] != 0;
  }
  DEVICE void state(float g, float* state) const { moments.update(g, state[0], state[1]); }
  DEVICE float direction(float, float g, const float* state) const {
    const float m = nesterov ? moments.ahead(g, state[0]) : state[0];
    return m / (sqrtf(state[1]) * root_factor + eps);
  }
  DEVICE float apply(float factor, float p, float u) const {
    return p * decay - step_size * (u - p * factor);
  }
  /// Of `p·p`, `p·u`, `g·g` and `g·p`.
  static DEVICE void add(double (&lanes)[SUMS][4], int j, double p, double u, double g) {
    lanes[0][j] = fma(p, p, lanes[0][j]), lanes[1][j] = fma(p, u, lanes[1][j]);
    lanes[2][j] = fma(g, g, lanes[2][j]), lanes[3][j] = fma(g, p, lanes[3][j]);
  }

  /// Whether the cosine of gradient and weight is below `δ/√cols`. `h[5]` is δ; `h[8]`: ε is a
  /// lower bound, not added.
  static DEVICE bool scale_invariant(const double* h, const double* sums, u64 cols) {
    const double g = sqrt(sums[2]), p = sqrt(sums[0]), eps = h[3];
    const double cosine = h[8] != 0 ? fabs(sums[3]) / fmax(g, eps) / fmax(p, eps)
                                    : fabs(sums[3]) / (g + eps) / (p + eps);
    return cosine < h[5] / sqrt((double)cols);
  }
  /// Factor of `p` to subtract from `u`; 0 for a row of zeros.
  static DEVICE float factor(const double* h, const double* sums) {
    const double norm = sqrt(sums[0]) + h[3];
    return sums[1] == 0 ? 0 : (float)(sums[1] / (norm * norm));
  }
};
