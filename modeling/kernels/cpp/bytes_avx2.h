// Products of 8-bit integers with AVX2, with or without AVX-VNNI. These instructions take an unsigned first factor.

namespace {

// Splits the 4-bit codes of four inputs and 64 outputs into bytes: each vector has the four inputs of `kLanes` outputs.
inline void split_codes(const uint8_t* codes, Bytes (&split)[64 / kLanes]) {
  __m256i of[4];
  for (int i = 0; i < 4; i++) of[i] = _mm256_loadu_si256((const __m256i*)(codes + 32 * i));
  const __m256i low01 = _mm256_unpacklo_epi8(of[0], of[1]), high01 = _mm256_unpackhi_epi8(of[0], of[1]);
  const __m256i low23 = _mm256_unpacklo_epi8(of[2], of[3]), high23 = _mm256_unpackhi_epi8(of[2], of[3]);
  const __m256i pairs[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                            _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
  const __m256i lowest = _mm256_set1_epi8(15);
  for (int j = 0; j < 4; j++) {
    split[j] = (Bytes)_mm256_and_si256(pairs[j], lowest);
    split[4 + j] = (Bytes)_mm256_and_si256(_mm256_srli_epi16(pairs[j], 4), lowest);
  }
}

// Returns the number of the first of the four outputs in each 16 bytes of these vectors; AVX2 unpacks half registers.
constexpr int output_of(int piece) { return piece / 8 * 32 + piece % 2 * 16 + piece / 2 % 4 * 4; }

#if defined(__AVXVNNI__)

constexpr const char* kInstructions = "AVX2 with AVX-VNNI";
using CodeSums = Ints;

// True if 8-bit weights w are multiplied as w + 128, unsigned. Then sums start at -128 times the sum of the inputs.
constexpr bool kPlus128 = true;

inline Ints add_codes(Ints sum, Bytes codes, Bytes x) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
}

inline Ints add_bytes(Ints sum, Bytes weights, Bytes x) {
  const __m256i plus128 = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8(-128));
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, plus128, (__m256i)x);
}

#else

constexpr const char* kInstructions = "AVX2";
constexpr bool kPlus128 = false;

// Sums of 16 bits do not overflow: each adds 16 of a part's 32 products, at most 16 * 15 * 127.
using CodeSums = VectorOf<int16_t, 2 * kLanes>::type;

inline CodeSums add_codes(CodeSums sum, Bytes codes, Bytes x) {
  return sum + (CodeSums)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
}

inline Ints whole(CodeSums sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }

// Moves the weights' signs to the rows, and multiplies. The sum of two products, at most 2 * 128 * 127, has 16 bits.
inline Ints add_bytes(Ints sum, Bytes weights, Bytes x) {
  const __m256i signs_moved = _mm256_sign_epi8((__m256i)x, (__m256i)weights);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), signs_moved);
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#endif

}  // namespace
