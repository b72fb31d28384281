// Products of one to four rows with 4-bit weights: codes are unpacked in registers, without a buffer.

namespace {

// Loads the words of vector v of outputs, in the order of `split_codes`. A word has a scale and the weight of code 8.
inline Words words_of(const uint32_t* scales, int v) {
  constexpr int kPieces = kLanes / 4;
  if constexpr (kPieces == 1 || output_of(1) == 4) {
    return load<Words>(scales + output_of(v * kPieces));
  } else {
    using Four = VectorOf<uint32_t, 4>::type;
    const Four one = load<Four>(scales + output_of(v * kPieces)), other = load<Four>(scales + output_of(v * kPieces + 1));
    Words both;
    for (int i = 0; i < 4; i++) {
      both[i] = one[i];
      both[4 + i] = other[i];
    }
    return both;
  }
}

// Multiplies R rows of bytes by 64 outputs: `[R, 64]`.
template <int R, bool kOnePart>
void int4_rows(const ByteRows& x, const uint8_t* codes, const uint32_t* scales, int64_t scale_stride, int64_t inputs,
               int64_t group, float* y) {
  Floats total[R][kVectors] = {};
  for (int64_t p = 0; p < inputs / kPart; p++) {
    CodeSums sum[R][kVectors] = {};
    for (int q = 0; q < kPart / 4; q++) {
      const uint8_t* four = codes + (p * kPart + 4 * q) * (kBlock / 2);
      __builtin_prefetch(four + kAhead);
      __builtin_prefetch(four + 64 + kAhead);
      Bytes split[kVectors];
      split_codes(four, split);
      for (int r = 0; r < R; r++) {
        int32_t inputs4;
        std::memcpy(&inputs4, &x.bytes[r * x.padded + p * kPart + 4 * q], 4);
        const Bytes row = (Bytes)(Ints{} + inputs4);
        for (int v = 0; v < kVectors; v++) sum[r][v] = add_codes(sum[r][v], split[v], row);
      }
    }
    const uint32_t* part_scales = scales + group_of<kOnePart>(p, group) * scale_stride;
    prefetch_scales<kOnePart>(scales, scale_stride, p, inputs, group);
    for (int v = 0; v < kVectors; v++) {
      const Words both = words_of(part_scales, v);
      const Floats scale = (Floats)(both << 16), of_8 = (Floats)(both & 0xffff0000);
      for (int r = 0; r < R; r++) {
        const float factor = x.scales[r * x.parts + p], bytes = x.sums[r * x.parts + p];
        const Ints products = whole(sum[r][v]) - 8 * (int32_t)bytes;
        total[r][v] += to_floats(products) * factor * scale + of_8 * (factor * bytes);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < 16; p++)
      std::memcpy(y + r * kBlock + output_of(p), (const char*)total[r] + 16 * p, 16);
}

// Multiplies R float32 rows by 64 outputs, `[R, 64]`: rows times codes, then the sums of each part times its scales.
template <int R>
void int4_rows(const float* x, const uint8_t* codes, const uint32_t* scales, int64_t scale_stride, int64_t inputs,
               int64_t group, float* y) {
  // kChains: number of independent sums, to hide the latency of additions. kHigh: the first vector of high four bits.
  constexpr int kChains = R == 1 ? 2 : 1, kHigh = kVectors / 2;
  Floats total[R][kVectors] = {};
  for (int64_t p = 0; p < inputs / kPart; p++) {
    const uint8_t* part_codes = codes + p * kPart * (kBlock / 2);
    for (int i = 0; i < kPart * kBlock / 2; i += 64) __builtin_prefetch(part_codes + i + kAhead);
    const uint32_t* part_scales = scales + p * kPart / group * scale_stride;
    float of_part[R];
    for (int r = 0; r < R; r++) {
      Floats sum = {};
      for (int k = 0; k < kPart; k += kLanes) sum += load<Floats>(x + r * inputs + p * kPart + k);
      of_part[r] = sum_of(sum);
    }
    for (int v = 0; v < kHigh; v++) {
      Floats sum[R][kChains][2] = {};
      for (int k = 0; k < kPart; k += kChains)
        for (int c = 0; c < kChains; c++) {
          const Ints both = widen(load<Quarters>(part_codes + (k + c) * (kBlock / 2) + v * kLanes));
          const Floats low = to_floats(both & 15), high = to_floats(both >> 4 & 15);
          for (int r = 0; r < R; r++) {
            const float number = x[r * inputs + p * kPart + k + c];
            sum[r][c][0] += low * number;
            sum[r][c][1] += high * number;
          }
        }
      for (int half = 0; half < 2; half++) {
        const int vector = v + half * kHigh;
        const Words both = load<Words>(part_scales + vector * kLanes);
        const Floats scale = (Floats)(both << 16), of_0 = (Floats)(both & 0xffff0000) - 8.f * scale;
        for (int r = 0; r < R; r++) {
          const Floats products = kChains == 2 ? sum[r][0][half] + sum[r][kChains - 1][half] : sum[r][0][half];
          total[r][vector] += products * scale + of_0 * of_part[r];
        }
      }
    }
  }
  std::memcpy(y, total, sizeof(total));
}

}  // namespace
