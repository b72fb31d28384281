// Attention of one query per head, which reads each element of the KV cache once.

namespace {

// Keys or values of a cache. Heads are `head_stride` elements apart, the `count` positions of a head `stride` elements.
struct Cached {
  const char* numbers;
  int64_t head_stride, stride, count;
};

// kQueries: maximum number of query heads that share a key/value head and are computed together.
// kSums: vectors of each query's output that are accumulated in registers.
constexpr int kQueries = 4, kSums = kLanes == 16 ? 4 : 2;
// Positions per block: their values stay in the L1 cache while they are added to one group of sums after the other.
constexpr int64_t kPositions = 128;

// Computes the unnormalized softmax weights of all positions for some queries, and the factors that normalize them.
template <class T, int queries>
void weigh(const float* query, int64_t padded, const typename T::Number* keys, int64_t stride, int64_t count,
           int64_t head_dim, float scaling, float* weights, float* factors) {
  float most[queries];
  for (int q = 0; q < queries; q++) most[q] = -INFINITY;
  const int64_t whole = head_dim / kLanes * kLanes;
  for (int64_t k = 0; k < count; k++) {
    Floats sums[queries] = {};
    for (int64_t d = 0; d < whole; d += kLanes) {
      const Floats key = T::load(keys + k * stride + d);
      for (int q = 0; q < queries; q++) sums[q] += load<Floats>(query + q * padded + d) * key;
    }
    if (whole < head_dim) {
      const Floats key = load_some<T>(keys + k * stride + whole, head_dim - whole);
      for (int q = 0; q < queries; q++) sums[q] += load<Floats>(query + q * padded + whole) * key;
    }
    for (int q = 0; q < queries; q++) {
      const float weight = sum_of(sums[q]) * scaling;
      weights[q * count + k] = weight;
      most[q] = weight > most[q] ? weight : most[q];
    }
  }
  for (int q = 0; q < queries; q++) {
    Floats total = {};
    for (int64_t k = 0; k < count; k += kLanes) {
      float* some = weights + q * count + k;
      const Floats weight = exponential(load_some<Single>(some, count - k) - most[q]);
      store_some<Single>(some, weight, count - k);
      total += only(first_lanes(count - k), weight);
    }
    factors[q] = 1.f / sum_of(total);
  }
}

// Adds the weighted values of some positions to `vectors` vectors of each query's sums; the last may be partial.
template <class T, int queries, int vectors, bool is_whole>
void add_values(const typename T::Number* values, int64_t stride, int64_t positions, int64_t head_dim,
                const float* weights, int64_t count, float* sums, int64_t padded) {
  Floats kept[queries][vectors];
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < vectors; v++) kept[q][v] = load<Floats>(sums + q * padded + v * kLanes);
  for (int64_t k = 0; k < positions; k++)
    for (int v = 0; v < vectors; v++) {
      const auto* some = values + k * stride + v * kLanes;
      const Floats value = is_whole ? T::load(some) : load_some<T>(some, head_dim - v * kLanes);
      for (int q = 0; q < queries; q++) kept[q][v] += value * weights[q * count + k];
    }
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < vectors; v++) store(sums + q * padded + v * kLanes, kept[q][v]);
}

// Computes the outputs of some queries that share a key/value head, over all positions; scores are times `scaling`.
template <class T, int queries>
void attend_together(const typename T::Number* query, const typename T::Number* keys, int64_t key_stride,
                     const typename T::Number* values, int64_t value_stride, int64_t count, int64_t head_dim,
                     float scaling, typename T::Number* y) {
  const int64_t padded = (head_dim + kLanes - 1) / kLanes * kLanes;
  std::vector<float> rows(queries * padded), sums(queries * padded), weights(queries * count);
  for (int q = 0; q < queries; q++)
    for (int64_t d = 0; d < head_dim; d++) rows[q * padded + d] = T::number(query[q * head_dim + d]);
  float factors[queries];
  weigh<T, queries>(rows.data(), padded, keys, key_stride, count, head_dim, scaling, weights.data(), factors);
  for (int64_t k = 0; k < count; k += kPositions) {
    const int64_t positions = std::min(kPositions, count - k);
    const auto* some = values + k * value_stride;
    int64_t d = 0;
    for (; d + kSums * kLanes <= head_dim; d += kSums * kLanes)
      add_values<T, queries, kSums, true>(some + d, value_stride, positions, head_dim - d, weights.data() + k, count,
                                          sums.data() + d, padded);
    for (; d < head_dim; d += kLanes)
      add_values<T, queries, 1, false>(some + d, value_stride, positions, head_dim - d, weights.data() + k, count,
                                       sums.data() + d, padded);
  }
  for (int q = 0; q < queries; q++)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store_some<T>(y + q * head_dim + d, load<Floats>(sums.data() + q * padded + d) * factors[q], head_dim - d);
}

// Computes the outputs of all query heads, side by side. heads / key_heads consecutive heads share keys and values.
template <class T>
void attend(const void* query, const Cached& keys, const Cached& values, int64_t heads, int64_t key_heads,
            int64_t head_dim, float scaling, void* y, int threads) {
  using Number = typename T::Number;
  const int64_t sharing = heads / key_heads;
  int64_t together = std::min<int64_t>(kQueries, sharing);
  // Take fewer queries together if threads would be idle otherwise.
  while (together > 1 && key_heads * ((sharing + together - 1) / together) < threads) together--;
  const int64_t parts = (sharing + together - 1) / together;
#pragma omp parallel for num_threads(threads) if (threads > 1 && heads * keys.count > 4096)
  for (int64_t part = 0; part < key_heads * parts; part++) {
    const int64_t shared = part / parts, first = shared * sharing + part % parts * together;
    const int64_t queries = std::min(together, (shared + 1) * sharing - first);
    constexpr decltype(&attend_together<T, 1>) attend_some[kQueries] = {
        attend_together<T, 1>, attend_together<T, 2>, attend_together<T, 3>, attend_together<T, 4>};
    attend_some[queries - 1](
        (const Number*)query + first * head_dim, (const Number*)keys.numbers + shared * keys.head_stride, keys.stride,
        (const Number*)values.numbers + shared * values.head_stride, values.stride, keys.count, head_dim, scaling,
        (Number*)y + first * head_dim);
  }
}

}  // namespace
