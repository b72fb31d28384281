// Products of few rows with matrices of 4, 8, 16 and 32 bits, on a CPU with AVX-512 for bfloat16 (Zen 4, Sapphire
// Rapids).
//
// A decode step reads every weight once, so these kernels are made to read memory at its full speed. Sums are float32.
//
// cpp_kernels.py compiles this file when it is first needed, and says what the arguments are.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,fma")))

#include "few_bits.h"
#include "numbers.h"

#include "attention.h"

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
    return share < 1 ? 64 : share < kColumns ? (share + 63) / 64 * 64 : kColumns;
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
AVX512 void scale_row(void* x, float factor, int64_t size) {
  using Number = typename T::Number;
  for (int64_t i = 0; i < size; i += 16) {
    const uint32_t mask = mask_of(size - i, 16);
    T::store16((Number*)x + i, _mm512_mul_ps(T::load16((Number*)x + i, mask), _mm512_set1_ps(factor)), mask);
  }
}

// The sum of two rows, rounded.
template <class T>
AVX512 void add_rows(const void* one, const void* other, void* y, int64_t size) {
  using Number = typename T::Number;
  for (int64_t i = 0; i < size; i += 16) {
    const uint32_t mask = mask_of(size - i, 16);
    const __m512 sum = _mm512_add_ps(T::load16((const Number*)one + i, mask), T::load16((const Number*)other + i, mask));
    T::store16((Number*)y + i, sum, mask);
  }
}

}  // namespace

extern "C" {

int is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

// x / sqrt(mean(x ** 2) + eps), rounded, times a weight, if there is one.
void rms_norm(int64_t bits, const void* x, const void* weight, void* y, int64_t rows, int64_t size, float eps) {
  (bits == 32 ? normalize<Single> : normalize<Brain>)(x, weight, y, rows, size, eps);
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

// A decoder layer's first half for one token, up to the cache: norm, the three projections, rotation if there are tables,
// norm of queries and keys if its eps is not negative, and the queries' scale. `y` gets queries, keys and values side by side.
void project(int64_t bits_of_x, const void* x, const void* norm, float eps, void* y, int64_t bits, int64_t inputs,
             int64_t group, int threads, const char* codes0, const char* scales0, int64_t outputs0, const char* codes1,
             const char* scales1, int64_t outputs1, const char* codes2, const char* scales2, int64_t outputs2,
             int64_t head_dim, const float* cosines, const float* sines, int64_t table_step, int is_interleaved,
             float qk_eps, float query_scale) {
  const bool is_single = bits_of_x == 32;
  std::vector<char> normalized(inputs * bytes_of(bits_of_x));
  rms_norm(bits_of_x, x, norm, normalized.data(), 1, inputs, eps);
  products(normalized.data(), y, 1, bits, inputs, group, threads, 3, codes0, scales0, outputs0, codes1, scales1, outputs1,
           codes2, scales2, outputs2);
  const int64_t heads = (outputs0 + outputs1) / head_dim;
  if (cosines && is_single) rotate<Single>((float*)y, heads, head_dim, cosines, sines, table_step, is_interleaved);
  if (cosines && !is_single) rotate<Brain>((uint16_t*)y, heads, head_dim, cosines, sines, table_step, is_interleaved);
  if (qk_eps >= 0) rms_norm(bits_of_x, y, nullptr, y, heads, head_dim, qk_eps);
  if (query_scale != 1) (is_single ? scale_row<Single> : scale_row<Brain>)(y, query_scale, outputs0);
}

// The rest of the half: attention over what the cache returned, the output projection, and the residual sum.
void attend_and_project(int64_t bits_of_x, const void* query, const void* keys, int64_t key_head_stride,
                        int64_t key_stride, const void* values, int64_t value_head_stride, int64_t value_stride,
                        int64_t count, int64_t heads, int64_t key_heads, int64_t head_dim, float scaling, int64_t bits,
                        int64_t group, int threads, const char* codes, const char* scales, int64_t outputs,
                        const void* residual, void* y) {
  const Cached all_keys = {(const char*)keys, key_head_stride, key_stride, count};
  const Cached all_values = {(const char*)values, value_head_stride, value_stride, count};
  std::vector<char> attended(heads * head_dim * bytes_of(bits_of_x));
  (bits_of_x == 32 ? attend<Single> : attend<Brain>)(query, all_keys, all_values, heads, key_heads, head_dim, scaling,
                                                     attended.data(), threads);
  products(attended.data(), y, 1, bits, heads * head_dim, group, threads, 1, codes, scales, outputs, nullptr, nullptr, 0,
           nullptr, nullptr, 0);
  (bits_of_x == 32 ? add_rows<Single> : add_rows<Brain>)(residual, y, y, outputs);
}

// A dense layer's second half: norm, feed-forward and the residual sum, for rows of `inputs` numbers.
void normalized_feed_forward(int64_t bits_of_x, const void* x, const void* norm, float eps, void* y, int64_t rows,
                             int64_t bits, int64_t inputs, int64_t inner, int64_t padded, int64_t group, int threads,
                             const char* gate, const char* gate_scales, const char* up, const char* up_scales,
                             const char* down, const char* down_scales) {
  std::vector<char> normalized(rows * inputs * bytes_of(bits_of_x));
  rms_norm(bits_of_x, x, norm, normalized.data(), rows, inputs, eps);
  feed_forward(normalized.data(), y, rows, bits, 0, inputs, inner, padded, inputs, group, threads, gate, gate_scales, up,
               up_scales, down, down_scales);
  (bits_of_x == 32 ? add_rows<Single> : add_rows<Brain>)(x, y, y, rows * inputs);
}
}
