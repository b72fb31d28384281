// Products of few rows with matrices of 4, 8, 16 and 32 bits, on a CPU with AVX-512 for bfloat16 (Zen 4, Sapphire
// Rapids).
//
// A decode step reads every weight once, so these kernels are made to read memory at its full speed. Sums are float32.
// A code of few bits becomes a bfloat16 number by one lookup, and `vdpbf16ps` multiplies 32 of them. Codes are small
// integers, so they and their products with the rows are exact; scales are applied to sums.
//
// cpp_kernels.py compiles this file when it is first needed, and says what the arguments are.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,fma")))

namespace {

// Outputs whose 4-bit codes lie together.
constexpr int64_t kBlock = 64;
// Outputs of other matrices that are computed together, where outputs lie one after the other.
constexpr int64_t kOutputs = 4;
// Where inputs do: columns whose sums stay in a near cache.
constexpr int64_t kColumns = 2048;

// Four bits select one of 16 numbers, whatever the fifth bit is, by which a lookup in 32 numbers is also selected.
AVX512 inline __m512i table_of(const float (&values)[16]) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; i++) {
    uint32_t bits;
    std::memcpy(&bits, &values[i % 16], 4);
    table[i] = (uint16_t)(bits >> 16);
  }
  return _mm512_load_si512(table);
}

AVX512 inline __m512bh look_up(__m512i words, __m512i table) {
  return (__m512bh)_mm512_permutexvar_epi16(words, table);
}

// R rows times 64 outputs of 4 bits. `codes` has 32 bytes for each input: outputs 0 to 31 in the low four bits, 32 to 63
// in the high ones. `scales` has for each group of inputs and output a scale and an offset, `sums` of each row the sum
// of each group.
template <int R>
AVX512 void int4_block(const uint16_t* x, const float* sums, const uint8_t* codes, const uint32_t* scales,
                       int64_t scale_stride, uint16_t* y, int64_t y_stride, int64_t inputs, int64_t group) {
  alignas(64) uint8_t place[2][64];
  for (int i = 0; i < 64; i++)
    // Word i / 2 gets an output's byte, even words from the first of two inputs and odd ones from the second. Its upper
    // byte is never looked at.
    for (int half = 0; half < 2; half++) place[half][i] = (uint8_t)(16 * half + i / 4 + 32 * (i / 2 % 2));
  const __m512i first = _mm512_load_si512(place[0]), second = _mm512_load_si512(place[1]);
  const __m512i table = table_of({-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7});
  const __m512i upper_half = _mm512_set1_epi32((int)0xffff0000);
  const int64_t groups = inputs / group;
  __m512 total[R][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) total[r][j] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m512 sum[R][4];
    for (int r = 0; r < R; r++)
      for (int j = 0; j < 4; j++) sum[r][j] = _mm512_setzero_ps();
    for (int64_t k = g * group; k < (g + 1) * group; k += 2) {
      const __m512i bytes = _mm512_loadu_si512(codes + k * (kBlock / 2));
      const __m512i words[2] = {_mm512_permutexvar_epi8(first, bytes), _mm512_permutexvar_epi8(second, bytes)};
      const __m512bh weights[4] = {look_up(words[0], table), look_up(words[1], table),
                                   look_up(_mm512_srli_epi16(words[0], 4), table),
                                   look_up(_mm512_srli_epi16(words[1], 4), table)};
      for (int r = 0; r < R; r++) {
        int32_t pair;
        std::memcpy(&pair, x + r * inputs + k, 4);
        const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
        for (int j = 0; j < 4; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], weights[j], row);
      }
    }
    for (int j = 0; j < 4; j++) {
      const __m512i both = _mm512_loadu_si512(scales + g * scale_stride + 16 * j);
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 offset = _mm512_castsi512_ps(_mm512_and_si512(both, upper_half));
      for (int r = 0; r < R; r++) {
        total[r][j] = _mm512_fmadd_ps(scale, sum[r][j], total[r][j]);
        total[r][j] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[r * groups + g]), total[r][j]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++)
      _mm256_storeu_si256((__m256i*)(y + r * y_stride + 16 * j), (__m256i)_mm512_cvtneps_pbh(total[r][j]));
}

