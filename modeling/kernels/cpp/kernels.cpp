// Products of few rows with matrices of 4, 8, 16 and 32 bits, and the rest of a decoder layer, for every processor with
// vectors.
//
// A decode step reads every weight once, so these kernels are made to read memory at its full speed. Sums are float32.
//
// cpp_kernels.py compiles this file when it is first needed, for the processor at hand, and says what the arguments are.

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
#include <utility>
#include <vector>

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

#include "vectors.h"

#include "numbers.h"

#include "few_bits.h"

#include "int4_rows.h"

#include "low_rank.h"

#include "attention.h"

namespace {

// Outputs that are computed together, where each is a row of codes or numbers; and at most, where each is a column: sums
// stay in a near cache.
constexpr int64_t kOutputs = 64, kColumns = 2048;
// Inputs of columns that several passes share; outputs that are rows, of which more than four rows read a piece at a time,
// as many as registers hold the sums of.
constexpr int64_t kInputs = 32, kTile = kLanes == 8 ? 3 : 4;
// Rows from which codes of 8 bits are sorted first.
constexpr int64_t kManyRows = 12;

// One matrix: 4 bits with groups of inputs, 8 bits, or numbers. `stride` is the distance between groups' scales, in
// outputs; of numbers that lie input-first that between two inputs, and 0 if they lie output-first. `in_bytes` says
// whether rows become 8 bits. `adapters` add to its products.
struct Matrix {
  int64_t bits;
  const char* codes;
  const char* scales;
  int64_t inputs, outputs, group, stride;
  int64_t in_bytes, num_adapters;
  const LowRank* adapters;

  // Outputs that are computed together.
  int64_t step(int threads) const {
    if (bits == 4) return kBlock;
    if (bits == 8 || !stride) return kOutputs;
    const int64_t share = (outputs + threads - 1) / threads;
    return share < 1 ? 64 : share < kColumns ? (share + 63) / 64 * 64 : kColumns;
  }
};

// Rows as they are multiplied: float32, or bytes.
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

// Rows times the outputs from `start`, `[rows, count]` float32.
template <class T>
void multiply_numbers(const Rows& x, const Matrix& matrix, int64_t start, int64_t count, float* y) {
  using Number = typename T::Number;
  const int64_t inputs = matrix.inputs;
  if (matrix.bits > 8 && matrix.stride) {
    std::fill(y, y + x.count * count, 0.f);
    // Rows that need several passes find the weights in a near cache.
    const int64_t most = x.count <= 4 && x.count != 3 ? inputs : kInputs;
    for (int64_t k = 0; k < inputs; k += most) {
      const int64_t some = std::min(most, inputs - k);
      const Number* weights = (const Number*)matrix.codes + k * matrix.stride + start;
#define CALL(R)                                                                                                 \
  add_columns<T, R>(x.floats + r * inputs + k, inputs, weights, matrix.stride, some, y + r * count, count, count)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
    return;
  }
  int64_t c = 0;
  for (; x.count > 4 && c + kTile <= count; c += kTile) {
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
      int4_rows<1>(x.bytes, codes, scales, matrix.stride, inputs, group, y);
    } else if (matrix.in_bytes && x.count == 2 && kLanes == 16) {
      int4_rows<2>(x.bytes, codes, scales, matrix.stride, inputs, group, y);
    } else if (matrix.in_bytes) {
      int4_block(x.bytes, x.count, codes, scales, matrix.stride, inputs, group, y);
    } else if (x.count > 4) {
      int4_block(x.floats, x.count, codes, scales, matrix.stride, inputs, group, y);
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
    for (int64_t c = 0; c < count; c++) {
      const int8_t* codes = (const int8_t*)matrix.codes + (start + c) * matrix.inputs;
#define CALL(R) int8_output<R>(x.bytes, r, codes, matrix.inputs, y + r * count + c, count)
      FOR_ROWS(x.count, r, CALL)
#undef CALL
    }
  } else {
    multiply_numbers<Signed>(x, matrix, start, count, y);
  }
  for (int64_t r = 0; r < x.count; r++)
    for (int64_t c = 0; c < count; c++) y[r * count + c] *= Brain::number(((const uint16_t*)matrix.scales)[start + c]);
}

inline int64_t bytes_of(int64_t bits) { return bits == 32 ? 4 : 2; }

// The products of rows with the first factors of a matrix's adapters, which are computed a number at a time.
struct Thin {
  std::vector<std::pair<const LowRank*, int64_t>> numbers;
  std::vector<float> found;
  std::vector<int64_t> places;

  void add(const Matrix& matrix, int64_t rows) {
    for (const LowRank* each = matrix.adapters; each != matrix.adapters + matrix.num_adapters; each++) {
      for (int64_t k = 0; k < each->rank; k++) {
        numbers.push_back({each, k});
        places.push_back(found.size());
      }
      found.resize(found.size() + rows * each->rank);
    }
  }

  void compute(int64_t i, const Rows& x, int64_t stride) {
    const auto [adapter, k] = numbers[i];
    (adapter->bits == 32 ? multiply_thin<Single> : multiply_thin<Brain>)(*adapter, k, x.floats, x.count, stride,
                                                                         &found[places[i]]);
  }
};

// Adds what adapters make of their thin products to the outputs from `start`, which are rounded before, as results of T are.
template <class T>
void adapt(const Matrix& matrix, const float* thin, int64_t rows, int64_t start, int64_t count, float* y) {
  const int64_t size = rows * count;
  for (int64_t i = 0; i < size; i += kLanes)
    store_some<Single>(y + i, T::round(load_some<Single>(y + i, size - i)), size - i);
  for (const LowRank* each = matrix.adapters; each != matrix.adapters + matrix.num_adapters; each++)
    for (int64_t r = 0; r < rows; r++, thin += each->rank)
      (each->bits == 32 ? add_update<Single> : add_update<Brain>)(*each, thin, start, count, y + r * count);
}

// Rows times several matrices of the same bits and inputs; their outputs stand side by side in y.
void multiply(const void* all_x, int64_t rows, const Matrix* matrices, int64_t count, void* y, int threads) {
  const Rows x(all_x, rows, matrices[0]);
  int64_t y_stride = 0, steps = 0;
  Thin thin;
  for (int64_t m = 0; m < count; m++) {
    const int64_t step = matrices[m].step(threads);
    y_stride += matrices[m].outputs;
    steps += (matrices[m].outputs + step - 1) / step;
    thin.add(matrices[m], rows);
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (!thin.numbers.empty()) {
#pragma omp for
      for (int64_t i = 0; i < (int64_t)thin.numbers.size(); i++) thin.compute(i, x, matrices[0].inputs);
    }
    std::vector<float> found;
#pragma omp for
    for (int64_t i = 0; i < steps; i++) {
      int64_t m = 0, first = 0, rest = i, step = matrices[0].step(threads);
      const float* of_adapters = thin.found.data();
      for (int64_t own; rest >= (own = (matrices[m].outputs + step - 1) / step); step = matrices[m].step(threads)) {
        first += matrices[m].outputs;
        rest -= own;
        for (int64_t l = 0; l < matrices[m].num_adapters; l++) of_adapters += rows * matrices[m].adapters[l].rank;
        m++;
      }
      const int64_t start = rest * step, some = std::min(step, matrices[m].outputs - start);
      found.resize(std::max<size_t>(found.size(), rows * some));
      multiply_some(x, matrices[m], start, some, found.data());
      if (matrices[m].num_adapters)
        (matrices[m].bits == 32 ? adapt<Single> : adapt<Brain>)(matrices[m], of_adapters, rows, start, some,
                                                                found.data());
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < some; c += kLanes) {
          const Floats numbers = load_some<Single>(&found[r * some + c], some - c);
          const int64_t place = r * y_stride + first + start + c;
          if (matrices[0].bits == 32)
            store_some<Single>((float*)y + place, numbers, some - c);
          else
            store_some<Brain>((uint16_t*)y + place, numbers, some - c);
        }
    }
  }
}

}  // namespace

