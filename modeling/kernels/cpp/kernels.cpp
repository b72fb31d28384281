// Products of few rows with a matrix of 4, 8, 16 or 32 bits, norms, and attention of one query; and the order of 4-bit
// codes for these products.
//
// A decode step reads every weight once, so these kernels must read weights as fast as the memory can deliver them.
// Sums are in float32. cpp_kernels.py compiles this file at first use, for this machine's processor. `Matrix` there
// says what codes and scales are.

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// Loops over the rows; CALL(R) computes the next R = 4, 2 or 1 rows, from row r on.
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

#include "vectors.h"

#include "numbers.h"

#include "few_bits.h"

#include "int4_rows.h"

#include "attention.h"

namespace {

// kOutputs: number of outputs that a thread computes at a time if the matrix is output-first.
// kColumns: the most outputs if the matrix is input-first; their sums stay in the cache.
constexpr int64_t kOutputs = 64, kColumns = 2048;
// kInputs: number of inputs in a block of an input-first matrix, which several groups of rows use one after the other.
// kTile: number of outputs of an output-first matrix that share each load of the rows; their sums fit into registers.
constexpr int64_t kInputs = 32, kTile = kLanes == 8 ? 3 : 4;
// Number of inputs of all rows together that fit into the L1 cache, in float32 and in bytes with scales. Up to this
// size outputs are computed one by one, so that weights are read in the order of memory.
constexpr int64_t kNearFloats = 5120, kNearBytes = 7168;
// Number of rows from which 8-bit codes are brought into another order first (`int8_block`).
constexpr int64_t kManyRows = 12;

// A matrix with weights of 4, 8, 16 or 32 bits. group: for 4 bits, the number of inputs that share a scale. stride: for
// 4 bits, the number of outputs for which each group of inputs has scales; for 16 and 32 bits, the number of weights
// from one input to the next, or 0 if output-first. in_bytes: quantize rows to 8 bits.
struct Matrix {
  int64_t bits;
  const char* codes;
  const char* scales;
  int64_t inputs, outputs, group, stride;
  int64_t in_bytes;

  // Number of outputs that a thread computes at a time.
  int64_t step(int threads) const {
    if (bits == 4) return kBlock;
    if (bits == 8 || !stride) return kOutputs;
    const int64_t share = (outputs + threads - 1) / threads;
    return share < 1 ? 64 : share < kColumns ? (share + 63) / 64 * 64 : kColumns;
  }
};

// The rows, converted to float32, and, if `in_bytes` of the matrix is set, quantized to bytes.
struct Rows {
  int64_t count;
  const float* floats;
  std::vector<float> widened;
  ByteRows bytes;