// The sum of each group of a row's inputs.
AVX512 void sum_groups(const uint16_t* x, float* sums, int64_t inputs, int64_t group) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  for (int64_t g = 0; g < inputs / group; g++) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = g * group; k < (g + 1) * group; k += 32)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + k), ones);
    sums[g] = _mm512_reduce_add_ps(sum);
  }
}

// R rows times C outputs of 8 bits. Of each 64 inputs, rows have the even ones first. A code is the sum of its low four
// bits and 16 times its high ones, each of which is looked up.
template <int R, int C>
AVX512 void int8_outputs(const uint16_t* x, int64_t padded, const int8_t* codes, const uint16_t* scales, uint16_t* y,
                         int64_t y_stride, int64_t inputs) {
  const __m512i low = table_of({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  const __m512i high = table_of({0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16});
  __m512 sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 64) {
    const __mmask64 mask = inputs - k >= 64 ? ~0ull : (1ull << (inputs - k)) - 1;
    __m512bh even[R], odd[R];
    for (int r = 0; r < R; r++) {
      even[r] = (__m512bh)_mm512_loadu_si512(x + r * padded + k);
      odd[r] = (__m512bh)_mm512_loadu_si512(x + r * padded + k + 32);
    }
    for (int c = 0; c < C; c++) {
      // Several short streams are too many for the processor to foresee.
      _mm_prefetch((const char*)(codes + (c + C) * inputs + k), _MM_HINT_T0);
      const __m512i bytes = _mm512_maskz_loadu_epi8(mask, codes + c * inputs + k);
      const __m512bh weights[4] = {look_up(bytes, low), look_up(_mm512_srli_epi16(bytes, 4), high),
                                   look_up(_mm512_srli_epi16(bytes, 8), low),
                                   look_up(_mm512_srli_epi16(bytes, 12), high)};
      for (int r = 0; r < R; r++) {
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], weights[0], even[r]);
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], weights[1], even[r]);
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], weights[2], odd[r]);
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], weights[3], odd[r]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) {
      const uint32_t bits = (uint32_t)scales[c] << 16;
      float scale;
      std::memcpy(&scale, &bits, 4);
      const __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(_mm512_reduce_add_ps(sum[r][c]) * scale));
      std::memcpy(y + r * y_stride + c, &rounded, 2);
    }
}

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

// Calls one of the functions for 4, 2 or 1 of the remaining rows.
#define FOR_ROWS(rows, r, CALL)  \
  for (int64_t r = 0; r < rows;) \
    if (rows - r >= 4) {         \
      CALL(4);                   \
      r += 4;                    \
    } else if (rows - r >= 2) {  \
      CALL(2);                   \
      r += 2;                    \
    } else {                     \
      CALL(1);                   \
      r += 1;                    \
    }

// One matrix: 4 bits with groups of inputs, 8 bits, or numbers. `stride` is the distance between groups' scales, in
// outputs; of numbers that lie input-first that between two inputs, and 0 if they lie output-first.
struct Matrix {
  int64_t bits;
  const char* codes;
  const char* scales;
  int64_t inputs, outputs, group, stride;

  // Outputs that are computed together.
  int64_t step(int threads) const {
    if (bits == 4) return kBlock;
    if (bits == 8 || !stride) return kOutputs;
    const int64_t share = (outputs + threads - 1) / threads;
    return share < kColumns ? (share + 63) / 64 * 64 : kColumns;
  }
};

// What the rows of x are needed as: sums of groups, or split rows.
struct Prepared {
  std::vector<float> sums;
  std::vector<uint16_t> split;
};

AVX512 void prepare(const void* rows_of_x, int64_t rows, const Matrix& matrix, Prepared& prepared) {
  if (matrix.bits > 8) return;
  const uint16_t* x = (const uint16_t*)rows_of_x;
  const int64_t inputs = matrix.inputs;
  if (matrix.bits == 4) {
    const int64_t groups = inputs / matrix.group;
    prepared.sums.resize(rows * groups);
    for (int64_t r = 0; r < rows; r++) sum_groups(x + r * inputs, &prepared.sums[r * groups], inputs, matrix.group);
    return;
  }
  const int64_t padded = (inputs + 63) / 64 * 64;
  prepared.split.assign(rows * padded, 0);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < inputs; k++)
      prepared.split[r * padded + k / 64 * 64 + k % 64 / 2 + 32 * (k % 2)] = x[r * inputs + k];
}

