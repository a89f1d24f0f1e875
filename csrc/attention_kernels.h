// Attention of the rows of one sequence over one key-value head. Twin: kernels/reference_decoder.py.
//
// Lanes are keys while scores are made and values of a head while values are mixed; both walk the other axis in order.
// A key's score does not depend on the lane it has, so drafted keys are gathered in a small tile of their own. Keys and
// values of a segment lie in one run; whoever computes asks for what comes later (`Ahead`).
#pragma once

#include <utility>

#include "elementwise_kernels.h"
#include "ops.h"
#include "simd.h"

namespace slip::SLIP_ISA {
namespace {

// Most units of one register tile; few units take more vectors. 24 registers of sums of 32, 12 of 16.
constexpr bool kManyRegisters = kRegisters / kRegistersPerVector >= 32;
constexpr int kUnitTile = 6;
constexpr int vectors_of(int units) { return kManyRegisters ? 4 : units <= 3 ? 2 : 1; }
constexpr int kLead = 192;  // lines that are asked for before they are read
constexpr int kSoftmaxLines = 1;  // of a vector of scores
constexpr int kSoftmaxUnits = kManyRegisters ? 3 : 1;  // whose exponentials are made side by side

// Cache lines in the order in which they will be read: keys and values of this segment, then the keys that come next.
// Memory is busy all the time only when lines are asked for at an even pace, so every inner loop fetches its share.
struct Ahead {
  const float *at, *end, *next;
  SLIP_INLINE void fetch(int lines) {
    if (lines > 0) prefetch(at);
    if (lines > 1) prefetch(at + 16);
    if (lines > 2) prefetch(at + 32);
    if (lines > 3) prefetch(at + 48);
    at += 16 * lines;
    if (at >= end) at = next, end = next + kSegment * 1024;  // enough for all that is fetched before the next segment
  }
};

// Share of tile `index` of `count` in `lines`; of 0 of kNone nothing.
constexpr int kNone = 1 << 16;
SLIP_INLINE int share(int lines, int index, int count) { return lines * (index + 1) / count - lines * index / count; }

// Calls f(first unit, units, index, count) for tiles of about equal size that cover `units`.
template <class F> SLIP_INLINE void unit_tiles(int units, F&& f) {
  const int count = (units + kUnitTile - 1) / kUnitTile;
  for (int k = 0; k < count; k++) f(units * k / count, units * (k + 1) / count - units * k / count, k, count);
}

// f<1>, f<2>, ... as a table.
template <class F> constexpr auto by_units(F f) {
  return [&]<int... K>(std::integer_sequence<int, K...>) {
    struct { decltype(f.template operator()<1>()) of[kUnitTile]; } table = {{f.template operator()<K + 1>()...}};
    return table;
  }(std::make_integer_sequence<int, kUnitTile>{});
}

// out[r][column .. column + 16 V) = scale * sum over i of q[r][i] * keys[i * stride + ...]. lines: to fetch per i.
// Tiles are functions of their own: registers are scarce in them.
template <int R, int V>
__attribute__((noinline)) void score_tile(const float* const* q, const float* keys, ptrdiff_t stride, int head_dim,
                                          float scale, float* const* out, ptrdiff_t column, Ahead& ahead, int lines) {
  Ahead later = ahead;
  f32x16 sum[R][V];
  SLIP_UNROLL for (int r = 0; r < R; r++) SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = zero();
  for (int i = 0; i < head_dim; i++, keys += stride) {
    later.fetch(lines);
    f32x16 key[V];
    SLIP_UNROLL for (int v = 0; v < V; v++) key[v] = load(keys + 16 * v);
    SLIP_UNROLL for (int r = 0; r < R; r++) {
      const f32x16 x = bcast(q[r][i]);
      SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = fma(x, key[v], sum[r][v]);
    }
  }
  ahead = later;
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) store(out[r] + column + 16 * v, mul(sum[r][v], bcast(scale)));
}
using Score = void (*)(const float* const*, const float*, ptrdiff_t, int, float, float* const*, ptrdiff_t, Ahead&, int);
constexpr auto kScore = by_units([]<int R>() -> Score { return score_tile<R, vectors_of(R)>; });
constexpr auto kScoreNarrow = by_units([]<int R>() -> Score { return score_tile<R, 1>; });

// mixed[r][offset .. offset + 16 V) += sum over keys [begin, end) of weights[r][key] * values[key * stride + offset
// ...]. lines: to fetch per key.
template <int R, int V>
__attribute__((noinline)) void mix_tile(const float* const* weights, const float* values, ptrdiff_t stride, int begin,
                                        int end, float* const* mixed, ptrdiff_t offset, Ahead& ahead, int lines) {
  Ahead later = ahead;
  f32x16 sum[R][V];
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = load(mixed[r] + offset + 16 * v);
  values += begin * stride + offset;
  for (ptrdiff_t key = begin; key < end; key++, values += stride) {
    later.fetch(lines);
    f32x16 value[V];
    SLIP_UNROLL for (int v = 0; v < V; v++) value[v] = load(values + 16 * v);
    SLIP_UNROLL for (int r = 0; r < R; r++) {
      const f32x16 x = bcast(weights[r][key]);
      SLIP_UNROLL for (int v = 0; v < V; v++) sum[r][v] = fma(x, value[v], sum[r][v]);
    }
  }
  ahead = later;
  SLIP_UNROLL for (int r = 0; r < R; r++)
    SLIP_UNROLL for (int v = 0; v < V; v++) store(mixed[r] + offset + 16 * v, sum[r][v]);
}
using Mix = void (*)(const float* const*, const float*, ptrdiff_t, int, int, float* const*, ptrdiff_t, Ahead&, int);
constexpr auto kMix = by_units([]<int R>() -> Mix { return mix_tile<R, vectors_of(R)>; });
constexpr auto kMixNarrow = by_units([]<int R>() -> Mix { return mix_tile<R, 1>; });

// All `width` values, which are `width` floats apart, of up to kUnitTile units: tile `index` of `count`, which share
// what is to be fetched.
SLIP_INLINE void mix(int units, const float* const* weights, const float* values, int begin, int end, int width,
                     float* const* mixed, Ahead& ahead, int index, int count) {
  const int step = 16 * vectors_of(units);
  int offset = 0;
  for (; offset + step <= width; offset += step)
    kMix.of[units - 1](weights, values, width, begin, end, mixed, offset, ahead, share(step / 16, index, count));
  for (; offset < width; offset += 16)
    kMixNarrow.of[units - 1](weights, values, width, begin, end, mixed, offset, ahead, share(1, index, count));
}

// The largest of n scores and `top`; fills what is left of the last vector with -infinity.
SLIP_INLINE float largest(float* scores, int n, float top) {
  const int vectors = (n + 15) / 16;
  for (int i = n; i < 16 * vectors; i++) scores[i] = -__builtin_inff();
  f32x16 lanes = bcast(top);
  for (int v = 0; v < vectors; v++) lanes = vmax(lanes, load(scores + 16 * v));
  return reduce_max(lanes);
}

// Scores of N units become weights e^(score - top), totals their sums. lines: to fetch per vector of each.
template <int N>
SLIP_INLINE void weigh(float* const* scores, int vectors, const float* tops, float* totals, Ahead& ahead, int lines) {
  f32x16 sum[N];
  SLIP_UNROLL for (int k = 0; k < N; k++) sum[k] = zero();
  for (int v = 0; v < vectors; v++) {
    f32x16 weight[N];
    SLIP_UNROLL for (int k = 0; k < N; k++) {
      ahead.fetch(lines);
      weight[k] = sub(load(scores[k] + 16 * v), bcast(tops[k]));
    }
    exp_each(weight);
    SLIP_UNROLL for (int k = 0; k < N; k++) {
      store(scores[k] + 16 * v, weight[k]);
      sum[k] = add(sum[k], weight[k]);
    }
  }
  SLIP_UNROLL for (int k = 0; k < N; k++) totals[k] = reduce_add(sum[k]);
}

// Views of one task at one segment: where queries, scores and mixed values of each unit are, how many keys it has
// there; and the softmax of the segments before it in the stretch.
struct Segment {
  explicit SLIP_INLINE Segment(const AttendTask& t) : task(t) {}
  const AttendTask& task;
  int base;    // absolute position of the first key
  int cached;  // cached keys in the segment
  int most;    // keys of the unit that has most
  const float *cached_keys, *cached_values;
  const float* q[kAttendUnits];
  float* scores[kAttendUnits];
  float* mixed[kAttendUnits];
  int keys[kAttendUnits];
  float tops[kAttendUnits], totals[kAttendUnits];
  Ahead ahead{};
};

SLIP_INLINE int clamp_keys(int n) { return n < 0 ? 0 : n > kSegment ? kSegment : n; }

void begin_stretch(Segment& s, float* mixed, float* scores) {
  const AttendTask& task = s.task;
  for (int u = 0, row = 0; u < task.units; row++)
    for (int head = 0; head < task.group; head++, u++) {
      s.q[u] = task.q + row * task.q_stride + static_cast<ptrdiff_t>(head) * task.head_dim;
      s.scores[u] = scores + static_cast<ptrdiff_t>(u) * kSegment;
      s.mixed[u] = mixed + static_cast<ptrdiff_t>(u) * task.value_stride;
      for (int i = 0; i < task.value_stride; i += 16) store(s.mixed[u] + i, zero());
    }
  for (int u = 0; u < kAttendUnits; u++) s.tops[u] = -__builtin_inff(), s.totals[u] = 0.0f;
}

// next: keys that are read after this segment, or null.
void enter(Segment& s, int segment, const float* next) {
  const AttendTask& task = s.task;
  s.base = segment * kSegment;
  s.cached = clamp_keys(task.cached - s.base);
  s.most = 0;
  for (int u = 0, row = 0; u < task.units; row++) {
    const int keys = clamp_keys(task.ends[row] - s.base);
    s.most = keys > s.most ? keys : s.most;
    for (int head = 0; head < task.group; head++) s.keys[u++] = keys;
  }
  s.cached_keys = s.cached > 0 ? task.keys(segment) : task.pool;
  s.cached_values = s.cached_keys + static_cast<ptrdiff_t>(kKvBlock) * task.head_dim;
  const float* end = s.cached_values + static_cast<ptrdiff_t>(s.cached) * task.value_stride;
  // Where units are many, the first ones read a tile of keys quickly, while lines are asked for at the pace of all.
  const int tiles = (task.units + kUnitTile - 1) / kUnitTile;
  const int lead = kLead + kKeyTile * kKeyTile / 16 * (tiles - 1) / tiles;
  const float* from = s.cached_keys + 16 * lead;
  s.ahead = {s.ahead.at > from && s.ahead.at < end ? s.ahead.at : from, end, next != nullptr ? next : s.cached_keys};
}

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

void score_cached(Segment& s) {
  const AttendTask& task = s.task;
  const int last = s.cached < s.most ? s.cached : s.most;
  int begin = 0;
  for (int column = 0; column < last; column += kKeyTile) {
    while (begin < task.units && s.keys[begin] <= column) begin++;  // rows of a prefill that end before
    const float* keys = s.cached_keys + static_cast<ptrdiff_t>(column) * task.head_dim;
    unit_tiles(task.units - begin, [&](int u, int r, int index, int count) {
      u += begin;
      const int step = 16 * vectors_of(r), lines = share(vectors_of(r), index, count);
      for (int k = 0; k < kKeyTile && column + k < last; k += step)
        kScore.of[r - 1](s.q + u, keys + k, kKeyTile, task.head_dim, task.scale, s.scores + u, column + k, s.ahead,
                         lines);
    });
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
      const float* keys = tile + begin;
      unit_tiles(task.group, [&](int g, int r, int, int) {
        kScoreNarrow.of[r - 1](s.q + unit + g, keys, stride, task.head_dim, task.scale, out + g, 0, s.ahead, 0);
      });
      const int n = columns - begin < 16 ? columns - begin : 16;
      for (int g = 0; g < task.group; g++)
        for (int i = 0; i < n; i++) s.scores[unit + g][s.cached + begin + i] = out[g][i];
    }
  }
}

