// Rows times outputs of float32 and bfloat16 numbers, whose weights lie in rows or in columns.

namespace {

// Columns whose sums stay in a near cache.
constexpr int64_t kColumns = 2048;

AVX512 inline __m512 widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

AVX512 inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

// The first numbers of a vector.
inline uint32_t mask_of(int64_t count, int64_t most) { return count >= most ? (uint32_t)((1ull << most) - 1) : (1u << count) - 1; }

// float32 numbers, 16 in a vector.
struct Single {
  using Number = float;
  using Vector = __m512;
  static constexpr int64_t kStep = 16;
  // Inputs that are added to sums at a time.
  static constexpr int kInputs = 4;
  // All numbers of a vector, or those of the mask.
  template <bool kWhole>
  static AVX512 inline Vector load(const float* x, uint32_t mask = 0) {
    return kWhole ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps(mask, x);
  }
  static AVX512 inline __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
  static AVX512 inline __m512 load16(const float* x, uint32_t mask) { return _mm512_maskz_loadu_ps(mask, x); }
  static AVX512 inline void store16(float* y, __m512 x, uint32_t mask) { _mm512_mask_storeu_ps(y, mask, x); }
  static AVX512 inline __m512 round(__m512 x) { return x; }
  static inline float number(float x) { return x; }
  static inline float rounded(float x) { return x; }
};

// bfloat16 numbers, 32 in a vector.
struct Brain {
  using Number = uint16_t;
  using Vector = __m512bh;
  static constexpr int64_t kStep = 32;
  static constexpr int kInputs = 8;
  template <bool kWhole>
  static AVX512 inline Vector load(const uint16_t* x, uint32_t mask = 0) {
    return (Vector)(kWhole ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(mask, x));
  }
  static AVX512 inline __m512 add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
  static AVX512 inline __m512 load16(const uint16_t* x, uint32_t mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }
  static AVX512 inline void store16(uint16_t* y, __m512 x, uint32_t mask) { _mm256_mask_storeu_epi16(y, mask, narrow(x)); }
  static AVX512 inline __m512 round(__m512 x) { return widen(narrow(x)); }
  static inline float number(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
  }
  // To the nearest number, of two to the even one; NaN stays one.
  static inline uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

// Weights of a mapped file mostly lie across cache lines. To read two lines for each vector would cost a sixth of the
// speed: then vectors are put together from whole lines, each of which is read once.

// Places of a vector's 16-bit words in the line where it begins, and the next one.
AVX512 inline __m512i order_from(const void* first) {
  alignas(64) static constexpr uint16_t kPlaces[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  return _mm512_add_epi16(_mm512_load_si512(kPlaces), _mm512_set1_epi16((short)((uintptr_t)first % 64 / 2)));
}

template <class Number>
inline const Number* next_line(const Number* first) {
  return (const Number*)((const char*)first + 64 - (uintptr_t)first % 64);
}

// R rows times one output, whose weights lie in a row. Memory is read from its beginning to its end, which the processor
// foresees.
template <class T, int R, bool kAcross>
AVX512 void plain_output(const typename T::Number* x, const typename T::Number* weights, typename T::Number* y,
                         int64_t y_stride, int64_t inputs) {
  constexpr int kSums = 4;
  __m512 sum[R][kSums];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < kSums; j++) sum[r][j] = _mm512_setzero_ps();
  const __m512i order = order_from(weights);
  const typename T::Number* next = kAcross ? next_line(weights) : weights;
  __m512i line = kAcross ? _mm512_load_si512((const char*)next - 64) : _mm512_setzero_si512();
  int64_t k = 0;
  for (; k + kSums * T::kStep <= inputs; k += kSums * T::kStep)
    for (int j = 0; j < kSums; j++) {
      const __m512i found = _mm512_loadu_si512(next + k + j * T::kStep);
      const auto weight = (typename T::Vector)(kAcross ? _mm512_permutex2var_epi16(line, order, found) : found);
      line = found;
      for (int r = 0; r < R; r++) sum[r][j] = T::add(sum[r][j], weight, T::template load<true>(x + r * inputs + k + j * T::kStep));
    }
  for (; k < inputs; k += T::kStep) {
    const uint32_t mask = mask_of(inputs - k, T::kStep);
    const typename T::Vector weight = T::template load<false>(weights + k, mask);
    for (int r = 0; r < R; r++) sum[r][0] = T::add(sum[r][0], weight, T::template load<false>(x + r * inputs + k, mask));
  }
  for (int r = 0; r < R; r++) {
    const __m512 all = _mm512_add_ps(_mm512_add_ps(sum[r][0], sum[r][1]), _mm512_add_ps(sum[r][2], sum[r][3]));
    T::store16(y + r * y_stride, _mm512_set1_ps(_mm512_reduce_add_ps(all)), 1);
  }
}

// Inputs that are multiplied at a time: pairs in bfloat16, of which the last may have one.
template <int N>
AVX512 inline void spread(const float* x, __m512 (&factors)[N]) {
  for (int i = 0; i < N; i++) factors[i] = _mm512_set1_ps(x[i]);
}

template <int N>
AVX512 inline void spread(const uint16_t* x, __m512 (&factors)[N]) {
  for (int i = 0; i < N; i += 2)
    factors[i] = _mm512_castsi512_ps(_mm512_set1_epi32(x[i] | (i + 1 < N ? (uint32_t)x[i + 1] << 16 : 0)));
}

// Adds N inputs, times their weights for 16 outputs, to sums of these outputs.
template <int N>
AVX512 inline void add_inputs(Single, const __m512 (&factors)[N], const __m512i (&weights)[N], float* sums) {
  __m512 sum = _mm512_load_ps(sums);
  for (int i = 0; i < N; i++) sum = _mm512_fmadd_ps(factors[i], (__m512)weights[i], sum);
  _mm512_store_ps(sums, sum);
}

// The same for bfloat16 and 32 outputs. Two inputs' weights are put in pairs, which leaves sums in another order.
template <int N>
AVX512 inline void add_inputs(Brain, const __m512 (&factors)[N], const __m512i (&weights)[N], float* sums) {
  __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
  for (int i = 0; i < N; i += 2) {
    const __m512i one = weights[i], two = i + 1 < N ? weights[i + 1] : _mm512_setzero_si512();
    low = _mm512_dpbf16_ps(low, (__m512bh)_mm512_unpacklo_epi16(one, two), (__m512bh)factors[i]);
    high = _mm512_dpbf16_ps(high, (__m512bh)_mm512_unpackhi_epi16(one, two), (__m512bh)factors[i]);
  }
  _mm512_store_ps(sums, low);
  _mm512_store_ps(sums + 16, high);
}

AVX512 inline void store_sums(float* y, const float* sums, uint32_t mask) {
  _mm512_mask_storeu_ps(y, mask, _mm512_load_ps(sums));
}

AVX512 inline void store_sums(uint16_t* y, const float* sums, uint32_t mask) {
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i rest = _mm512_add_epi32(order, _mm512_set1_epi32(8));
  const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
  const __m512bh all = _mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(low, rest, high), _mm512_permutex2var_ps(low, order, high));
  _mm512_mask_storeu_epi16(y, mask, (__m512i)all);
}

// Adds N inputs to all sums.
template <class T, int N>
AVX512 void add_to_all(const typename T::Number* x, const typename T::Number* weights, int64_t stride, float* sums,
                       int64_t count) {
  __m512 factors[N];
  spread(x, factors);
  __m512i vectors[N];
  int64_t j = 0;
  for (; j + T::kStep <= count; j += T::kStep) {
    for (int i = 0; i < N; i++) vectors[i] = _mm512_loadu_si512(weights + i * stride + j);
    add_inputs(T(), factors, vectors, sums + j);
  }
  if (j == count) return;
  const uint32_t mask = mask_of(count - j, T::kStep);
  for (int i = 0; i < N; i++) vectors[i] = (__m512i)T::template load<false>(weights + i * stride + j, mask);
  add_inputs(T(), factors, vectors, sums + j);
}

// One row times `count` outputs, whose weights are columns: `stride` numbers lie between two inputs.
template <class T>
AVX512 void plain_columns(const typename T::Number* x, const typename T::Number* weights, typename T::Number* y,
                          int64_t inputs, int64_t stride, int64_t count) {
  alignas(64) float sums[kColumns] = {};
  int64_t k = 0;
  for (; k + T::kInputs <= inputs; k += T::kInputs)
    add_to_all<T, T::kInputs>(x + k, weights + k * stride, stride, sums, count);
  for (; k < inputs; k++) add_to_all<T, 1>(x + k, weights + k * stride, stride, sums, count);
  for (int64_t j = 0; j < count; j += T::kStep) store_sums(y + j, sums + j, mask_of(count - j, T::kStep));
}

template <class T>
AVX512 void normalize(const void* all_x, const void* weight, void* all_y, int64_t rows, int64_t size, float eps) {
  using Number = typename T::Number;
  const Number* x = (const Number*)all_x;
  Number* y = (Number*)all_y;
  for (int64_t r = 0; r < rows; r++, x += size, y += size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
      const __m512 part = T::load16(x + i, mask_of(size - i, 16));
      sum = _mm512_fmadd_ps(part, part, sum);
    }
    const __m512 factor = _mm512_set1_ps(1.f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
      const uint32_t mask = mask_of(size - i, 16);
      __m512 part = T::round(_mm512_mul_ps(T::load16(x + i, mask), factor));
      if (weight) part = _mm512_mul_ps(part, T::load16((const Number*)weight + i, mask));
      T::store16(y + i, part, mask);
    }
  }
}

// e to the x: two to the power of the integer part, times a polynomial of the rest (Cephes, single precision).
AVX512 inline __m512 exponential(__m512 x) {
  // In this order NaN stays; above the upper limit the result is infinite.
  x = _mm512_min_ps(_mm512_set1_ps(89.f), _mm512_max_ps(_mm512_set1_ps(-87.f), x));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(term));
  y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(rest, rest), y, rest), _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, whole);
}

}  // namespace
