// Vectors as wide as the processor's registers, by the vector extensions of GCC and Clang, for all processors.

namespace {

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Returns how many bytes ahead weights are prefetched. Intel's processors prefetch too little by themselves, and not
// beyond a page. AMD's processors prefetch enough: on a Zen 4 every additional prefetch made reading slower.
int64_t bytes_ahead() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return 0;
#endif
  return 4096;
}
const int64_t kAhead = bytes_ahead();

template <class Number, int count>
struct VectorOf {
  typedef Number type __attribute__((vector_size(sizeof(Number) * count)));
};
using Floats = VectorOf<float, kLanes>::type;
using Ints = VectorOf<int32_t, kLanes>::type;
using Words = VectorOf<uint32_t, kLanes>::type;
using Halves = VectorOf<uint16_t, kLanes>::type;
using Quarters = VectorOf<int8_t, kLanes>::type;
// As many bytes as fill a register.
using Bytes = VectorOf<int8_t, 4 * kLanes>::type;

// Widens 8-bit and 16-bit integers to 32 bits. GCC does not use the single instruction for this by itself.
#if defined(__AVX512VNNI__)
inline Ints widen(Quarters x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }
inline Ints widen(Halves x) { return (Ints)_mm512_cvtepu16_epi32((__m256i)x); }
#elif defined(__AVX2__)
inline Ints widen(Quarters x) { return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x)); }
inline Ints widen(Halves x) { return (Ints)_mm256_cvtepu16_epi32((__m128i)x); }
#else
inline Ints widen(Quarters x) { return __builtin_convertvector(x, Ints); }
inline Ints widen(Halves x) { return __builtin_convertvector(x, Ints); }
#endif

template <class Vector>
inline Vector load(const void* x) {
  Vector vector;
  std::memcpy(&vector, x, sizeof(vector));
  return vector;
}

template <class Vector>
inline void store(void* y, const Vector& x) {
  std::memcpy(y, &x, sizeof(x));
}

// Returns a vector with the same number in all lanes.
inline Floats spread(float x) { return x - Floats{}; }

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

template <int count>
inline float sum_of(typename VectorOf<float, count>::type x) {
  if constexpr (count == 2) {
    return x[0] + x[1];
  } else {
    using Half = typename VectorOf<float, count / 2>::type;
    return sum_of<count / 2>(load<Half>(&x) + load<Half>((char*)&x + sizeof(Half)));
  }
}

inline float sum_of(Floats x) { return sum_of<kLanes>(x); }

// Rounds to the nearest integer, ties to even; for magnitudes up to 2 ** 22.
inline Floats to_nearest(Floats x) {
  const Floats shift = spread(12582912.f);
  return (x + shift) - shift;
}

// Returns a mask: all bits are set in the first `count` lanes.
inline Ints first_lanes(int64_t count) {
  Ints lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  return lanes < (int32_t)count;
}

// Returns x with zeros in the lanes that a mask does not have.
inline Floats only(Ints lanes, Floats x) { return (Floats)((Ints)x & lanes); }

// Formats of numbers. `load` and `store` convert `kLanes` numbers to and from float32, `number` one. `round` rounds to
// the format, and returns float32.

// float32.
struct Single {
  using Number = float;
  static inline Floats load(const float* x) { return ::load<Floats>(x); }
  static inline void store(float* y, Floats x) { ::store(y, x); }
  static inline float number(float x) { return x; }
  static inline Floats round(Floats x) { return x; }
};

// bfloat16. Rounds to nearest, ties to even; NaN stays NaN.
struct Brain {
  using Number = uint16_t;
  static inline Floats load(const uint16_t* x) {
    return (Floats)(widen(::load<Halves>(x)) << 16);
  }
  static inline Words rounded_bits(Floats x) {
    const Words bits = (Words)x;
    const Words up = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bits | 0x400000) & 0xffff0000 : up;
  }
  static inline Floats round(Floats x) { return (Floats)rounded_bits(x); }
  static inline void store(uint16_t* y, Floats x) {
    ::store(y, __builtin_convertvector(rounded_bits(x) >> 16, Halves));
  }
  static inline float number(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
  }
};

// int8.
struct Signed {
  using Number = int8_t;
  static inline Floats load(const int8_t* x) {
    return to_floats(widen(::load<Quarters>(x)));
  }
};

// Loads `count` numbers, or `kLanes` if these are fewer; lanes without a number are 0.
template <class T>
inline Floats load_some(const typename T::Number* x, int64_t count) {
  if (count >= kLanes) return T::load(x);
  typename T::Number numbers[kLanes] = {};
  std::memcpy(numbers, x, count * sizeof(numbers[0]));
  return T::load(numbers);
}

// Stores the first `count` numbers, or all if there are fewer.
template <class T>
inline void store_some(typename T::Number* y, Floats x, int64_t count) {
  if (count >= kLanes) return T::store(y, x);
  typename T::Number numbers[kLanes];
  T::store(numbers, x);
  std::memcpy(y, numbers, count * sizeof(numbers[0]));
}

// Returns exp(x): a power of two times a polynomial of the remainder (Cephes library, single precision).
inline Floats exponential(Floats x) {
  // Keep the power of two in range. NaN stays NaN; at the upper limit the result is infinite.
  x = x > 89.f ? spread(89.f) : x;
  x = x < -87.f ? spread(-87.f) : x;
  const Floats whole = to_nearest(x * 1.44269504f);
  const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats y = spread(1.9875691500e-4f);
  for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * rest + term;
  y = rest * rest * y + rest + 1.f;
  // Multiply in two steps, since the power of two alone may overflow.
  const Ints power = __builtin_convertvector(whole, Ints), half = power >> 1;
  return y * (Floats)((half + 127) << 23) * (Floats)((power - half + 127) << 23);
}

}  // namespace
