// What adapters add to the products with a matrix.

namespace {

// scale * B A x. A is [rank, inputs]; B is [outputs, rank], whose numbers are as far apart as the strides say. Factors of
// bfloat16 have each product rounded, as separate operations have. `a_apart` and `b_apart` are the bytes between the factors
// of two experts.
struct LowRank {
  int64_t bits;
  const char *a, *b;
  int64_t inputs, rank, output_stride, rank_stride, a_apart, b_apart;
  float scale;
};

template <class T>
inline float rounded(float x) {
  return T::number(T::rounded(x));
}

// Number k of A x for all rows.
template <class T>
void multiply_thin(const LowRank& adapter, int64_t k, const float* x, int64_t rows, int64_t stride, float* thin) {
  const auto* a = (const typename T::Number*)adapter.a + k * adapter.inputs;
  float sums[4];
#define CALL(R)                                                       \
  dot_rows<T, R>(x + r * stride, stride, a, adapter.inputs, sums);     \
  for (int i = 0; i < R; i++) thin[(r + i) * adapter.rank + k] = rounded<T>(sums[i])
  FOR_ROWS(rows, r, CALL)
#undef CALL
}

// Adds scale * B thin to the outputs of a row from `start`.
template <class T>
void add_update(const LowRank& adapter, const float* thin, int64_t start, int64_t count, float* y) {
  using Four = VectorOf<float, 4>::type;
  const auto* b = (const typename T::Number*)adapter.b + start * adapter.output_stride;
  for (int64_t c = 0; c < count; c++, b += adapter.output_stride) {
    float sum = 0;
    int64_t k = 0;
    if constexpr (std::is_same<T, Single>::value) {
      Four sums = {};
      for (; adapter.rank_stride == 1 && k + 4 <= adapter.rank; k += 4) sums += load<Four>(b + k) * load<Four>(thin + k);
      sum = sum_of<4>(sums);
    }
    for (; k < adapter.rank; k++) sum += T::number(b[k * adapter.rank_stride]) * thin[k];
    y[c] = rounded<T>(y[c] + rounded<T>(rounded<T>(sum) * adapter.scale));
  }
}

}  // namespace
