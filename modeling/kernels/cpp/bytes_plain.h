// Products of 8-bit integers on processors without instructions for them.

namespace {

#if defined(__ARM_NEON)
constexpr const char* kInstructions = "NEON";
#else
constexpr const char* kInstructions = "vectors of four numbers";
#endif
using CodeSums = Ints;
constexpr bool kPlus128 = false;

// Splits the 4-bit codes of four inputs and 64 outputs into bytes: each vector has the four inputs of `kLanes` outputs.
inline void split_codes(const uint8_t* codes, Bytes (&split)[64 / kLanes]) {
  for (int j = 0; j < 32; j++)
    for (int i = 0; i < 4; i++) {
      split[j / kLanes][j % kLanes * 4 + i] = (int8_t)(codes[32 * i + j] & 15);
      split[(32 + j) / kLanes][j % kLanes * 4 + i] = (int8_t)(codes[32 * i + j] >> 4);
    }
}

// Returns the number of the first of the four outputs in each 16 bytes of these vectors.
constexpr int output_of(int piece) { return 4 * piece; }

inline Ints add_bytes(Ints sum, Bytes weights, Bytes x) {
  for (int shift = 0; shift < 32; shift += 8) sum += ((Ints)weights << shift >> 24) * ((Ints)x << shift >> 24);
  return sum;
}

inline Ints add_codes(Ints sum, Bytes codes, Bytes x) { return add_bytes(sum, codes, x); }

}  // namespace