// The rows times numbers, for the outputs from `start` that are computed together.
template <class T>
AVX512 void multiply_numbers(const void* rows_of_x, int64_t rows, const Matrix& matrix, int64_t start, int64_t step,
                             void* all_y, int64_t y_stride) {
  using Number = typename T::Number;
  const Number* x = (const Number*)rows_of_x;
  const int64_t inputs = matrix.inputs, left = matrix.outputs - start;
  Number* y = (Number*)all_y + start;
  if (matrix.stride) {
    for (int64_t r = 0; r < rows; r++)
      plain_columns<T>(x + r * inputs, (const Number*)matrix.codes + start, y + r * y_stride, inputs, matrix.stride,
                       left < step ? left : step);
    return;
  }
  const Number* weights = (const Number*)matrix.codes + start * inputs;
  for (int64_t c = 0; c < (left < step ? left : step); c++) {
    const Number* row = weights + c * inputs;
    const bool is_across = (uintptr_t)row % 64;
#define CALL(R)                                               \
  (is_across ? plain_output<T, R, true> : plain_output<T, R, false>)( \
      x + r * inputs, row, y + r * y_stride + c, y_stride, inputs)
    FOR_ROWS(rows, r, CALL)
#undef CALL
  }
}

// The rows times the outputs from `start` that are computed together.
AVX512 void multiply_some(const void* rows_of_x, const Prepared& prepared, int64_t rows, const Matrix& matrix,
                          int64_t start, int64_t step, void* all_y, int64_t y_stride) {
  if (matrix.bits == 32) return multiply_numbers<Single>(rows_of_x, rows, matrix, start, step, all_y, y_stride);
  if (matrix.bits == 16) return multiply_numbers<Brain>(rows_of_x, rows, matrix, start, step, all_y, y_stride);
  const uint16_t* x = (const uint16_t*)rows_of_x;
  uint16_t* y = (uint16_t*)all_y + start;
  const int64_t inputs = matrix.inputs;
  if (matrix.bits == 4) {
    const int64_t groups = inputs / matrix.group;
    const uint8_t* codes = (const uint8_t*)matrix.codes + start * inputs / 2;
    const uint32_t* scales = (const uint32_t*)matrix.scales + start;
#define CALL(R)                                                                                       \
  int4_block<R>(x + r * inputs, &prepared.sums[r * groups], codes, scales, matrix.stride,             \
                y + r * y_stride, y_stride, inputs, matrix.group)
    FOR_ROWS(rows, r, CALL)
#undef CALL
    return;
  }
  const int64_t padded = (inputs + 63) / 64 * 64, left = matrix.outputs - start;
  const int8_t* codes = (const int8_t*)matrix.codes + start * inputs;
  const uint16_t* scales = (const uint16_t*)matrix.scales + start;
#define CALL(R)                                                                                              \
  if (left >= kOutputs)                                                                                      \
    int8_outputs<R, kOutputs>(&prepared.split[r * padded], padded, codes, scales, y + r * y_stride,          \
                              y_stride, inputs);                                                             \
  else                                                                                                       \
    for (int64_t c = 0; c < left; c++)                                                                       \
      int8_outputs<R, 1>(&prepared.split[r * padded], padded, codes + c * inputs, scales + c,                \
                         y + r * y_stride + c, y_stride, inputs)
  FOR_ROWS(rows, r, CALL)
#undef CALL
}

inline int64_t bytes_of(int64_t bits) { return bits == 32 ? 4 : 2; }

