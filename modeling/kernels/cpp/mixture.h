// A mixture layer's second half: which experts compute a row, and what they give.

namespace {

// How a router chooses; what its fields mean stands in moe/layer.py.
struct Routing {
  int64_t top_k, takes_softmax, chooses_by_softmax, normalizes, scales_input;
  const float* bias;
};

// The bytes between two experts' codes and scales, of gate and up in one, and of down.
struct Strides {
  int64_t codes[2], scales[2];
};

using Choice = std::pair<float, int64_t>;

// What is no number comes first.
inline bool is_better(const Choice& one, const Choice& other) {
  return (std::isnan(one.first) && !std::isnan(other.first)) || one.first > other.first;
}

// The best experts first. Of equal ones those that torch.topk takes on a CPU, which has this algorithm.
void sort_best(std::vector<Choice>& all, int64_t top_k) {
  const auto begin = all.begin();
  if (top_k * 64 <= (int64_t)all.size()) {
    std::partial_sort(begin, begin + top_k, all.end(), is_better);
  } else {
    std::nth_element(begin, begin + top_k - 1, all.end(), is_better);
    std::sort(begin, begin + top_k - 1, is_better);
  }
}

// In place. Numbers are few.
void softmax(float* x, int64_t count) {
  float most = -INFINITY, total = 0;
  for (int64_t i = 0; i < count; i++) most = x[i] > most ? x[i] : most;
  for (int64_t i = 0; i < count; i += kLanes)
    store_some<Single>(x + i, exponential(load_some<Single>(x + i, count - i) - most), count - i);
  for (int64_t i = 0; i < count; i++) total += x[i];
  for (int64_t i = 0; i < count; i++) x[i] /= total;
}

// The experts of one row, of whose logits nothing is left, and their scores.
void choose(float* logits, int64_t experts, const Routing& how, int64_t* ids, float* scores) {
  std::vector<Choice> all(experts);
  for (int64_t e = 0; how.bias && e < experts; e++) all[e] = {logits[e] + how.bias[e], e};
  if (how.chooses_by_softmax) softmax(logits, experts);
  for (int64_t e = 0; !how.bias && e < experts; e++) all[e] = {logits[e], e};
  sort_best(all, how.top_k);
  for (int64_t k = 0; k < how.top_k; k++) {
    ids[k] = all[k].second;
    scores[k] = logits[ids[k]];
  }
  if (!how.chooses_by_softmax && how.takes_softmax) softmax(scores, how.top_k);
  if (!how.chooses_by_softmax && !how.takes_softmax)
    for (int64_t k = 0; k < how.top_k; k++) scores[k] = (1.f / (exponential(spread(-scores[k])) + 1.f))[0];
  if (how.normalizes) {
    float total = 0;
    for (int64_t k = 0; k < how.top_k; k++) total += scores[k];
    for (int64_t k = 0; k < how.top_k; k++) scores[k] /= total;
  }
}

// Choices of rows that are normalized already.
template <class T>
void route_rows(const char* x, int64_t rows, const Matrix& router, const Routing& how, int64_t* ids, float* scores,
                int threads) {
  std::vector<char> logits(rows * router.outputs * sizeof(typename T::Number));
  multiply(x, rows, &router, 1, logits.data(), threads);
  std::vector<float> of_row(router.outputs);
  for (int64_t r = 0; r < rows; r++) {
    const auto* numbers = (const typename T::Number*)logits.data() + r * router.outputs;
    for (int64_t e = 0; e < router.outputs; e++) of_row[e] = T::number(numbers[e]);
    choose(of_row.data(), router.outputs, how, ids + r * how.top_k, scores + r * how.top_k);
    // What multiplies inputs is rounded as they are.
    for (int64_t k = 0; how.scales_input && k < how.top_k; k++)
      scores[r * how.top_k + k] = T::number(T::rounded(scores[r * how.top_k + k]));
  }
}

// The outputs of all choices, `[rows * top_k, size]`. Each hit expert is read once for all its rows.
template <class T>
void compute_choices(const char* x, int64_t rows, const Matrix* first, const Strides& strides, int64_t experts,
                     const Routing& how, const int64_t* ids, const float* scores, char* y, int threads) {
  using Number = typename T::Number;
  const int64_t choices = rows * how.top_k, size = first[0].inputs, bytes = size * sizeof(Number);
  std::vector<int64_t> its;
  std::vector<char> some(choices * bytes), found(choices * bytes);
  for (int64_t e = 0; e < experts; e++) {
    its.clear();
    for (int64_t c = 0; c < choices; c++)
      if (ids[c] == e) its.push_back(c);
    if (its.empty()) continue;
    for (size_t i = 0; i < its.size(); i++) {
      char* row = &some[i * bytes];
      std::memcpy(row, x + its[i] / how.top_k * bytes, bytes);
      if (how.scales_input) scale_row<T>(row, scores[its[i]], size);
    }
    Matrix own[2] = {first[0], first[1]};
    std::vector<LowRank> adapters[2];
    for (int m = 0; m < 2; m++) {
      own[m].codes += e * strides.codes[m];
      if (own[m].scales) own[m].scales += e * strides.scales[m];
      adapters[m].assign(own[m].adapters, own[m].adapters + own[m].num_adapters);
      own[m].adapters = adapters[m].data();
      for (LowRank& each : adapters[m]) {
        each.a += e * each.a_apart;
        each.b += e * each.b_apart;
      }
    }
    feed_forward(some.data(), found.data(), its.size(), own, 2, threads);
    for (size_t i = 0; i < its.size(); i++) std::memcpy(y + its[i] * bytes, &found[i * bytes], bytes);
  }
}

// Rows plus the sums of their experts' outputs, times the scores that did not scale inputs, and of the shared expert's,
// each rounded as separate operations are.
template <class T>
void add_choices(const void* all_x, const char* of_experts, const char* of_shared, const Routing& how,
                 const float* scores, void* all_y, int64_t rows, int64_t size) {
  using Number = typename T::Number;
  for (int64_t r = 0; r < rows; r++) {
    const Number *x = (const Number*)all_x + r * size, *shared = (const Number*)of_shared + r * size;
    const Number* outputs = (const Number*)of_experts + r * how.top_k * size;
    for (int64_t i = 0; i < size; i += kLanes) {
      Floats sum = {};
      for (int64_t k = 0; k < how.top_k; k++) {
        Floats part = load_some<T>(outputs + k * size + i, size - i);
        if (!how.scales_input) part = rounded_alone(part * scores[r * how.top_k + k]);
        sum += part;
      }
      sum = T::round(sum);
      if (of_shared) sum = T::round(load_some<T>(shared + i, size - i) + sum);
      store_some<T>((Number*)all_y + r * size + i, load_some<T>(x + i, size - i) + sum, size - i);
    }
  }
}

}  // namespace

