// Attention of one query a head, and what stands before it: rotation and normalization of queries and keys.

namespace {

// Rotates each head's pairs of channels by angles, of which cosines and sines are given. Channel j is
// paired with the next one if pairs are interleaved, otherwise with that half a head further.
template <class T>
void rotate(void* all_x, int64_t heads, int64_t head_dim, const float* cosines, const float* sines,
            bool is_interleaved) {
  auto* x = (typename T::Number*)all_x;
  const int64_t pairs = head_dim / 2, step = is_interleaved ? 2 : 1, distance = is_interleaved ? 1 : pairs;
  for (int64_t h = 0; h < heads; h++, x += head_dim)
    for (int64_t j = 0; j < pairs; j++) {
      const float cosine = cosines[j], sine = sines[j];
      const float first = T::number(x[j * step]), second = T::number(x[j * step + distance]);
      x[j * step] = T::rounded(first * cosine - second * sine);
      x[j * step + distance] = T::rounded(second * cosine + first * sine);
    }
}

// Keys or values of a cache: `heads` are as many numbers apart, and so are the `count` positions of a head.
struct Cached {
  const char* numbers;
  int64_t head_stride, stride, count;
};

// The output of one head's query, times `scaling`, over all keys.
template <class T>
void attend_head(const typename T::Number* query, const typename T::Number* keys, int64_t key_stride,
                 const typename T::Number* values, int64_t value_stride, int64_t count, int64_t head_dim, float scaling,
                 float* weights, typename T::Number* y) {
  float most = -INFINITY;
  for (int64_t k = 0; k < count; k++) {
    Floats sum = {};
    for (int64_t d = 0; d < head_dim; d += kLanes)
      sum += load_some<T>(query + d, head_dim - d) * load_some<T>(keys + k * key_stride + d, head_dim - d);
    weights[k] = sum_of(sum) * scaling;
    most = weights[k] > most ? weights[k] : most;
  }
  Floats total = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Floats weight = exponential(load_some<Single>(weights + k, count - k) - most);
    store_some<Single>(weights + k, weight, count - k);
    total += only(first_lanes(count - k), weight);
  }
  const float factor = 1.f / sum_of(total);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Floats sum = {};
    for (int64_t k = 0; k < count; k++) sum += load_some<T>(values + k * value_stride + d, head_dim - d) * weights[k];
    store_some<T>(y + d, sum * factor, head_dim - d);
  }
}

// The outputs of all heads' queries, side by side; as many heads in a row share keys and values as there are more queries.
template <class T>
void attend(const void* query, const Cached& keys, const Cached& values, int64_t heads, int64_t key_heads,
            int64_t head_dim, float scaling, void* y, int threads) {
  using Number = typename T::Number;
#pragma omp parallel for num_threads(threads) if (threads > 1 && heads * keys.count > 4096)
  for (int64_t h = 0; h < heads; h++) {
    const int64_t shared = h / (heads / key_heads);
    std::vector<float> weights(keys.count);
    attend_head<T>((const Number*)query + h * head_dim, (const Number*)keys.numbers + shared * keys.head_stride,
                   keys.stride, (const Number*)values.numbers + shared * values.head_stride, values.stride,
                   keys.count, head_dim, scaling, weights.data(), (Number*)y + h * head_dim);
  }
}

}  // namespace
