// Products of rows with 4-bit and 8-bit weights. Either rows are quantized to 8 bits, with a scale for each 32 inputs,
// so that integers are multiplied and added exactly; or rows stay in float32, and weights are unpacked to float32.

#if defined(__AVX512VNNI__)
#include "bytes_avx512.h"
#elif defined(__AVX2__)
#include "bytes_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "bytes_neon.h"
#else
#include "bytes_plain.h"
#endif

namespace {

// Number of outputs of a block of 4-bit codes. For each input a block has 32 bytes: outputs 0 to 31 in the low four
// bits, outputs 32 to 63 in the high four.
constexpr int64_t kBlock = 64;
constexpr int kVectors = kBlock / kLanes;
// Number of inputs of a row that share a scale: a part.
constexpr int64_t kPart = 32;
// Number of inputs in a vector of bytes.
constexpr int64_t kStep = 4 * kLanes;
// Turns sums of codes times bytes (CodeSums) into sums for `kLanes` outputs.
inline Ints whole(Ints sum) { return sum; }

// Rows quantized to 8 bits and padded with zeros: `bytes`, of `padded` inputs a row. Products with 4-bit weights use
// the scale and the sum of the bytes of each part. Products with 8-bit weights use for each four inputs (a quad) the
// scale, and the number at which the sum of their products starts.
struct ByteRows {
  int64_t padded, parts, quads;
  std::vector<int8_t> bytes;
  std::vector<float> scales, sums, quad_scales;
  std::vector<int32_t> starts;
};

// Quantizes a part of a row: divides it by its scale, rounds to the nearest integer, and returns the scale.
inline float quantize_part(const float* x, int8_t* bytes) {
  Ints most = {};
  for (int i = 0; i < kPart; i += kLanes) {
    const Ints magnitude = load<Ints>(x + i) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  // The bits of positive floats sort as the floats do. NaN or infinity becomes the scale, and so all products.
  int32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits = most[i] > bits ? most[i] : bits;
  float largest;
  std::memcpy(&largest, &bits, 4);
  // The reciprocal of smaller numbers would be infinite: they become zeros.
  const bool has_bytes = largest > 1e-36f && bits < 0x7f800000;
  const float per_scale = has_bytes ? 127.f / largest : 0.f;
  for (int i = 0; i < kPart; i += kLanes) {
    const Floats numbers = has_bytes ? load<Floats>(x + i) * per_scale : Floats{};
    store(bytes + i, __builtin_convertvector(__builtin_convertvector(to_nearest(numbers), Ints), Quarters));
  }
  return has_bytes || bits >= 0x7f800000 ? largest / 127.f : 0.f;
}

// Quantizes rows for products with weights of so many bits.
void quantize(const float* x, int64_t rows, int64_t inputs, int64_t bits, ByteRows& result) {
  result.padded = (inputs + 63) / 64 * 64;
  result.parts = result.padded / kPart;
  result.quads = result.padded / 4;
  result.bytes.assign(rows * result.padded, 0);
  result.scales.assign(rows * result.parts, 0);
  result.sums.assign(rows * result.parts, 0);
  if (bits == 8) result.quad_scales.resize(rows * result.quads);
  if (bits == 8) result.starts.assign(rows * result.quads, 0);
#pragma omp parallel for if (rows > 16)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t p = 0; p * kPart < inputs; p++) {
      const float* numbers = x + r * inputs + p * kPart;
      int8_t* bytes = &result.bytes[r * result.padded + p * kPart];
      float padded[kPart] = {};
      if (inputs - p * kPart < kPart) {
        std::memcpy(padded, numbers, (inputs - p * kPart) * sizeof(float));
        numbers = padded;
      }
      const float scale = result.scales[r * result.parts + p] = quantize_part(numbers, bytes);
      // Add each four bytes by shifts of the 32-bit integer that consists of them.
      using Quads = VectorOf<int32_t, kPart / 4>::type;
      const Quads fours = load<Quads>(bytes);
      const Quads sums = (fours << 24 >> 24) + (fours << 16 >> 24) + (fours << 8 >> 24) + (fours >> 24);
      int32_t whole = 0;
      for (int q = 0; q < kPart / 4; q++) whole += sums[q];
      result.sums[r * result.parts + p] = (float)whole;
      if (bits == 8) {
        const int64_t quad = r * result.quads + p * kPart / 4;
        std::fill_n(&result.quad_scales[quad], kPart / 4, scale);
        if (kPlus128) store(&result.starts[quad], -128 * sums);
      }
    }
}

// Returns the number of the group of weights that a part of the inputs belongs to. kOnePart: a group has one part; this
// avoids a division, which takes as long as a part's products.
template <bool kOnePart>
inline int64_t group_of(int64_t part, int64_t group) {
  return kOnePart ? part : part * kPart / group;
}

// Prefetches the scales that a block of outputs needs four parts later, or, near its end, those of the next block. The
// processor does not prefetch them by itself, since the scales of two groups are far apart.
template <bool kOnePart>
__attribute__((always_inline)) inline void prefetch_scales(const uint32_t* scales, int64_t stride, int64_t part, int64_t inputs, int64_t group) {
  const int64_t next = part + 4, parts = inputs / kPart;
  const uint32_t* later = next < parts ? scales + group_of<kOnePart>(next, group) * stride
                                       : scales + kBlock + group_of<kOnePart>(next - parts, group) * stride;
  // In a mapped file the 256 bytes of scales may begin within a cache line, and then are in five lines.
  for (int i = 0; i < 5; i++) __builtin_prefetch((const char*)later + std::min(64 * i, 255));
}

// The scales of a block of outputs, and the weights that code 0 means, in the order of outputs of `split_codes`.
struct BlockScales {
  float scale[kBlock], of_0[kBlock];
  void read(const uint32_t* scales) {
    using Four = VectorOf<uint32_t, 4>::type;
    for (int p = 0; p < 16; p++) {
      const Four both = load<Four>(scales + output_of(p));
      const auto factor = (VectorOf<float, 4>::type)(both << 16);
      store(scale + 4 * p, factor);
      store(of_0 + 4 * p, (VectorOf<float, 4>::type)(both & 0xffff0000) - 8.f * factor);
    }
  }
};

// Adds to `sums` products of a part of R rows, from row r on, with 64 outputs, whose weights are codes or bytes.
template <int R, bool kCodes>
void add_part(const ByteRows& x, int64_t r, int64_t part, const Bytes (&weights)[kPart / 4][kVectors],
              const BlockScales& scales, float* sums) {
  // kTogether: number of vectors of outputs whose sums fit into registers.
  constexpr int kMost = (kLanes == 8 ? 8 : 16) / R, kTogether = kMost < kVectors ? kMost : kVectors;
  using Sums = typename std::conditional<kCodes, CodeSums, Ints>::type;
  const int8_t* bytes = &x.bytes[r * x.padded + part * kPart];
  for (int first = 0; first < kVectors; first += kTogether) {
    Sums sum[R][kTogether] = {};
    for (int q = 0; q < kPart / 4; q++)
      for (int i = 0; i < R; i++) {
        int32_t four;
        std::memcpy(&four, bytes + i * x.padded + 4 * q, 4);
        const Bytes row = (Bytes)(Ints{} + four);
        for (int v = 0; v < kTogether; v++)
          if constexpr (kCodes)
            sum[i][v] = add_codes(sum[i][v], weights[q][first + v], row);
          else
            sum[i][v] = add_bytes(sum[i][v], weights[q][first + v], row);
      }
    for (int i = 0; i < R; i++) {
      const float factor = x.scales[(r + i) * x.parts + part], all = factor * x.sums[(r + i) * x.parts + part];
      for (int v = 0; v < kTogether; v++) {
        const int output = (first + v) * kLanes;
        float* y = sums + i * kBlock + output;
        if constexpr (kCodes) {
          const Floats products = to_floats(whole(sum[i][v])) * factor;
          store(y, load<Floats>(y) + products * load<Floats>(scales.scale + output) + load<Floats>(scales.of_0 + output) * all);
        } else {
          store(y, load<Floats>(y) + to_floats(sum[i][v]) * factor - (kPlus128 ? 128.f * all : 0.f));
        }
      }
    }
  }
}

// Multiplies rows by a block of 4-bit weights. A number of `scales` has, for a group and an output, the scale and the
// weight that code 8 means, both in bfloat16.
void int4_block(const ByteRows& x, int64_t rows, const uint8_t* codes, const uint32_t* scales, int64_t scale_stride,
                int64_t inputs, int64_t group, float* y) {
  std::fill(y, y + rows * kBlock, 0.f);
  BlockScales of_block;
  for (int64_t p = 0; p < inputs / kPart; p++) {
    if (p * kPart % group == 0) of_block.read(scales + p * kPart / group * scale_stride);
    prefetch_scales<false>(scales, scale_stride, p, inputs, group);
    Bytes split[kPart / 4][kVectors];
    for (int q = 0; q < kPart / 4; q++) {
      const uint8_t* four = codes + (p * kPart + 4 * q) * (kBlock / 2);
      __builtin_prefetch(four + kAhead);
      __builtin_prefetch(four + 64 + kAhead);
      split_codes(four, split[q]);
    }
#define CALL(R) add_part<R, true>(x, r, p, split, of_block, y + r * kBlock)
    FOR_ROWS(rows, r, CALL)
#undef CALL
  }
  for (int64_t r = 0; r < rows; r++) {
    float sorted[kBlock];
    for (int p = 0; p < 16; p++) std::memcpy(sorted + output_of(p), y + r * kBlock + 4 * p, 16);
    std::memcpy(y + r * kBlock, sorted, sizeof(sorted));
  }
}

// Unpacks a block of 4-bit codes, for `inputs` inputs of a group, into `[inputs, 64]`, whose rows are `stride` apart.
template <class T>
void unpack_codes(const uint8_t* codes, const uint32_t* scales, int64_t inputs, typename T::Number* y, int64_t stride) {
  for (int first = 0; first < kBlock; first += kLanes) {
    const Words both = load<Words>(scales + first);
    const Floats scale = (Floats)(both << 16), of_8 = (Floats)(both & 0xffff0000);
    for (int64_t k = 0; k < inputs; k++) {
      const Quarters bytes = load<Quarters>(codes + k * (kBlock / 2) + first % 32);
      const Ints code = widen(bytes) >> (first < 32 ? 0 : 4) & 15;
      T::store(y + k * stride + first, to_floats(code - 8) * scale + of_8);
    }
  }
}

// Multiplies R rows, from row r on, by C outputs of 8 bits, which share each load of the rows.
template <int R, int C>
void int8_outputs(const ByteRows& x, int64_t r, const int8_t* codes, int64_t inputs, float* y, int64_t y_stride) {
  constexpr int kSums = C == 1 ? 4 / R : 1;
  Floats sum[R][C][kSums] = {};
  const auto add = [&](int64_t k, const Bytes (&weights)[C], int j) {
    for (int i = 0; i < R; i++) {
      const int64_t quad = (r + i) * x.quads + k / 4;
      const Ints start = load<Ints>(&x.starts[quad]);
      const Bytes bytes = load<Bytes>(&x.bytes[(r + i) * x.padded + k]);
      const Floats scale = load<Floats>(&x.quad_scales[quad]);
      for (int c = 0; c < C; c++) sum[i][c][j] += to_floats(add_bytes(start, weights[c], bytes)) * scale;
    }
  };
  int64_t k = 0;
  Bytes weights[C];
  for (; k + kSums * kStep <= inputs; k += kSums * kStep)
    for (int j = 0; j < kSums; j++) {
      for (int c = 0; c < C; c++) {
        const int8_t* begin = codes + c * inputs + k + j * kStep;
        if (j * kStep % 64 == 0) __builtin_prefetch(begin + (C == 1 ? kAhead : C * inputs));
        weights[c] = load<Bytes>(begin);
      }
      add(k + j * kStep, weights, j);
    }
  for (; k < inputs; k += kStep) {
    for (int c = 0; c < C; c++) {
      weights[c] = Bytes{};
      std::memcpy(&weights[c], codes + c * inputs + k, std::min<int64_t>(inputs - k, kStep));
    }
    add(k, weights, 0);
  }
  for (int i = 0; i < R; i++)
    for (int c = 0; c < C; c++) {
      Floats all = sum[i][c][0];
      for (int j = 1; j < kSums; j++) all += sum[i][c][j];
      y[i * y_stride + c] = sum_of(all);
    }
}

// Multiplies many rows by 64 outputs of 8 bits, whose codes are first copied into the order of blocks of 4-bit codes.
void int8_block(const ByteRows& x, int64_t rows, const int8_t* codes, int64_t inputs, float* y) {
  std::fill(y, y + rows * kBlock, 0.f);
  for (int64_t p = 0; p * kPart < inputs; p++) {
    Bytes weights[kPart / 4][kVectors];
    for (int c = 0; c < kBlock; c++) {
      const int8_t* begin = codes + c * inputs + p * kPart;
      int32_t fours[kPart / 4] = {};
      if (inputs - p * kPart >= kPart)
        std::memcpy(fours, begin, kPart);
      else
        std::memcpy(fours, begin, inputs - p * kPart);
      __builtin_prefetch(begin + 2 * kPart);
      for (int q = 0; q < kPart / 4; q++) std::memcpy((char*)weights[q] + 4 * c, &fours[q], 4);
    }
#define CALL(R) add_part<R, false>(x, r, p, weights, BlockScales(), y + r * kBlock)
    FOR_ROWS(rows, r, CALL)
#undef CALL
  }
}

}  // namespace
