// cuRAND: numbers of its distributions that depend on seed and place alone, and are not NVIDIA's.

struct Generator {
  void *stream;
  uint64_t seed, offset;

  // In (0, 1], as cuRAND's are.
  double uniform(uint64_t index) const {
    uint64_t x = seed * 0x9e3779b97f4a7c15 + index * 0xbf58476d1ce4e5b9 + 0x94d049bb133111eb;
    for (int i = 0; i < 3; i++) x = (x ^ x >> 29) * 0x9e3779b97f4a7c15;
    return double((x >> 11) + 1) * 0x1p-53;
  }
  // Box and Muller's.
  double normal(uint64_t index) const {
    uint64_t pair = index & ~1ull;
    double radius = sqrt(-2 * log(uniform(pair))), angle = 2 * M_PI * uniform(pair + 1);
    return radius * (index & 1 ? sin(angle) : cos(angle));
  }
};

template <class T, class Draw>
static int fill(const char *call, Generator *generator, T *out, size_t count, Draw draw) {
  if (count == 0) return 0;
  Generator at = *generator;
  generator->offset += count + count % 2;
  stream_of(at.stream)->push([=] {
    for (size_t i = 0; i < count; i++) out[i] = T(draw(at, at.offset + i));
  }, {within(call, out, count * sizeof(T), true)});
  return 0;
}
template <class T>
static int uniform(const char *call, Generator *generator, T *out, size_t count) {
  return fill(call, generator, out, count, [](const Generator &g, uint64_t i) { return g.uniform(i); });
}
template <class T>
static int normal(const char *call, Generator *generator, T *out, size_t count, T mean, T deviation) {
  if (count % 2) return 105;  // CURAND_STATUS_LENGTH_NOT_MULTIPLE
  return fill(call, generator, out, count,
              [=](const Generator &g, uint64_t i) { return mean + deviation * g.normal(i); });
}

extern "C" {
int curandCreateGenerator(Generator **generator, int) { *generator = new Generator{nullptr, 0, 0}; return 0; }
int curandDestroyGenerator(Generator *generator) { delete generator; return 0; }
int curandSetStream(Generator *generator, void *stream) { generator->stream = stream; return 0; }
int curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
  generator->seed = seed, generator->offset = 0;
  return 0;
}
int curandSetGeneratorOffset(Generator *generator, unsigned long long offset) {
  generator->offset = offset;
  return 0;
}
int curandGenerateUniform(Generator *generator, float *out, size_t count) {
  return uniform("curandGenerateUniform", generator, out, count);
}
int curandGenerateUniformDouble(Generator *generator, double *out, size_t count) {
  return uniform("curandGenerateUniformDouble", generator, out, count);
}
int curandGenerateNormal(Generator *generator, float *out, size_t count, float mean, float deviation) {
  return normal("curandGenerateNormal", generator, out, count, mean, deviation);
}
int curandGenerateNormalDouble(Generator *generator, double *out, size_t count, double mean,
                               double deviation) {
  return normal("curandGenerateNormalDouble", generator, out, count, mean, deviation);
}
}
