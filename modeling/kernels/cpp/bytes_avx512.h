// Products of 8-bit integers with AVX-512 and VNNI, whose instruction takes an unsigned first factor.

namespace {

constexpr const char* kInstructions = "AVX-512 with VNNI";
using CodeSums = Ints;

// True if 8-bit weights w are multiplied as w + 128, unsigned. Then sums start at -128 times the sum of the inputs.
constexpr bool kPlus128 = true;

// Splits the 4-bit codes of four inputs and 64 outputs into bytes: each vector has the four inputs of `kLanes` outputs.
inline void split_codes(const uint8_t* codes, Bytes (&split)[64 / kLanes]) {
  const __m512i fours = _mm512_set4_epi32(24, 16, 8, 0), lane = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
  const __m512i turned = _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400), lowest = _mm512_set1_epi8(15);
  const __m512i one = _mm512_loadu_si512(codes), other = _mm512_loadu_si512(codes + 64);
  for (int j = 0; j < 2; j++) {
    const __m512i place = _mm512_add_epi32(_mm512_add_epi32(fours, lane), _mm512_set1_epi32(4 * j));
    const __m512i both = _mm512_shuffle_epi8(_mm512_permutex2var_epi32(one, place, other), turned);
    split[j] = (Bytes)_mm512_and_si512(both, lowest);
    split[2 + j] = (Bytes)_mm512_and_si512(_mm512_srli_epi16(both, 4), lowest);
  }
}

// Returns the number of the first of the four outputs in each 16 bytes of these vectors.
constexpr int output_of(int piece) { return 4 * piece; }

inline Ints add_codes(Ints sum, Bytes codes, Bytes x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}

inline Ints add_bytes(Ints sum, Bytes weights, Bytes x) {
  const __m512i plus128 = _mm512_xor_si512((__m512i)weights, _mm512_set1_epi8(-128));
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, plus128, (__m512i)x);
}

}  // namespace
