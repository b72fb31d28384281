// Attention of one query per head, which reads each number of the KV cache once.

namespace {

// Keys or values of `count` cached positions. The next head is `head_stride` numbers away, the next position `stride`.
struct Cached {
  const char* numbers;
  int64_t head_stride, stride, count;
};

// kQueries: the most query heads of a key/value head that are computed together.
// kSums: number of vectors of a query's output whose sums are in registers at a time.
constexpr int kQueries = 4, kSums = kLanes == 16 ? 4 : 2;
// Number of positions in a block: their values stay in the L1 cache until all vectors of the output are computed.
constexpr int64_t kPositions = 128;

// Computes for each query the softmax weights of all positions, unnormalized, and the factor that normalizes them.
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
      float* scores = weights + q * count + k;
      const Floats weight = exponential(load_some<Single>(scores, count - k) - most[q]);
      store_some<Single>(scores, weight, count - k);
      total += only(first_lanes(count - k), weight);
    }
    factors[q] = 1.f / sum_of(total);
  }
}

// Adds the weighted values of `positions` positions to `vectors` vectors of each query's sums; is_whole: all are full.
template <class T, int queries, int vectors, bool is_whole>
void add_values(const typename T::Number* values, int64_t stride, int64_t positions, int64_t head_dim,
                const float* weights, int64_t count, float* sums, int64_t padded) {
  Floats sum[queries][vectors];
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < vectors; v++) sum[q][v] = load<Floats>(sums + q * padded + v * kLanes);
  for (int64_t k = 0; k < positions; k++)
    for (int v = 0; v < vectors; v++) {
      const auto* numbers = values + k * stride + v * kLanes;
      const Floats value = is_whole ? T::load(numbers) : load_some<T>(numbers, head_dim - v * kLanes);
      for (int q = 0; q < queries; q++) sum[q][v] += value * weights[q * count + k];
    }
  for (int q = 0; q < queries; q++)
    for (int v = 0; v < vectors; v++) store(sums + q * padded + v * kLanes, sum[q][v]);
}

// Computes the outputs of queries that share a key/value head, over all positions; `scaling` is a factor of the scores.
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
    const auto* block = values + k * value_stride;
    int64_t d = 0;
    for (; d + kSums * kLanes <= head_dim; d += kSums * kLanes)
      add_values<T, queries, kSums, true>(block + d, value_stride, positions, head_dim - d, weights.data() + k, count,
                                          sums.data() + d, padded);
    for (; d < head_dim; d += kLanes)
      add_values<T, queries, 1, false>(block + d, value_stride, positions, head_dim - d, weights.data() + k, count,
                                       sums.data() + d, padded);
  }
  for (int q = 0; q < queries; q++)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store_some<T>(y + q * head_dim + d, load<Floats>(sums.data() + q * padded + d) * factors[q], head_dim - d);
}

// Computes the outputs of all query heads, `[heads, head_dim]`; heads / key_heads in a row share keys and values.
template <class T>
void attend(const void* query, const Cached& keys, const Cached& values, int64_t heads, int64_t key_heads,
            int64_t head_dim, float scaling, void* y, int threads) {
  using Number = typename T::Number;
  const int64_t sharing = heads / key_heads;
  int64_t together = std::min<int64_t>(kQueries, sharing);
  // Compute fewer queries together if threads would be idle otherwise.
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