  Rows(const void* x, int64_t rows, const Matrix& matrix) : count(rows), floats((const float*)x) {
    const int64_t size = rows * matrix.inputs;
    if (matrix.bits != 32) {
      widened.resize(size);
      for (int64_t i = 0; i < size; i += kLanes)
        store_some<Single>(&widened[i], load_some<Brain>((const uint16_t*)x + i, size - i), size - i);
      floats = widened.data();
    }
    if (matrix.in_bytes) quantize(floats, rows, matrix.inputs, matrix.bits, bytes);
  }
};

// Multiplies rows by `count` outputs from output `start` on: `[rows, count]` float32.
template <class T>
void multiply_numbers(const Rows& x, const Matrix& matrix, int64_t start, int64_t count, float* y) {
  using Number = typename T::Number;
  const int64_t inputs = matrix.inputs;
  if (matrix.bits > 8 && matrix.stride) {
    std::fill(y, y + x.count * count, 0.f);
    // More than one group of rows: each block of weights is still in the cache for the groups after the first.
    const int64_t most = x.count <= 4 && x.count != 3 ? inputs : kInputs;
    for (int64_t k = 0; k < inputs; k += most) {
      const int64_t size = std::min(most, inputs - k);
      const Number* weights = (const Number*)matrix.codes + k * matrix.stride + start;
#define CALL(R)                                                                                                 \
  add_columns<T, R>(x.floats + r * inputs + k, inputs, weights, matrix.stride, size, y + r * count, count, count)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
    return;
  }
  int64_t c = 0;
  for (; x.count * inputs > kNearFloats && c + kTile <= count; c += kTile) {
    const Number* weights = (const Number*)matrix.codes + (start + c) * inputs;
#define CALL(R) dot_tile<T, R, kTile>(x.floats + r * inputs, inputs, weights, inputs, y + r * count + c, count)
    FOR_ROWS(x.count, r, CALL)
#undef CALL
  }
  for (; c < count; c++) {
    const Number* weights = (const Number*)matrix.codes + (start + c) * inputs;
    float sums[4];
#define CALL(R)                                                        \
  dot_rows<T, R>(x.floats + r * inputs, inputs, weights, inputs, sums); \
  for (int i = 0; i < R; i++) y[(r + i) * count + c] = sums[i]
    FOR_ROWS(x.count, r, CALL)
#undef CALL
  }
}

void multiply_some(const Rows& x, const Matrix& matrix, int64_t start, int64_t count, float* y) {
  if (matrix.bits == 32) return multiply_numbers<Single>(x, matrix, start, count, y);
  if (matrix.bits == 16) return multiply_numbers<Brain>(x, matrix, start, count, y);
  if (matrix.bits == 4) {
    const uint8_t* codes = (const uint8_t*)matrix.codes + start * matrix.inputs / 2;
    const uint32_t* scales = (const uint32_t*)matrix.scales + start;
    const int64_t inputs = matrix.inputs, group = matrix.group;
    if (matrix.in_bytes && x.count == 1) {
      (group == kPart ? int4_rows<1, true> : int4_rows<1, false>)(x.bytes, codes, scales, matrix.stride, inputs, group, y);
    } else if (matrix.in_bytes && x.count == 2 && kLanes == 16) {
      (group == kPart ? int4_rows<2, true> : int4_rows<2, false>)(x.bytes, codes, scales, matrix.stride, inputs, group, y);
    } else if (matrix.in_bytes) {
      int4_block(x.bytes, x.count, codes, scales, matrix.stride, inputs, group, y);
    } else {
#define CALL(R) int4_rows<R>(x.floats + r * inputs, codes, scales, matrix.stride, inputs, group, y + r * kBlock)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
    return;
  }
  if (matrix.in_bytes && x.count >= kManyRows && count == kBlock) {
    int8_block(x.bytes, x.count, (const int8_t*)matrix.codes + start * matrix.inputs, matrix.inputs, y);
  } else if (matrix.in_bytes) {
    int64_t c = 0;
    for (; x.count * matrix.inputs > kNearBytes && c + kTile <= count; c += kTile) {
      const int8_t* codes = (const int8_t*)matrix.codes + (start + c) * matrix.inputs;
#define CALL(R) int8_outputs<R, kTile>(x.bytes, r, codes, matrix.inputs, y + r * count + c, count)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
    for (; c < count; c++) {
      const int8_t* codes = (const int8_t*)matrix.codes + (start + c) * matrix.inputs;
#define CALL(R) int8_outputs<R, 1>(x.bytes, r, codes, matrix.inputs, y + r * count + c, count)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
  } else {
    multiply_numbers<Signed>(x, matrix, start, count, y);
  }
  for (int64_t r = 0; r < x.count; r++)
    for (int64_t c = 0; c < count; c++) y[r * count + c] *= Brain::number(((const uint16_t*)matrix.scales)[start + c]);
}

void multiply(const void* all_x, int64_t rows, const Matrix& matrix, void* y, int threads) {
  const Rows x(all_x, rows, matrix);
  const int64_t outputs = matrix.outputs, step = matrix.step(threads), steps = (outputs + step - 1) / step;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> sums;
#pragma omp for
    for (int64_t i = 0; i < steps; i++) {
      const int64_t start = i * step, count = std::min(step, outputs - start);
      sums.resize(std::max<size_t>(sums.size(), rows * count));
      multiply_some(x, matrix, start, count, sums.data());
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < count; c += kLanes) {
          const Floats numbers = load_some<Single>(&sums[r * count + c], count - c);
          const int64_t index = r * outputs + start + c;
          if (matrix.bits == 32)
            store_some<Single>((float*)y + index, numbers, count - c);
          else
            store_some<Brain>((uint16_t*)y + index, numbers, count - c);
        }
    }
  }
}

}  // namespace

extern "C" {

// Returns the name of the instructions that the products were compiled for.
const char* instructions() { return kInstructions; }

#define MATRIX                                                                                                       \
  int64_t bits, const char *codes, const char *scales, int64_t inputs, int64_t outputs, int64_t group, int64_t stride, \
      int64_t in_bytes

// Multiplies rows by the transpose of a matrix.
void product(const void* x, void* y, int64_t rows, MATRIX, int threads) {
  multiply(x, rows, {bits, codes, scales, inputs, outputs, group, stride, in_bytes}, y, threads);
}

// RMSNorm: x / sqrt(mean(x ** 2) + eps), rounded to the dtype, times a weight.
void rms_norm(int64_t bits, const void* x, const void* weight, void* y, int64_t rows, int64_t size, float eps) {
  (bits == 32 ? normalize<Single> : normalize<Brain>)(x, weight, y, rows, size, eps);
}

// Attends with one query per head to `count` keys and values: `[heads, head_dim]`.
void attention(int64_t bits, const void* query, const char* keys, int64_t key_head_stride, int64_t key_stride,
               const char* values, int64_t value_head_stride, int64_t value_stride, int64_t count, int64_t heads,
               int64_t key_heads, int64_t head_dim, float scaling, void* y, int threads) {
  (bits == 32 ? attend<Single> : attend<Brain>)(query, {keys, key_head_stride, key_stride, count},
                                                {values, value_head_stride, value_stride, count}, heads, key_heads,
                                                head_dim, scaling, y, threads);
}

// Unpacks a 4-bit matrix into `[inputs, outputs]` with rows `y_stride` apart, in float32 or bfloat16.
void unpack(MATRIX, int64_t y_bits, void* y, int64_t y_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < outputs; start += kBlock)
    for (int64_t k = 0; k < inputs; k += group) {
      const uint8_t* group_codes = (const uint8_t*)codes + start * inputs / 2 + k * (kBlock / 2);
      const uint32_t* group_scales = (const uint32_t*)scales + k / group * stride + start;
      if (y_bits == 32)
        unpack_codes<Single>(group_codes, group_scales, group, (float*)y + k * y_stride + start, y_stride);
      else
        unpack_codes<Brain>(group_codes, group_scales, group, (uint16_t*)y + k * y_stride + start, y_stride);
    }
}

// Packs 4-bit codes, which come eight to a 32-bit word, into whole blocks of outputs. If a word has the codes of eight
// inputs, lowest bits first, `places` is 0. If it has the codes of eight outputs, hexadecimal digit j of `places`
// (lowest digit first) says which four bits of the word belong to output j. `output_stride` and `input_stride` are the
// numbers of words from an output or an input (or eight of them) to the next.
void pack_words(const uint32_t* words, int64_t output_stride, int64_t input_stride, int64_t places, int64_t inputs,
                int64_t outputs, uint8_t* packed, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < outputs; start += kBlock)
    for (int64_t k = 0; k < inputs; k += places ? 1 : 8) {
      uint32_t codes[kBlock];
      for (int64_t j = 0; j < kBlock; j++)
        codes[j] = places ? words[(start + j) / 8 * output_stride + k * input_stride] >> 4 * (places >> j % 8 * 4 & 15)
                          : words[(start + j) * output_stride + k / 8 * input_stride];
      uint8_t* bytes = packed + (start * inputs + k * kBlock) / 2;
      for (int i = 0; i < (places ? 1 : 8); i++, bytes += kBlock / 2)
        for (int j = 0; j < kBlock / 2; j++)
          bytes[j] = (codes[j] >> 4 * i & 15) | (codes[kBlock / 2 + j] >> 4 * i & 15) << 4;
    }
}
}
