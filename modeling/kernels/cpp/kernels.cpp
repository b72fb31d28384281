// Products of few rows with matrices of 4, 8, 16 and 32 bits, on a CPU with AVX-512 for bfloat16 (Zen 4, Sapphire
// Rapids).
//
// A decode step reads every weight once, so these kernels are made to read memory at its full speed. Sums are float32.
//
// cpp_kernels.py compiles this file when it is first needed, and says what the arguments are.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,fma")))

#include "few_bits.h"
#include "numbers.h"

namespace {

// Outputs that are computed together, where each is a row of codes or numbers.
constexpr int64_t kOutputs = 4;

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