// Rows times several matrices of the same bits and inputs; their outputs stand side by side in y.
AVX512 void multiply(const void* x, int64_t rows, const Matrix* matrices, int64_t count, void* y, int threads) {
  Prepared prepared;
  prepare(x, rows, matrices[0], prepared);
  int64_t y_stride = 0, steps = 0;
  for (int64_t m = 0; m < count; m++) {
    const int64_t step = matrices[m].step(threads);
    y_stride += matrices[m].outputs;
    steps += (matrices[m].outputs + step - 1) / step;
  }
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < steps; i++) {
    int64_t m = 0, first = 0, rest = i, step = matrices[0].step(threads);
    for (int64_t own; rest >= (own = (matrices[m].outputs + step - 1) / step); step = matrices[m].step(threads)) {
      first += matrices[m].outputs;
      rest -= own;
      m++;
    }
    multiply_some(x, prepared, rows, matrices[m], rest * step, step, (char*)y + first * bytes_of(matrices[0].bits),
                  y_stride);
  }
}

// e to the x: two to the power of the integer part, times a polynomial of the rest (Cephes, single precision).
AVX512 inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.f)), _mm512_set1_ps(88.f));
  const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(term));
  y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(rest, rest), y, rest), _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(y, whole);
}

// silu(gate) * up, each rounded as separate operations are.
template <class T>
AVX512 void apply_gate(const void* both, void* hidden, int64_t size) {
  using Number = typename T::Number;
  const Number *gate = (const Number*)both, *up = gate + size;
  for (int64_t i = 0; i < size; i += 16) {
    const uint32_t mask = mask_of(size - i, 16);
    const __m512 g = T::load16(gate + i, mask);
    const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), g);
    const __m512 activated = T::round(_mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.f), exponential(minus))));
    T::store16((Number*)hidden + i, _mm512_mul_ps(activated, T::load16(up + i, mask)), mask);
  }
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

}  // namespace

extern "C" {

int is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

// Rows times up to three matrices, output-first.
AVX512 void products(const void* x, void* y, int64_t rows, int64_t bits, int64_t inputs, int64_t group, int threads,
                     int64_t count, const char* codes0, const char* scales0, int64_t outputs0, const char* codes1,
                     const char* scales1, int64_t outputs1, const char* codes2, const char* scales2, int64_t outputs2) {
  const bool is_plain = bits > 8;
  const Matrix matrices[3] = {{bits, codes0, scales0, inputs, outputs0, group, is_plain ? 0 : outputs0},
                              {bits, codes1, scales1, inputs, outputs1, group, is_plain ? 0 : outputs1},
                              {bits, codes2, scales2, inputs, outputs2, group, is_plain ? 0 : outputs2}};
  multiply(x, rows, matrices, count, y, threads);
}

// down(silu(gate(x)) * up(x)). The down matrix has `padded` inputs, of which those from `inner` on are zero. Without
// `up`, the outputs of gate are followed by those of up in one matrix.
AVX512 void feed_forward(const void* x, void* y, int64_t rows, int64_t bits, int input_first, int64_t inputs,
                         int64_t inner, int64_t padded, int64_t outputs, int64_t group, int threads, const char* gate,
                         const char* gate_scales, const char* up, const char* up_scales, const char* down,
                         const char* down_scales) {
  const int64_t first = up ? inner : 2 * inner, size = bytes_of(bits);
  const bool has_stride = input_first || bits <= 8;
  const Matrix matrices[2] = {{bits, gate, gate_scales, inputs, first, group, has_stride ? first : 0},
                              {bits, up, up_scales, inputs, inner, group, has_stride ? inner : 0}};
  std::vector<char> both(rows * 2 * inner * size), hidden(rows * padded * size);
  multiply(x, rows, matrices, up ? 2 : 1, both.data(), threads);
  for (int64_t r = 0; r < rows; r++)
    (bits == 32 ? apply_gate<Single> : apply_gate<Brain>)(&both[r * 2 * inner * size], &hidden[r * padded * size], inner);
  const Matrix last = {bits, down, down_scales, padded, outputs, group, has_stride ? outputs : 0};
  multiply(hidden.data(), rows, &last, 1, y, threads);
}

// x / sqrt(mean(x ** 2) + eps), rounded, times a weight, if there is one.
void rms_norm(int64_t bits, const void* x, const void* weight, void* y, int64_t rows, int64_t size, float eps) {
  (bits == 32 ? normalize<Single> : normalize<Brain>)(x, weight, y, rows, size, eps);
}
}