extern "C" {

// The instructions that the products here were compiled to.
const char* instructions() {
#if defined(__AVX512VNNI__)
  return "AVX-512 with VNNI";
#elif defined(__AVX2__) && defined(__AVXVNNI__)
  return "AVX2 with AVX-VNNI";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON with dot products";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "vectors of four numbers";
#endif
}


// x / sqrt(mean(x ** 2) + eps), rounded, times a weight, if there is one.
void rms_norm(int64_t bits, const void* x, const void* weight, void* y, int64_t rows, int64_t size, float eps) {
  (bits == 32 ? normalize<Single> : normalize<Brain>)(x, weight, y, rows, size, eps);
}

// Rows times matrices; their outputs stand side by side.
void products(const void* x, void* y, int64_t rows, const Matrix* matrices, int64_t count, int threads) {
  multiply(x, rows, matrices, count, y, threads);
}

// What a matrix of 4 bits means, `[inputs, outputs]`, whose rows are `stride` apart, in float32 or bfloat16.
void unpack(const Matrix* matrix, int64_t bits, void* y, int64_t stride, int threads) {
  const int64_t inputs = matrix->inputs, group = matrix->group;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < matrix->outputs; start += kBlock)
    for (int64_t k = 0; k < inputs; k += group) {
      const uint8_t* codes = (const uint8_t*)matrix->codes + start * inputs / 2 + k * (kBlock / 2);
      const uint32_t* scales = (const uint32_t*)matrix->scales + k / group * matrix->stride + start;
      if (bits == 32)
        unpack_codes<Single>(codes, scales, group, (float*)y + k * stride + start, stride);
      else
        unpack_codes<Brain>(codes, scales, group, (uint16_t*)y + k * stride + start, stride);
    }
}

// down(silu(gate(x)) * up(x)): two matrices are gate and up in one, and down, which may have more inputs than there are
// channels, which are zero; three are gate, up and down.
void feed_forward(const void* x, void* y, int64_t rows, const Matrix* matrices, int64_t count, int threads) {
  const Matrix& down = matrices[count - 1];
  const int64_t inner = matrices[0].outputs / (count == 2 ? 2 : 1), size = bytes_of(down.bits);
  std::vector<char> both(rows * 2 * inner * size), hidden(rows * down.inputs * size);
  multiply(x, rows, matrices, count - 1, both.data(), threads);
  for (int64_t r = 0; r < rows; r++)
    (down.bits == 32 ? apply_gate<Single> : apply_gate<Brain>)(&both[r * 2 * inner * size],
                                                               &hidden[r * down.inputs * size], inner);
  multiply(hidden.data(), rows, &down, 1, y, threads);
}

// A dense layer's second half: norm, feed-forward and the residual sum.
void normalized_feed_forward(int64_t bits, const void* x, const void* norm, float eps, void* y, int64_t rows,
                             const Matrix* matrices, int64_t count, int threads) {
  const int64_t inputs = matrices[0].inputs;
  std::vector<char> normalized(rows * inputs * bytes_of(bits));
  rms_norm(bits, x, norm, normalized.data(), rows, inputs, eps);
  feed_forward(normalized.data(), y, rows, matrices, count, threads);
  (bits == 32 ? add_rows<Single> : add_rows<Brain>)(x, y, y, rows * inputs);
}
}

#include "mixture.h"

#include "layer.h"