// Scores of all units become weights; what earlier segments gave shrinks to the new largest score.
void softmax(Segment& s) {
  const int units = s.task.units;
  float tops[kAttendUnits], totals[kAttendUnits], shrink[kAttendUnits];
  for (int u = 0; u < units; u++) {
    tops[u] = s.keys[u] > 0 ? largest(s.scores[u], s.keys[u], s.tops[u]) : s.tops[u];
    totals[u] = 0.0f;
  }
  for (int u = 0, n; u < units; u += n) {
    const auto vectors = [&](int k) { return (s.keys[u + k] + 15) / 16; };
    n = 1;
    while (n < kSoftmaxUnits && u + n < units && vectors(n) == vectors(0)) n++;
    if (n < kSoftmaxUnits) n = 1;
    if (n > 1) weigh<kSoftmaxUnits>(s.scores + u, vectors(0), tops + u, totals + u, s.ahead, kSoftmaxLines);
    else weigh<1>(s.scores + u, vectors(0), tops + u, totals + u, s.ahead, kSoftmaxLines);
  }
  for (int u = 0; u < units; u += 16) {
    const f32x16 factor = exp(sub(load(s.tops + u), load(tops + u)));
    store(shrink + u, factor);
    store(s.totals + u, fma(load(s.totals + u), factor, load(totals + u)));
    store(s.tops + u, load(tops + u));
  }
  for (int u = 0; u < units; u++) {
    if (s.keys[u] == 0 || shrink[u] == 1.0f) continue;
    for (int i = 0; i < s.task.value_stride; i += 16)
      store(s.mixed[u] + i, mul(load(s.mixed[u] + i), bcast(shrink[u])));
  }
}

