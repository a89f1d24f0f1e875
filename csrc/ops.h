// Everything of a decoder pass that is not a matrix product, row by row; see csrc/README.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slip {

constexpr int kKvBlock = 128;     // positions per KV block
constexpr int kKeyTile = 64;      // keys of a block that lie side by side
constexpr int kSegment = 128;     // keys that are scored at once; segments start at absolute positions 0, 128, ...
constexpr int kStretch = 4;       // segments per stretch, but for the first ones
constexpr int kAttendUnits = 96;  // most units of one attention task; they share one reading of keys and values
static_assert(kSegment == kKvBlock, "a segment's cached keys are in one block");

// A stretch is what one task does alone: the first segments, one each, then kStretch segments each, so that threads
// share short contexts evenly and long ones are rarely merged. First segment of a stretch; stretches that n > 0
// segments take.
constexpr int stretch_begin(int stretch) { return stretch < kStretch ? stretch : kStretch * (stretch - kStretch + 1); }
constexpr int stretches(int n) { return n < kStretch ? n : kStretch - 1 + (n + kStretch - 1) / kStretch; }

// One attention task: the rows of one sequence that share one key-value head. Unit u is query head u % group of row
// u / group. A row's keys are the cached positions below `cached` and then its drafted ancestors in depth order and
// itself, as if they stood at positions cached, cached + 1, ...; `ends` counts them. Prefill stores its rows first, so
// that all its keys are cached ones.
struct AttendTask {
  const float* q;           // first row, first head of the group
  ptrdiff_t q_stride;       // floats from row to row
  const int32_t* ends;      // [rows] keys of each row
  const int32_t* ids;       // [rows] indices into parents, draft_keys and draft_values
  const int32_t* parents;   // parent of each drafted row, -1 where the cache is the parent
  int units, group, head_dim, value_stride;
  float scale;
  int cached;
  const float* pool;        // KV blocks
  const int32_t* table;     // blocks of the sequence
  size_t block_floats, offset;  // of a block; of this layer's and head's keys in it, which their values follow
  const float* next;            // keys that the thread reads after this task, or null
  const float* draft_keys;  // [drafted rows, draft_stride], this layer and head
  const float* draft_values;
  ptrdiff_t draft_stride;

  // Cached keys of a segment, or null.
  const float* keys(int segment) const {
    return segment * kSegment < cached ? pool + table[segment] * block_floats + offset : nullptr;
  }
};

// Softmax over some keys: largest score, sum of e^(score - largest), values weighted by the same. [units] and
// [units, value_stride].
struct AttendPart {
  float* top;
  float* total;
  float* mixed;
};

struct OpsTable {
  // out = x / sqrt(mean(x^2) + eps) * weight. out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // into += x
  void (*add)(const float* x, int n, float* into);
  // out = gate / (1 + e^-gate) * up
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  // Halves (a, b) of one head become (a cos - b sin, b cos + a sin).
  void (*rotate)(float* x, const float* cos, const float* sin, int half);
  void (*exp)(const float* x, int n, float* out);
  // One stretch of one task. work: attend_work(head_dim) floats.
  void (*attend)(const AttendTask& task, int stretch, AttendPart part, float* work);
  // state = state joined with a later stretch, for the units that reach it.
  void (*attend_merge)(const AttendTask& task, int stretch, AttendPart state, AttendPart part);
  // out = mixed / total
  void (*attend_finish)(float total, const float* mixed, int head_dim, float* out);
};

// Floats of working memory for `attend`: scores of all units, scores of a few drafted keys, drafted keys or values.
constexpr size_t attend_work(int head_dim) {
  return static_cast<size_t>(kSegment) * (kAttendUnits + (head_dim + 15) / 16 * 16) + 16 * kAttendUnits;
}

}  // namespace slip
