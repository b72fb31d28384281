// Products with plain weights in float32, and norms. A matrix is output-first (a row is an output) or input-first.

namespace {

// Multiplies R rows by one output of an output-first matrix. The processor prefetches well what is read in order. The
// order of sums does not depend on alignment: a model in a mapped file gives the same bits as one in memory.
template <class T, int R>
void dot_rows(const float* x, int64_t stride, const typename T::Number* weights, int64_t inputs, float* sums) {
  constexpr int kSums = R * 4 > 8 && kLanes == 8 ? 2 : 4;
  constexpr int64_t kBytes = sizeof(typename T::Number) * kLanes;
  Floats sum[R][kSums] = {};
  int64_t k = 0;
  for (; k + kSums * kLanes <= inputs; k += kSums * kLanes)
    for (int j = 0; j < kSums; j++) {
      if (j * kBytes % 64 == 0) __builtin_prefetch((const char*)(weights + k + j * kLanes) + kAhead);
      const Floats weight = T::load(weights + k + j * kLanes);
      for (int r = 0; r < R; r++) sum[r][j] += weight * Single::load(x + r * stride + k + j * kLanes);
    }
  for (; k < inputs; k += kLanes) {
    const Floats weight = load_some<T>(weights + k, inputs - k);
    for (int r = 0; r < R; r++) sum[r][0] += weight * load_some<Single>(x + r * stride + k, inputs - k);
  }
  for (int r = 0; r < R; r++)
    sums[r] = sum_of(kSums == 4 ? (sum[r][0] + sum[r][1]) + (sum[r][kSums - 2] + sum[r][kSums - 1]) : sum[r][0] + sum[r][1]);
}

// Multiplies R rows by C outputs of an output-first matrix, for more rows than fit into the cache. Each vector of
// weights is converted once for R rows, and each row is read once for C outputs.
template <class T, int R, int C>
void dot_tile(const float* x, int64_t stride, const typename T::Number* weights, int64_t inputs, float* sums,
              int64_t sums_stride) {
  Floats sum[R][C] = {};
  const auto add = [&](int64_t k, int64_t size) {
    Floats weight[C];
    for (int c = 0; c < C; c++) weight[c] = load_some<T>(weights + c * inputs + k, size);
    for (int r = 0; r < R; r++) {
      const Floats part = load_some<Single>(x + r * stride + k, size);
      for (int c = 0; c < C; c++) sum[r][c] += weight[c] * part;
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= inputs; k += kLanes) {
    // The processor does not prefetch several short rows by itself.
    for (int c = 0; c < C; c++) __builtin_prefetch(weights + (c + C) * inputs + k);
    add(k, kLanes);
  }
  if (k < inputs) add(k, inputs - k);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sums[r * sums_stride + c] = sum_of(sum[r][c]);
}

// Adds N inputs of R rows, times their weights for `count` outputs, to `sums`. The next input's weights are `stride`
// numbers away, the next row `x_stride`, its sums `y_stride`.
template <class T, int R, int N>
void add_inputs(const float* x, int64_t x_stride, const typename T::Number* weights, int64_t stride, float* sums,
                int64_t y_stride, int64_t count) {
  const auto add = [&](int64_t j, int64_t size) {
    Floats sum[R];
    for (int r = 0; r < R; r++) sum[r] = load_some<Single>(sums + r * y_stride + j, size);
    for (int i = 0; i < N; i++) {
      const Floats weight = load_some<T>(weights + i * stride + j, size);
      for (int r = 0; r < R; r++) sum[r] += weight * x[r * x_stride + i];
    }
    for (int r = 0; r < R; r++) store_some<Single>(sums + r * y_stride + j, sum[r], size);
  };
  // The first outputs, up to an aligned weight, are added apart.
  constexpr int64_t kBytes = sizeof(typename T::Number) * kLanes;
  int64_t j = (kBytes - (int64_t)((uintptr_t)weights % kBytes)) % kBytes / (int64_t)sizeof(typename T::Number);
  j = j < count ? j : count;
  if (j) add(0, j);
  for (; j + kLanes <= count; j += kLanes) add(j, kLanes);
  if (j < count) add(j, count - j);
}

// Adds the product of R rows with `count` outputs of an input-first matrix to `sums`.
template <class T, int R>
void add_columns(const float* x, int64_t x_stride, const typename T::Number* weights, int64_t stride, int64_t inputs,
                 float* sums, int64_t y_stride, int64_t count) {
  // Number of inputs that are added at a time.
  constexpr int kInputs = 16 / sizeof(typename T::Number);
  int64_t k = 0;
  for (; k + kInputs <= inputs; k += kInputs)
    add_inputs<T, R, kInputs>(x + k, x_stride, weights + k * stride, stride, sums, y_stride, count);
  for (; k < inputs; k++)
    add_inputs<T, R, 1>(x + k, x_stride, weights + k * stride, stride, sums, y_stride, count);
}

// RMSNorm of rows, as `rms_norm` in kernels.cpp.
template <class T>
void normalize(const void* all_x, const void* weight, void* all_y, int64_t rows, int64_t size, float eps) {
  using Number = typename T::Number;
  for (int64_t r = 0; r < rows; r++) {
    const Number* x = (const Number*)all_x + r * size;
    Floats sum = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats part = load_some<T>(x + i, size - i);
      sum += part * part;
    }
    const float factor = 1.f / __builtin_sqrtf(sum_of(sum) / (float)size + eps);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats part = T::round(load_some<T>(x + i, size - i) * factor);
      store_some<T>((Number*)all_y + r * size + i, part * load_some<T>((const Number*)weight + i, size - i), size - i);
    }
  }
}

}  // namespace