// Values in key order: those all units of a tile share together, the rest unit by unit.
void mix_cached(Segment& s) {
  const AttendTask& task = s.task;
  unit_tiles(task.units, [&](int u, int r, int index, int count) {
    int shared = s.cached;
    for (int i = 0; i < r; i++) shared = s.keys[u + i] < shared ? s.keys[u + i] : shared;
    mix(r, s.scores + u, s.cached_values, 0, shared, task.value_stride, s.mixed + u, s.ahead, index, count);
    if (shared == s.cached) return;
    for (int i = 0; i < r; i++) {
      const int own = s.keys[u + i] < s.cached ? s.keys[u + i] : s.cached;
      mix(1, s.scores + u + i, s.cached_values, shared, own, task.value_stride, s.mixed + u + i, s.ahead, 0, kNone);
    }
  });
}

// tile: [kSegment, value_stride], values of drafted keys gathered where their keys stand in the segment.
void mix_drafted(Segment& s, float* tile) {
  const AttendTask& task = s.task;
  int32_t held[kSegment], ids[kSegment];
  for (int column = 0; column < kSegment; column++) held[column] = -1;
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
      mix(r, s.scores + unit, tile, s.cached, s.cached + columns, task.value_stride, s.mixed + unit, s.ahead, 0, kNone);
    });
  }
}

