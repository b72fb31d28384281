// Rows in bfloat16 times matrices of 4 bits, where there are no instructions for bfloat16: codes become float32.
//
// cpp_kernels.py compiles this file when it is first needed, and says what the arguments are.

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 8;

// Outputs whose codes lie together: for each input 32 bytes, outputs 0 to 31 in the low four bits, 32 to 63 in the high
// ones. Read as eight words, a shift brings one output of each word into its lowest bits: vector 4 * half + b has the
// outputs 32 * half + 4 * lane + b.
constexpr int64_t kBlock = 64;
constexpr int kVectors = kBlock / kLanes;

inline float to_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of 32 words those of output 4 * lane + b in vector b: four 4 x 4 matrices transposed.
inline void sort_by_vector(const uint32_t* words, __m256i (&sorted)[4]) {
  __m256i rows[4];
  for (int i = 0; i < 4; i++) {
    const __m128i low = _mm_loadu_si128((const __m128i*)(words + 4 * i));
    const __m128i high = _mm_loadu_si128((const __m128i*)(words + 16 + 4 * i));
    rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  const __m256i first01 = _mm256_unpacklo_epi32(rows[0], rows[1]), last01 = _mm256_unpackhi_epi32(rows[0], rows[1]);
  const __m256i first23 = _mm256_unpacklo_epi32(rows[2], rows[3]), last23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
  sorted[0] = _mm256_unpacklo_epi64(first01, first23);
  sorted[1] = _mm256_unpackhi_epi64(first01, first23);
  sorted[2] = _mm256_unpacklo_epi64(last01, last23);
  sorted[3] = _mm256_unpackhi_epi64(last01, last23);
}

// Sums over a group of inputs of R rows times codes, for COUNT of the vectors, as many as registers hold.
template <int R, int FIRST, int COUNT>
inline void sum_group(const float* x, int64_t x_stride, const uint8_t* codes, int64_t group, __m256 (&sums)[R][kVectors]) {
  __m256 sum[R][COUNT];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < COUNT; v++) sum[r][v] = _mm256_setzero_ps();
  const __m256i lowest = _mm256_set1_epi32(15);
  for (int64_t k = 0; k < group; k++) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(codes + k * (kBlock / 2)));
    __m256 weights[COUNT];
    for (int v = 0; v < COUNT; v++) {
      const __m256i shifted = _mm256_srli_epi32(bytes, (FIRST + v) % 4 * 8 + (FIRST + v) / 4 * 4);
      weights[v] = _mm256_cvtepi32_ps(_mm256_and_si256(shifted, lowest));
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < COUNT; v++)
        sum[r][v] = _mm256_fmadd_ps(weights[v], _mm256_broadcast_ss(x + r * x_stride + k), sum[r][v]);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < COUNT; v++) sums[r][FIRST + v] = sum[r][v];
  if constexpr (FIRST + COUNT < kVectors) sum_group<R, FIRST + COUNT, COUNT>(x, x_stride, codes, group, sums);
}

// R rows times the outputs of a block. `scales` has for each group and output a scale, and the value of code 8.
template <int R>
void multiply_block(const float* x, const float* sums_of_x, const uint8_t* codes, const uint32_t* scales, int64_t outputs,
                    int64_t inputs, int64_t group, uint16_t* y, int64_t y_stride) {
  const int64_t groups = inputs / group;
  const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000);
  __m256 total[R][kVectors];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) total[r][v] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m256 sums[R][kVectors];
    sum_group<R, 0, kVectors / R>(x + g * group, inputs, codes + g * group * (kBlock / 2), group, sums);
    for (int half = 0; half < 2; half++) {
      __m256i both[4];
      sort_by_vector(scales + g * outputs + 32 * half, both);
      for (int b = 0; b < 4; b++) {
        const int v = 4 * half + b;
        const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(both[b], 16));
        const __m256 of_8 = _mm256_castsi256_ps(_mm256_and_si256(both[b], upper_half));
        const __m256 of_0 = _mm256_fnmadd_ps(scale, _mm256_set1_ps(8.f), of_8);
        for (int r = 0; r < R; r++) {
          total[r][v] = _mm256_fmadd_ps(scale, sums[r][v], total[r][v]);
          total[r][v] = _mm256_fmadd_ps(of_0, _mm256_set1_ps(sums_of_x[r * groups + g]), total[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++) {
      float floats[kLanes];
      _mm256_storeu_ps(floats, total[r][v]);
      for (int lane = 0; lane < kLanes; lane++) y[r * y_stride + v / 4 * 32 + 4 * lane + v % 4] = to_bfloat16(floats[lane]);
    }
}

}  // namespace

extern "C" {

int is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// Rows times up to three matrices of whole blocks; their outputs stand side by side in y.
void products(const uint16_t* x, uint16_t* y, int64_t rows, int64_t bits, int64_t inputs, int64_t group, int threads,
              int64_t count, const uint8_t* codes0, const uint32_t* scales0, int64_t outputs0, const uint8_t* codes1,
              const uint32_t* scales1, int64_t outputs1, const uint8_t* codes2, const uint32_t* scales2,
              int64_t outputs2) {
  const uint8_t* codes[3] = {codes0, codes1, codes2};
  const uint32_t* scales[3] = {scales0, scales1, scales2};
  const int64_t outputs[3] = {outputs0, outputs1, outputs2}, groups = inputs / group;
  const int64_t all_outputs = outputs0 + outputs1 + outputs2;
  std::vector<float> floats(rows * inputs), sums(rows * groups);
  for (int64_t i = 0; i < rows * inputs; i++) floats[i] = to_float(x[i]);
  for (int64_t i = 0; i < rows * groups; i++)
    for (int64_t k = 0; k < group; k++) sums[i] += floats[i * group + k];
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < all_outputs; start += kBlock) {
    int m = 0;
    int64_t own = start;
    while (own >= outputs[m]) own -= outputs[m++];
    const uint8_t* block = codes[m] + own * inputs / 2;
    for (int64_t r = 0; r < rows;) {
      const int64_t left = rows - r;
      (left >= 4 ? multiply_block<4> : left >= 2 ? multiply_block<2> : multiply_block<1>)(
          &floats[r * inputs], &sums[r * groups], block, scales[m] + own, outputs[m], inputs, group,
          y + r * all_outputs + start, all_outputs);
      r += left >= 4 ? 4 : left >= 2 ? 2 : 1;
    }
  }
}
}
