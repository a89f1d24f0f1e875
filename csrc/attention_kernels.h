// Attention of the rows of one sequence over one key-value head. Twin: kernels/reference_decoder.py.
//
// Lanes are keys while scores are made and values of a head while values are mixed; both walk the other axis in order.
// A key's score does not depend on the lane it has, so drafted keys are gathered in a small tile of their own. Blocks
// lie far apart in memory: whoever computes asks for what comes later (`Ahead`).
#pragma once

#include "elementwise_kernels.h"
#include "ops.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

// Units and vectors of one register tile: 24 registers of sums of 32, 12 of 16. Two vectors are a block of keys.
constexpr int kUnitTile = 6, kVectorTile = kRegisters / kRegistersPerVector >= 32 ? 4 : 1;
constexpr int kBlocks = kSegment / kKvBlock;
constexpr int kLead = 3;  // blocks of keys that are fetched before a segment begins

// Cache lines in the order in which they will be read: keys of the segment's blocks, values of the same, keys the next
// segment begins with; the last tile over and over when there is no more. Memory is busy all the time only when lines
// are asked for at an even pace, so every inner loop fetches its share.
struct Ahead {
  const float *at, *end;
  const float* const* next;  // tiles to come, null after the last
  int floats;                // of a tile
  SLIP_INLINE void begin(const float* const* tiles, int size) {
    floats = size, next = tiles;
    at = *next++, end = at + floats;
  }
  SLIP_INLINE void fetch(int lines) {
    for (int k = 0; k < lines; k++) prefetch(at + 16 * k);
    at += 16 * lines;
    if (at < end) return;
    if (*next != nullptr) at = *next++, end = at + floats;
    else at = end - floats;
  }
};

// Share of tile `index` of `count` in `lines`.
SLIP_INLINE int share(int lines, int index, int count) { return lines * (index + 1) / count - lines * index / count; }

// out[r][0 .. 16 V) = scale * sum over i of q[r][i] * keys[v / 2][i * stride + ...]. lines: to fetch per i.
template <int R, int V>
SLIP_INLINE void score_tile(const float* const* q, const float* const* keys, ptrdiff_t stride, int head_dim,
                            float scale, float* const* out, Ahead& ahead, int lines) {
  Ahead later = ahead;
  f32x16 sum[R][V];
  SLIP_UNROLL for (int r = 0; r < R; r++) SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = zero();
  const float *first = keys[0], *second = V > 2 ? keys[1] : nullptr;
  for (int i = 0; i < head_dim; i++) {
    if (lines > 0) later.fetch(lines);
    f32x16 key[V];
    SLIP_UNROLL for (int v = 0; v < V; v++) key[v] = load((v < 2 ? first : second) + i * stride + 16 * (v % 2));
    SLIP_UNROLL for (int r = 0; r < R; r++) {
      const f32x16 x = bcast(q[r][i]);
      SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = fma(x, key[v], sum[r][v]);
    }
  }
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) store(out[r] + 16 * v, mul(sum[r][v], bcast(scale)));
  ahead = later;
}

// Calls f(first unit, units, index, count) for tiles of about equal size that cover `units`.
template <class F> SLIP_INLINE void unit_tiles(int units, F&& f) {
  const int count = (units + kUnitTile - 1) / kUnitTile;
  for (int k = 0; k < count; k++) f(units * k / count, units * (k + 1) / count - units * k / count, k, count);
}

// Scores of 16 V keys side by side, for all units. lines: to fetch per i, all units together.
template <int V>
void score_units(int units, const float* const* q, const float* const* keys, ptrdiff_t stride, int head_dim,
                 float scale, float* const* out, Ahead& ahead, int lines) {
  unit_tiles(units, [&](int u, int r, int index, int count) {
    const int own = share(lines, index, count);
    switch (r) {
      case 1: score_tile<1, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
      case 2: score_tile<2, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
      case 3: score_tile<3, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
      case 4: score_tile<4, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
      case 5: score_tile<5, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
      default: score_tile<kUnitTile, V>(q + u, keys, stride, head_dim, scale, out + u, ahead, own); break;
    }
  });
}

// Values of keys: blocks[key / kKvBlock] holds those of one block, `stride` floats apart.
struct Values {
  const float* const* blocks;
  ptrdiff_t stride;
};