void attend(const AttendTask& task, int stretch, AttendPart part, float* work) {
  Segment s(task);
  float *scratch = work + static_cast<ptrdiff_t>(kSegment) * kAttendUnits, *tile = scratch + 16 * kAttendUnits;
  begin_stretch(s, part.mixed, work);
  const int end = stretch_begin(stretch + 1);
  for (int segment = stretch_begin(stretch); segment < end; segment++) {
    const float* next = segment + 1 < end ? task.keys(segment + 1) : nullptr;
    enter(s, segment, next != nullptr ? next : task.next);
    if (s.most == 0) break;
    score_cached(s);
    const bool drafted = s.most > s.cached;
    if (drafted) score_drafted(s, tile, scratch);
    softmax(s);
    mix_cached(s);
    if (drafted) mix_drafted(s, tile);
  }
  for (int u = 0; u < task.units; u++) part.top[u] = s.tops[u], part.total[u] = s.totals[u];
}

void attend_merge(const AttendTask& task, int stretch, AttendPart state, AttendPart part) {
  for (int begin = 0; begin < task.units; begin += 16) {
    const int n = task.units - begin < 16 ? task.units - begin : 16;
    const f32x16 old = load_part(state.top + begin, n), later = load_part(part.top + begin, n);
    const f32x16 both = vmax(old, later), a = exp(sub(old, both)), b = exp(sub(later, both));
    float top[16], total[16], old_factor[16], factor[16];
    store(top, both), store(old_factor, a), store(factor, b);
    store(total, fma(load_part(state.total + begin, n), a, mul(load_part(part.total + begin, n), b)));
    for (int k = 0; k < n; k++) {
      const int u = begin + k;
      if (task.ends[u / task.group] <= stretch_begin(stretch) * kSegment) continue;
      state.top[u] = top[k], state.total[u] = total[k];
      float* mixed = state.mixed + static_cast<ptrdiff_t>(u) * task.value_stride;
      const float* more = part.mixed + static_cast<ptrdiff_t>(u) * task.value_stride;
      for (int i = 0; i < task.value_stride; i += 16)
        store(mixed + i, fma(load(mixed + i), bcast(old_factor[k]), mul(load(more + i), bcast(factor[k]))));
    }
  }
}

void attend_finish(float total, const float* mixed, int head_dim, float* out) {
  const f32x16 scale = bcast(1.0f / total);
  int i = 0;
  for (; i + 16 <= head_dim; i += 16) store(out + i, mul(load(mixed + i), scale));
  if (i < head_dim) store_part(out + i, mul(load(mixed + i), scale), head_dim - i);
}

}  // namespace
}  // namespace slip::SLIP_ISA