extern "C" {

// The rows after the norm, if there is one, their experts and scores.
void route(int64_t bits, const void* x, const void* norm, float eps, void* y, int64_t rows, const Matrix* router,
           const Routing* how, int64_t* ids, float* scores, int threads) {
  if (norm) rms_norm(bits, x, norm, y, rows, router->inputs, eps);
  (bits == 32 ? route_rows<Single> : route_rows<Brain>)((const char*)(norm ? y : x), rows, *router, *how, ids, scores,
                                                        threads);
}

// The whole: norm, router, experts, sum and residual. Matrices are the router's, gate and up in one and down of the first
// expert, and, if there is a shared expert, its gate, up and down.
void mixture(int64_t bits, const void* x, const void* norm, float eps, void* y, int64_t rows, const Matrix* matrices,
             int64_t count, const Strides* strides, const Routing* how, int threads) {
  const Matrix& router = matrices[0];
  const int64_t size = router.inputs, bytes = rows * size * bytes_of(bits);
  std::vector<int64_t> ids(rows * how->top_k);
  std::vector<float> scores(ids.size());
  std::vector<char> normalized(bytes), of_experts(bytes * how->top_k), of_shared(count > 3 ? bytes : 0);
  route(bits, x, norm, eps, normalized.data(), rows, &router, how, ids.data(), scores.data(), threads);
  if (count > 3) feed_forward(normalized.data(), of_shared.data(), rows, matrices + 3, 3, threads);
  (bits == 32 ? compute_choices<Single> : compute_choices<Brain>)(normalized.data(), rows, matrices + 1, *strides,
                                                                  router.outputs, *how, ids.data(), scores.data(),
                                                                  of_experts.data(), threads);
  (bits == 32 ? add_choices<Single> : add_choices<Brain>)(x, of_experts.data(), count > 3 ? of_shared.data() : nullptr,
                                                          *how, scores.data(), y, rows, size);
}
}
