// Rows times outputs of 4 and 8 bits. A code becomes a bfloat16 number by one lookup, and `vdpbf16ps` multiplies 32 of
// them. Codes are small integers, so they and their products with the rows are exact; scales are applied to sums.

namespace {

// Outputs whose 4-bit codes lie together.
constexpr int64_t kBlock = 64;

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

}  // namespace