// mixed[r][...] += sum over keys [begin, end) of weights[r][key] * value of key, 16 V values of each.
template <int R, int V>
SLIP_INLINE void mix_tile(const float* const* weights, Values values, int begin, int end, ptrdiff_t offset,
                          float* const* mixed, Ahead& ahead, int lines) {
  Ahead later = ahead;
  f32x16 sum[R][V];
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = load(mixed[r] + offset + 16 * v);
  for (int key = begin; key < end;) {
    const float* at = values.blocks[key / kKvBlock] + key % kKvBlock * values.stride + offset;
    const int next = key / kKvBlock * kKvBlock + kKvBlock, stop = next < end ? next : end;
    for (; key < stop; key++, at += values.stride) {
      if (lines > 0) later.fetch(lines);
      f32x16 value[V];
      SLIP_UNROLL for (int v = 0; v < V; v++) value[v] = load(at + 16 * v);
      SLIP_UNROLL for (int r = 0; r < R; r++) {
        const f32x16 x = bcast(weights[r][key]);
        SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = fma(x, value[v], sum[r][v]);
      }
    }
  }
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) store(mixed[r] + offset + 16 * v, sum[r][v]);
  ahead = later;
}

// lines: to fetch per key while 16 kVectorTile values of it are mixed.
template <int R>
SLIP_INLINE void mix_all(const float* const* weights, Values values, int begin, int end, int width,
                         float* const* mixed, Ahead& ahead, int lines) {
  constexpr int kStep = 16 * kVectorTile;
  int offset = 0;
  for (; offset + kStep <= width; offset += kStep)
    mix_tile<R, kVectorTile>(weights, values, begin, end, offset, mixed, ahead, lines);
  for (; offset < width; offset += 16) mix_tile<R, 1>(weights, values, begin, end, offset, mixed, ahead, lines > 0);
}

// The same for up to kUnitTile units.
void mix_units(int units, const float* const* weights, Values values, int begin, int end, int width,
               float* const* mixed, Ahead& ahead, int lines) {
  if (begin >= end) return;
  switch (units) {
    case 1: mix_all<1>(weights, values, begin, end, width, mixed, ahead, lines); break;
    case 2: mix_all<2>(weights, values, begin, end, width, mixed, ahead, lines); break;
    case 3: mix_all<3>(weights, values, begin, end, width, mixed, ahead, lines); break;
    case 4: mix_all<4>(weights, values, begin, end, width, mixed, ahead, lines); break;
    case 5: mix_all<5>(weights, values, begin, end, width, mixed, ahead, lines); break;
    default: mix_all<kUnitTile>(weights, values, begin, end, width, mixed, ahead, lines); break;
  }
}

// Scores of n keys become weights e^(score - largest); fills what is left of the last vector with weight 0. lines: to
// fetch per vector.
SLIP_INLINE void softmax(float* scores, int n, float* top, float* total, Ahead& ahead, int lines) {
  const int vectors = (n + 15) / 16;
  for (int i = n; i < 16 * vectors; i++) scores[i] = -__builtin_inff();
  f32x16 largest = load(scores);
  for (int v = 1; v < vectors; v++) largest = vmax(largest, load(scores + 16 * v));
  *top = reduce_max(largest);
  f32x16 sum = zero();
  for (int v = 0; v < vectors; v++) {
    ahead.fetch(lines);
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
  const float *key_blocks[kBlocks], *value_blocks[kBlocks];
  const float* tiles[3 * kBlocks + 1];  // of `ahead`
  Ahead ahead;
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

// Blocks of the segment, and what to fetch while it is computed: all but the first keys, and those of the next one.
void find_blocks(Segment& s) {
  const AttendTask& task = s.task;
  const int32_t* table = task.table + s.base / kKvBlock;
  const int blocks = (s.cached + kKvBlock - 1) / kKvBlock;
  const int more = (task.cached - s.base + kKvBlock - 1) / kKvBlock;  // blocks from here to the end
  int tiles = 0;
  for (int k = 0; k < blocks; k++) {
    s.key_blocks[k] = task.pool + table[k] * task.block_floats + task.key_offset;
    s.value_blocks[k] = task.pool + table[k] * task.block_floats + task.value_offset;
    if (k >= kLead) s.tiles[tiles++] = s.key_blocks[k];
  }
  for (int k = 0; k < blocks; k++) s.tiles[tiles++] = s.value_blocks[k];
  for (int k = kBlocks; k < more && k < kBlocks + kLead; k++)
    s.tiles[tiles++] = task.pool + table[k] * task.block_floats + task.key_offset;
  if (tiles == 0) s.tiles[tiles++] = task.pool;
  s.tiles[tiles] = nullptr;
  s.ahead.begin(s.tiles, kKvBlock * task.head_dim);
}

template <int V> void score_blocks(Segment& s, int block, int column) {
  const AttendTask& task = s.task;
  const int key = block * kKvBlock + column;
  int begin = 0;
  while (begin < task.units && s.keys[begin] <= key) begin++;  // rows of a prefill that end before
  const float* keys[2] = {s.key_blocks[block] + column, V > 2 ? s.key_blocks[block + 1] : nullptr};
  float* out[kAttendUnits];
  for (int u = begin; u < task.units; u++) out[u] = s.scores[u] + key;
  score_units<V>(task.units - begin, s.q + begin, keys, kKvBlock, task.head_dim, task.scale, out + begin, s.ahead, V);
}

void score_cached(Segment& s, int most) {
  const int last = ((s.cached < most ? s.cached : most) + kKvBlock - 1) / kKvBlock;
  int block = 0;
  if constexpr (kVectorTile > 2)
    for (; block + 2 <= last; block += 2) score_blocks<4>(s, block, 0);
  constexpr int kStep = kVectorTile < 2 ? 1 : 2;
  for (; block < last; block++)
    for (int column = 0; column < kKvBlock; column += 16 * kStep) score_blocks<kStep>(s, block, column);
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
      const float* keys = tile + begin;
      score_units<1>(task.group, s.q + unit, &keys, stride, task.head_dim, task.scale, out, s.ahead, 0);
      const int n = columns - begin < 16 ? columns - begin : 16;
      for (int g = 0; g < task.group; g++)
        for (int i = 0; i < n; i++) s.scores[unit + g][s.cached + begin + i] = out[g][i];
    }
  }
}

