// Attention of the rows of one sequence over one key-value head. Twin: kernels/reference_decoder.py.
//
// Lanes are keys while scores are made and values of a head while values are mixed; both walk the other axis in order.
// A key's score does not depend on the lane it has, so drafted keys are gathered in a small tile of their own. Blocks
// lie far apart in memory: whoever reads one asks for the next (`ahead`).
#pragma once

#include "elementwise_kernels.h"
#include "ops.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

// Units and vectors of one register tile: 12 registers of sums, whatever a vector takes.
constexpr int kUnitTile = 6, kVectorTile = kRegisters / kRegistersPerVector >= 32 ? 2 : 1;

// out[r][0 .. 16 V) = scale * sum over i of q[r][i] * keys[i * stride ...]. ahead: what will be read next in the same
// way, or null.
template <int R, int V>
SLIP_INLINE void score_tile(const float* const* q, const float* keys, ptrdiff_t stride, int head_dim, float scale,
                            float* const* out, const float* ahead) {
  f32x16 sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = zero();
  for (int i = 0; i < head_dim; i++) {
    if (ahead != nullptr)
      for (int v = 0; v < V; v++) prefetch(ahead + i * stride + 16 * v);
    f32x16 key[V];
    for (int v = 0; v < V; v++) key[v] = load(keys + i * stride + 16 * v);
    for (int r = 0; r < R; r++) {
      const f32x16 x = bcast(q[r][i]);
      for (int v = 0; v < V; v++) sum[r][v] = fma(x, key[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out[r] + 16 * v, mul(sum[r][v], bcast(scale)));
}

// Scores of 16 V keys side by side, for all units. Only the first tile of units asks for what comes next.
template <int V>
void score_units(int units, const float* const* q, const float* keys, ptrdiff_t stride, int head_dim, float scale,
                 float* const* out, const float* ahead) {
  for (int u = 0; u < units; u += kUnitTile, ahead = nullptr) {
    switch (units - u) {
      case 1: score_tile<1, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
      case 2: score_tile<2, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
      case 3: score_tile<3, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
      case 4: score_tile<4, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
      case 5: score_tile<5, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
      default: score_tile<kUnitTile, V>(q + u, keys, stride, head_dim, scale, out + u, ahead); break;
    }
  }
}

// mixed[r][...] += sum over keys [begin, end) of weights[r][key] * values[key][...], 16 V values of each.
template <int R, int V>
SLIP_INLINE void mix_tile(const float* const* weights, const float* const* values, int begin, int end, ptrdiff_t offset,
                          float* const* mixed, const float* const* ahead) {
  f32x16 sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = load(mixed[r] + offset + 16 * v);
  for (int key = begin; key < end; key++) {
    if (ahead != nullptr)
      for (int v = 0; v < V; v++) prefetch(ahead[key] + offset + 16 * v);
    f32x16 value[V];
    for (int v = 0; v < V; v++) value[v] = load(values[key] + offset + 16 * v);
    for (int r = 0; r < R; r++) {
      const f32x16 x = bcast(weights[r][key]);
      for (int v = 0; v < V; v++) sum[r][v] = fma(x, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(mixed[r] + offset + 16 * v, sum[r][v]);
}

template <int R>
SLIP_INLINE void mix_all(const float* const* weights, const float* const* values, int begin, int end, int value_stride,
                         float* const* mixed, const float* const* ahead) {
  if (begin >= end) return;
  constexpr int kStep = 16 * kVectorTile;
  int offset = 0;
  for (; offset + kStep <= value_stride; offset += kStep)
    mix_tile<R, kVectorTile>(weights, values, begin, end, offset, mixed, ahead);
  if (offset < value_stride) mix_tile<R, 1>(weights, values, begin, end, offset, mixed, ahead);
}

// The same for up to kUnitTile units.
void mix_units(int units, const float* const* weights, const float* const* values, int begin, int end, int value_stride,
               float* const* mixed, const float* const* ahead) {
  switch (units) {
    case 1: mix_all<1>(weights, values, begin, end, value_stride, mixed, ahead); break;
    case 2: mix_all<2>(weights, values, begin, end, value_stride, mixed, ahead); break;
    case 3: mix_all<3>(weights, values, begin, end, value_stride, mixed, ahead); break;
    case 4: mix_all<4>(weights, values, begin, end, value_stride, mixed, ahead); break;
    case 5: mix_all<5>(weights, values, begin, end, value_stride, mixed, ahead); break;
    default: mix_all<kUnitTile>(weights, values, begin, end, value_stride, mixed, ahead); break;
  }
}

// Scores of n keys become weights e^(score - largest); fills what is left of the last vector with weight 0.
SLIP_INLINE void softmax(float* scores, int n, float* top, float* total) {
  const int vectors = (n + 15) / 16;
  for (int i = n; i < 16 * vectors; i++) scores[i] = -__builtin_inff();
  f32x16 largest = load(scores);
  for (int v = 1; v < vectors; v++) largest = vmax(largest, load(scores + 16 * v));
  *top = reduce_max(largest);
  f32x16 sum = zero();
  for (int v = 0; v < vectors; v++) {
    const f32x16 weight = exp(sub(load(scores + 16 * v), bcast(*top)));
    store(scores + 16 * v, weight);
    sum = add(sum, weight);
  }
  *total = reduce_add(sum);
}

// Views of one segment of one task: where queries, scores and mixed values of each unit are, how many keys it has.
struct Segment {
  explicit SLIP_INLINE Segment(const AttendTask& t) : task(t) {}
  const AttendTask& task;
  int base;    // absolute position of the first key
  int cached;  // cached keys in the segment
  const float* q[kAttendUnits];
  float* scores[kAttendUnits];
  float* mixed[kAttendUnits];
  int keys[kAttendUnits];
  const float* values[kSegment];
  const float* ahead[kSegment];
};

SLIP_INLINE int clamp_keys(int n) { return n < 0 ? 0 : n > kSegment ? kSegment : n; }

// Drafted ancestors of a row, and itself, that lie in the segment: ids[column] for keys `cached + column`. Returns the
// number of columns. Walks up to the root each time: a tree's rows share only part of their paths.
SLIP_INLINE int drafted_path(const Segment& s, int row, int32_t* ids) {
  const AttendTask& task = s.task;
  const int first = s.base + s.cached;  // position of column 0
  int position = task.ends[row] - 1, columns = 0;
  for (int32_t id = task.ids[row]; id >= 0 && position >= first; id = task.parents[id], position--) {
    if (position >= s.base + kSegment) continue;
    ids[position - first] = id;
    if (columns == 0) columns = position - first + 1;
  }
  return columns;
}

void score_cached(Segment& s, int most) {
  const AttendTask& task = s.task;
  const int last = s.cached < most ? s.cached : most;
  for (int key = 0; key < last; key += kKvBlock) {
    const int block = task.table[(s.base + key) / kKvBlock];
    int begin = 0;
    while (begin < task.units && s.keys[begin] <= key) begin++;  // rows of a prefill that end before this block
    const float* keys = task.pool + block * task.block_floats;
    const float* next = keys + task.value_offset;
    if (key + kKvBlock < last)
      next = task.pool + task.table[(s.base + key) / kKvBlock + 1] * task.block_floats + task.key_offset;
    else if (key > 0)
      next = task.pool + task.table[s.base / kKvBlock] * task.block_floats + task.value_offset;
    for (int column = 0; column < kKvBlock; column += 16 * kVectorTile) {
      float* out[kAttendUnits];
      for (int u = begin; u < task.units; u++) out[u] = s.scores[u] + key + column;
      score_units<kVectorTile>(task.units - begin, s.q + begin, keys + task.key_offset + column, kKvBlock,
                               task.head_dim, task.scale, out + begin, next + column);
    }
  }
}

// Scores of the drafted keys. tile: [head_dim, columns] rewritten only where a row's path differs from the one before.
void score_drafted(Segment& s, float* tile, float* scratch) {
  const AttendTask& task = s.task;
  const int rows = task.units / task.group;
  int32_t held[kSegment], ids[kSegment];
  int stride = 16;
  for (int row = 0; row < rows; row++) {
    const int columns = clamp_keys(task.ends[row] - s.base) - s.cached;
    while (stride < columns) stride += 16;
  }
  for (int column = 0; column < kSegment; column++) held[column] = -1;
  for (size_t i = 0; i < static_cast<size_t>(stride) * task.head_dim; i++) tile[i] = 0.0f;
  for (int row = 0; row < rows; row++) {
    const int columns = drafted_path(s, row, ids);
    if (columns == 0) continue;
    for (int column = 0; column < columns; column++) {
      if (held[column] == ids[column]) continue;
      held[column] = ids[column];
      const float* key = task.draft_keys + ids[column] * task.draft_stride;
      for (int i = 0; i < task.head_dim; i++) tile[i * stride + column] = key[i];
    }
    for (int begin = 0; begin < columns; begin += 16) {
      float* out[kAttendUnits];
      for (int g = 0; g < task.group; g++) out[g] = scratch + 16 * g;
      const int unit = row * task.group;
      score_units<1>(task.group, s.q + unit, tile + begin, stride, task.head_dim, task.scale, out, nullptr);
      const int n = columns - begin < 16 ? columns - begin : 16;
      for (int g = 0; g < task.group; g++)
        for (int i = 0; i < n; i++) s.scores[unit + g][s.cached + begin + i] = out[g][i];
    }
  }
}

// Values in key order: those all units of a tile share together, the rest unit by unit.
void mix_cached(Segment& s) {
  const AttendTask& task = s.task;
  for (int key = 0; key < s.cached; key++) {
    const int position = s.base + key;
    s.values[key] = task.pool + task.table[position / kKvBlock] * task.block_floats + task.value_offset +
                    static_cast<ptrdiff_t>(position % kKvBlock) * task.value_stride;
  }
  // While values are read: those one block on, at last the keys the next segment begins with.
  const int next = s.base + kSegment;
  const float* keys = next < task.cached ? task.pool + task.table[next / kKvBlock] * task.block_floats + task.key_offset
                                         : nullptr;
  for (int key = 0; key < s.cached; key++) {
    const int later = key + kKvBlock - s.cached;
    s.ahead[key] = later < 0       ? s.values[key + kKvBlock]
                   : keys != nullptr ? keys + static_cast<ptrdiff_t>(later) * task.head_dim
                                     : s.values[key];
  }
  for (int u = 0; u < task.units; u += kUnitTile) {
    const int r = task.units - u < kUnitTile ? task.units - u : kUnitTile;
    int shared = s.cached;
    for (int i = 0; i < r; i++) shared = s.keys[u + i] < shared ? s.keys[u + i] : shared;
    mix_units(r, s.scores + u, s.values, 0, shared, task.value_stride, s.mixed + u, u == 0 ? s.ahead : nullptr);
    for (int i = 0; i < r; i++) {
      const int own = s.keys[u + i] < s.cached ? s.keys[u + i] : s.cached;
      mix_units(1, s.scores + u + i, s.values, shared, own, task.value_stride, s.mixed + u + i, nullptr);
    }
  }
}

void mix_drafted(Segment& s) {
  const AttendTask& task = s.task;
  int32_t ids[kSegment];
  for (int row = 0; row < task.units / task.group; row++) {
    const int columns = drafted_path(s, row, ids);
    for (int column = 0; column < columns; column++)
      s.values[s.cached + column] = task.draft_values + ids[column] * task.draft_stride;
    for (int g = 0; g < task.group; g += kUnitTile) {
      const int r = task.group - g < kUnitTile ? task.group - g : kUnitTile, unit = row * task.group + g;
      mix_units(r, s.scores + unit, s.values, s.cached, s.cached + columns, task.value_stride, s.mixed + unit, nullptr);
    }
  }
}

void attend(const AttendTask& task, int segment, AttendPart part, float* work) {
  Segment s{task};
  s.base = segment * kSegment;
  s.cached = clamp_keys(task.cached - s.base);
  int most = 0;
  for (int u = 0; u < task.units; u++) {
    const int row = u / task.group;
    s.q[u] = task.q + row * task.q_stride + static_cast<ptrdiff_t>(u % task.group) * task.head_dim;
    s.scores[u] = work + static_cast<ptrdiff_t>(u) * kSegment;
    s.mixed[u] = part.mixed + static_cast<ptrdiff_t>(u) * task.value_stride;
    s.keys[u] = clamp_keys(task.ends[row] - s.base);
    most = s.keys[u] > most ? s.keys[u] : most;
    for (int i = 0; i < task.value_stride; i += 16) store(s.mixed[u] + i, zero());
  }
  score_cached(s, most);
  float* scratch = work + static_cast<ptrdiff_t>(kSegment) * kAttendUnits;
  const bool drafted = most > s.cached;
  if (drafted) score_drafted(s, scratch + 16 * kAttendUnits, scratch);
  for (int u = 0; u < task.units; u++)
    if (s.keys[u] > 0) softmax(s.scores[u], s.keys[u], part.top + u, part.total + u);
  mix_cached(s);
  if (drafted) mix_drafted(s);
}

void attend_merge(float* top, float* total, float* mixed, const float* part_top, const float* part_total,
                  const float* part_mixed, int value_stride) {
  const f32x16 both = vmax(bcast(*top), bcast(*part_top));
  const f32x16 a = exp(sub(bcast(*top), both)), b = exp(sub(bcast(*part_top), both));
  float lanes[16];
  store(lanes, fma(bcast(*total), a, mul(bcast(*part_total), b)));
  *total = lanes[0];
  store(lanes, both);
  *top = lanes[0];
  for (int i = 0; i < value_stride; i += 16)
    store(mixed + i, fma(load(mixed + i), a, mul(load(part_mixed + i), b)));
}

void attend_finish(float total, const float* mixed, int head_dim, float* out) {
  const f32x16 scale = bcast(1.0f / total);
  int i = 0;
  for (; i + 16 <= head_dim; i += 16) store(out + i, mul(load(mixed + i), scale));
  if (i < head_dim) store_part(out + i, mul(load(mixed + i), scale), head_dim - i);
}

}  // namespace
}  // namespace slip::SLIP_ISA
