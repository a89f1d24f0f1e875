// Weight tiles and y = x W^T.
//
// Law: y[r][o] = bias[o] + acc, acc = fma(x[r][i], w[o][i], acc) for i ascending from acc = +0 (no bias: y = acc).
// w is the fp32 value that gguf.quants.dequantize gives, so every type equals F32 with the dequantised weights, bit
// for bit; no result depends on the number of rows, on threads or on the instruction set.
//
// Layout ("panels", version kLayoutVersion): 32 outputs side by side, padded with zero weights; inputs in order. Within
// a panel a "vector" is 16 outputs' 32-bit words; two vectors (outputs 0-15, 16-31) make a line of 128 bytes.
//   F32      per input: a line of floats
//   F16      per input: 32 halves (64 bytes)
//   BF16     per 2 inputs: a line of words, even input in the low half (an odd last input has 0 above it)
//   Q*_0/_1  per 32 inputs: d[32] halves (m[32] halves for _1), then fields of B bits (see below)
//   Q4_K/5_K per 256 inputs: d[32], dmin[32] halves; then 4 times, for 64 inputs: a line of scale words (scale, min of the
//            first 32 inputs, scale, min of the second: one byte each, low byte first), then fields
//   Q6_K     per 256 inputs: d[32] halves; then 4 times, for 64 inputs: a line of scale words (4 signed bytes, one per
//            16 inputs), then fields
// Fields of B bits (Q4: 4, Q5: 5, Q6_K: 6, Q8_0: 8), dense: a word holds floor(32/B) fields from the low bits up; the
// bits left over (2 per word for B = 5 and 6) carry the remaining fields: for B = 5, the 5 words of 32 inputs hold inputs
// 6k..6k+5 and their top pairs t0..t4 make input 30 = t0|t1<<2|(t4&1)<<4 and 31 = t2|t3<<2|(t4>>1)<<4; for B = 6, the 3
// words of 16 inputs hold inputs 5k..5k+4 and input 15 = t0|t1<<2|t2<<4.
// Signed types (Q4_0, Q5_0, Q6_K, Q8_0) store value - offset in two's complement of B bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slip {

class Pool;

enum class Type : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
constexpr int kTypes = 11;
constexpr int kLayoutVersion = 1;
constexpr int kPanel = 32;  // outputs of a panel

struct TypeInfo {
  const char* name;
  int span;         // inputs of a block of the raw file format (and of the packed layout; 2 for BF16)
  int raw_bytes;    // bytes of such a block of one row in the file
  int panel_bytes;  // bytes of such a block of a whole panel
};
const TypeInfo& type_info(Type type);

// A view of packed weights; `data` is 64-byte aligned and owned by somebody else.
struct Packed {
  Type type;
  int64_t out, in;  // y has `out` columns, x has `in`
  const uint8_t* data;
  int64_t panels() const { return (out + kPanel - 1) / kPanel; }
  size_t panel_bytes() const;
  size_t bytes() const { return panel_bytes() * static_cast<size_t>(panels()); }
};

// Packs rows[o] (raw file bytes of output row o, `out` of them) into `data` (packed.bytes() bytes, 64-byte aligned).
void pack(Pool& pool, const Packed& shape, const uint8_t* const* rows, uint8_t* data);

// y[r*ldy + o] for r < m, o < w.out. x is [m][ldx], ldx >= w.in. y must not overlap x. bias has w.out entries or is null.
void linear(Pool& pool, const Packed& w, const float* x, int64_t ldx, int64_t m, float* y, int64_t ldy,
            const float* bias = nullptr);

// One row of the weights (an embedding) as fp32.
void unpack_row(const Packed& w, int64_t row, float* out);

struct LinearArgs {
  Packed w;
  const float* x;
  int64_t ldx, m;
  float* y;
  int64_t ldy;
  const float* bias;
};

// One instruction set's kernels.
struct LinearTable {
  void (*panels)(const LinearArgs& args, int64_t begin, int64_t end);
  void (*unpack_panel)(const Packed& w, int64_t panel, float* out);  // out[in][32]
  float (*read)(const float* data, size_t count);                    // reads all of it; the sum keeps it honest
};

}  // namespace slip
