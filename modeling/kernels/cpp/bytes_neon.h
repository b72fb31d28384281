// Products of 8-bit integers with NEON's dot product instructions.

namespace {

constexpr const char* kInstructions = "NEON with dot products";
using CodeSums = Ints;
constexpr bool kPlus128 = false;

// Splits the 4-bit codes of four inputs and 64 outputs into bytes: each vector has the four inputs of `kLanes` outputs.
inline void split_codes(const uint8_t* codes, Bytes (&split)[64 / kLanes]) {
  const uint8x16_t lowest = vdupq_n_u8(15);
  for (int half = 0; half < 2; half++) {
    uint8x16_t of[4];
    for (int i = 0; i < 4; i++) of[i] = vld1q_u8(codes + 32 * i + 16 * half);
    const uint16x8_t low01 = vreinterpretq_u16_u8(vzip1q_u8(of[0], of[1]));
    const uint16x8_t high01 = vreinterpretq_u16_u8(vzip2q_u8(of[0], of[1]));
    const uint16x8_t low23 = vreinterpretq_u16_u8(vzip1q_u8(of[2], of[3]));
    const uint16x8_t high23 = vreinterpretq_u16_u8(vzip2q_u8(of[2], of[3]));
    const uint16x8_t both[4] = {vzip1q_u16(low01, low23), vzip2q_u16(low01, low23), vzip1q_u16(high01, high23),
                                vzip2q_u16(high01, high23)};
    for (int j = 0; j < 4; j++) {
      split[4 * half + j] = (Bytes)vandq_u8(vreinterpretq_u8_u16(both[j]), lowest);
      split[8 + 4 * half + j] = (Bytes)vshrq_n_u8(vreinterpretq_u8_u16(both[j]), 4);
    }
  }
}

// Returns the number of the first of the four outputs in each 16 bytes of these vectors.
constexpr int output_of(int piece) { return 4 * piece; }

inline Ints add_bytes(Ints sum, Bytes weights, Bytes x) {
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)x);
}

inline Ints add_codes(Ints sum, Bytes codes, Bytes x) { return add_bytes(sum, codes, x); }

}  // namespace