// Values in key order: those all units of a tile share together, the rest unit by unit.
void mix_cached(Segment& s) {
  const AttendTask& task = s.task;
  const Values values{s.value_blocks, task.value_stride};
  constexpr int kLines = kVectorTile > 3 ? 3 : 1;  // the rest comes during softmax
  unit_tiles(task.units, [&](int u, int r, int index, int count) {
    int shared = s.cached;
    for (int i = 0; i < r; i++) shared = s.keys[u + i] < shared ? s.keys[u + i] : shared;
    mix_units(r, s.scores + u, values, 0, shared, task.value_stride, s.mixed + u, s.ahead,
              share(kLines, index, count));
    for (int i = 0; i < r; i++) {
      const int own = s.keys[u + i] < s.cached ? s.keys[u + i] : s.cached;
      mix_units(1, s.scores + u + i, values, shared, own, task.value_stride, s.mixed + u + i, s.ahead, 0);
    }
  });
}

// tile: [kSegment, value_stride], values of drafted keys gathered where their keys stand in the segment.
void mix_drafted(Segment& s, float* tile) {
  const AttendTask& task = s.task;
  int32_t held[kSegment], ids[kSegment];
  for (int column = 0; column < kSegment; column++) held[column] = -1;
  const float* blocks[kBlocks];
  for (int k = 0; k < kBlocks; k++) blocks[k] = tile + static_cast<ptrdiff_t>(k) * kKvBlock * task.value_stride;
  for (int row = 0; row < task.units / task.group; row++) {
    const int columns = drafted_path(s, row, ids);
    for (int column = 0; column < columns; column++) {
      if (held[column] == ids[column]) continue;
      held[column] = ids[column];
      const float* value = task.draft_values + ids[column] * task.draft_stride;
      float* to = tile + static_cast<ptrdiff_t>(s.cached + column) * task.value_stride;
      for (int i = 0; i < task.head_dim; i++) to[i] = value[i];
    }
    unit_tiles(task.group, [&](int g, int r, int, int) {
      const int unit = row * task.group + g;
      mix_units(r, s.scores + unit, {blocks, task.value_stride}, s.cached, s.cached + columns, task.value_stride,
                s.mixed + unit, s.ahead, 0);
    });
  }
}

void attend(const AttendTask& task, int segment, AttendPart part, float* work) {
  Segment s{task};
  s.base = segment * kSegment;
  s.cached = clamp_keys(task.cached - s.base);
  int most = 0;
  for (int u = 0, row = 0; u < task.units; row++)
    for (int head = 0; head < task.group; head++, u++) {
      s.q[u] = task.q + row * task.q_stride + static_cast<ptrdiff_t>(head) * task.head_dim;
      s.scores[u] = work + static_cast<ptrdiff_t>(u) * kSegment;
      s.mixed[u] = part.mixed + static_cast<ptrdiff_t>(u) * task.value_stride;
      s.keys[u] = clamp_keys(task.ends[row] - s.base);
      most = s.keys[u] > most ? s.keys[u] : most;
      for (int i = 0; i < task.value_stride; i += 16) store(s.mixed[u] + i, zero());
    }
  find_blocks(s);
  score_cached(s, most);
  float *scratch = work + static_cast<ptrdiff_t>(kSegment) * kAttendUnits, *tile = scratch + 16 * kAttendUnits;
  const bool drafted = most > s.cached;
  if (drafted) score_drafted(s, tile, scratch);
  for (int u = 0; u < task.units; u++)
    if (s.keys[u] > 0)
      softmax(s.scores[u], s.keys[u], part.top + u, part.total + u, s.ahead, share(16, u, task.units));
  mix_cached(s);
  if (drafted) mix_drafted(s, tile);
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
