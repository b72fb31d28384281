// Attention of one token in two calls, between which the cache takes its key and value; or all layers in one.

namespace {

// Norm, the projections to queries, keys and values, rotation, norm of queries and keys if its eps is not negative; then
// attention, and the output projection.
struct FirstHalf {
  int64_t bits;
  const void* norm;
  const Matrix *inputs, *output;
  int64_t head_dim, is_interleaved;
  float eps, qk_eps, scaling;
};

// Norm, and a feed-forward; or a mixture, if it is said how experts are chosen.
struct SecondHalf {
  const void* norm;
  const Matrix* matrices;
  int64_t count;
  const Strides* strides;
  const Routing* how;
  float eps;
};

// A layer, and whether its queries and keys are rotated, and its queries scaled.
struct Layer {
  const FirstHalf* first;
  const SecondHalf* second;
  int64_t is_rotated, is_tuned;
};

// What a layer's cache holds, with place behind `count` tokens for more.
struct Room {
  char *keys, *values;
  int64_t head_stride, stride, count;
};

}  // namespace

extern "C" {

// What comes before the cache. `y` gets queries, keys and values side by side; without tables nothing is rotated.
void project(const FirstHalf* half, const void* x, const float* cosines, const float* sines, float query_scale, void* y,
             int threads) {
  const bool is_single = half->bits == 32;
  const Matrix* inputs = half->inputs;
  const int64_t heads = (inputs[0].outputs + inputs[1].outputs) / half->head_dim;
  std::vector<char> normalized(inputs[0].inputs * bytes_of(half->bits));
  rms_norm(half->bits, x, half->norm, normalized.data(), 1, inputs[0].inputs, half->eps);
  multiply(normalized.data(), 1, inputs, 3, y, threads);
  if (cosines) (is_single ? rotate<Single> : rotate<Brain>)(y, heads, half->head_dim, cosines, sines, half->is_interleaved);
  if (half->qk_eps >= 0) rms_norm(half->bits, y, nullptr, y, heads, half->head_dim, half->qk_eps);
  if (query_scale != 1) (is_single ? scale_row<Single> : scale_row<Brain>)(y, query_scale, inputs[0].outputs);
}

// The rest: attention over what the cache returned, and the residual sum.
void finish(const FirstHalf* half, const void* query, const void* keys, int64_t key_head_stride, int64_t key_stride,
            const void* values, int64_t value_head_stride, int64_t value_stride, int64_t count, const void* residual,
            void* y, int threads) {
  const int64_t bits = half->bits, head_dim = half->head_dim;
  const Cached all_keys = {(const char*)keys, key_head_stride, key_stride, count};
  const Cached all_values = {(const char*)values, value_head_stride, value_stride, count};
  std::vector<char> attended(half->output->inputs * bytes_of(bits));
  (bits == 32 ? attend<Single> : attend<Brain>)(query, all_keys, all_values, half->output->inputs / head_dim,
                                                half->inputs[1].outputs / head_dim, head_dim, half->scaling,
                                                attended.data(), threads);
  multiply(attended.data(), 1, half->output, 1, y, threads);
  (bits == 32 ? add_rows<Single> : add_rows<Brain>)(residual, y, y, half->output->outputs);
}

// All layers of a decoder for one token, whose keys and values go behind those that the caches have: they have one more
// afterwards.
void decode(const Layer* layers, int64_t count, Room* rooms, const void* x, const float* cosines, const float* sines,
            float query_scale, void* y, int threads) {
  const int64_t bits = layers[0].first->bits, size = bytes_of(bits), width = layers[0].first->inputs[0].inputs * size;
  std::vector<char> row((const char*)x, (const char*)x + width), attended(width), projected;
  for (int64_t i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    const Matrix* inputs = layer.first->inputs;
    const int64_t head = layer.first->head_dim * size, heads = inputs[1].outputs / layer.first->head_dim;
    projected.resize((inputs[0].outputs + 2 * inputs[1].outputs) * size);
    project(layer.first, row.data(), layer.is_rotated ? cosines : nullptr, sines, layer.is_tuned ? query_scale : 1.f,
            projected.data(), threads);
    Room& room = rooms[i];
    const char* key = projected.data() + inputs[0].outputs * size;
    for (int64_t h = 0; h < heads; h++) {
      const int64_t place = (h * room.head_stride + room.count * room.stride) * size;
      std::memcpy(room.keys + place, key + h * head, head);
      std::memcpy(room.values + place, key + (heads + h) * head, head);
    }
    finish(layer.first, projected.data(), room.keys, room.head_stride, room.stride, room.values, room.head_stride,
           room.stride, ++room.count, row.data(), attended.data(), threads);
    const SecondHalf& second = *layer.second;
    if (second.how)
      mixture(bits, attended.data(), second.norm, second.eps, y, 1, second.matrices, second.count, second.strides,
              second.how, threads);
    else
      normalized_feed_forward(bits, attended.data(), second.norm, second.eps, y, 1, second.matrices, second.count,
                              threads);
    std::memcpy(row.data(), y, width);
  }
}
}
