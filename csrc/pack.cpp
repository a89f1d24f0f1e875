// From the bytes of a file to panels. Rows are decoded to plain integers here, once, at load.
#include <cstring>
#include <vector>

#include "linear.h"
#include "pool.h"

namespace slip {

namespace {

constexpr int kQ = 256;  // most inputs of a block

// What one block of one row holds, whatever the type.
struct Block {
  uint16_t d, m;       // halves: scale, minimum (Q4_K, Q5_K: of the super-block)
  uint8_t scale[16];   // Q6_K: 16 signed scales; Q4_K, Q5_K: 8 scales, then 8 minimums
  uint8_t q[kQ];       // fields, signed ones in two's complement
};

uint16_t half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

void decode_q4(const uint8_t* qs, int offset, uint8_t* q) {
  for (int j = 0; j < 16; j++) {
    q[j] = static_cast<uint8_t>((qs[j] & 15) - offset);
    q[j + 16] = static_cast<uint8_t>((qs[j] >> 4) - offset);
  }
}

void decode_q5(const uint8_t* qh, const uint8_t* qs, int offset, uint8_t* q) {
  uint32_t high;
  std::memcpy(&high, qh, 4);
  for (int j = 0; j < 16; j++) {
    q[j] = static_cast<uint8_t>((qs[j] & 15) + static_cast<int>(high >> j & 1) * 16 - offset);
    q[j + 16] = static_cast<uint8_t>((qs[j] >> 4) + static_cast<int>(high >> (j + 16) & 1) * 16 - offset);
  }
}

// The 6-bit scales and minimums of Q4_K and Q5_K: bytes 0-3 scales, 4-7 minimums (low 6 bits), 8-11 the low four
// bits of the last four of both, whose top two bits sit above the first eight.
void decode_scales(const uint8_t* s, uint8_t* scale) {
  for (int j = 0; j < 4; j++) {
    scale[j] = s[j] & 63;
    scale[j + 8] = s[j + 4] & 63;
    scale[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
    scale[j + 12] = static_cast<uint8_t>(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
  }
}

void decode_k(const uint8_t* qh, const uint8_t* qs, uint8_t* q) {
  for (int pair = 0; pair < 4; pair++)
    for (int j = 0; j < 32; j++) {
      q[64 * pair + j] = qs[32 * pair + j] & 15;
      q[64 * pair + 32 + j] = qs[32 * pair + j] >> 4;
    }
  if (qh == nullptr) return;
  for (int group = 0; group < 8; group++)
    for (int j = 0; j < 32; j++) q[32 * group + j] |= static_cast<uint8_t>((qh[j] >> group & 1) << 4);
}

void decode_q6(const uint8_t* raw, uint8_t* q) {
  for (int half = 0; half < 2; half++) {
    const uint8_t *low = raw + 64 * half, *high = raw + 128 + 32 * half;
    for (int part = 0; part < 4; part++)
      for (int j = 0; j < 32; j++) {
        const int nibble = low[part % 2 * 32 + j] >> (part / 2 * 4) & 15;
        q[128 * half + 32 * part + j] = static_cast<uint8_t>((nibble | (high[j] >> (2 * part) & 3) << 4) - 32);
      }
  }
}

void decode(Type type, const uint8_t* raw, Block& b) {
  switch (type) {
    case Type::Q8_0: b.d = half_at(raw); std::memcpy(b.q, raw + 2, 32); break;
    case Type::Q4_0: b.d = half_at(raw); decode_q4(raw + 2, 8, b.q); break;
    case Type::Q4_1: b.d = half_at(raw); b.m = half_at(raw + 2); decode_q4(raw + 4, 0, b.q); break;
    case Type::Q5_0: b.d = half_at(raw); decode_q5(raw + 2, raw + 6, 16, b.q); break;
    case Type::Q5_1: b.d = half_at(raw); b.m = half_at(raw + 2); decode_q5(raw + 4, raw + 8, 0, b.q); break;
    case Type::Q4_K:
    case Type::Q5_K:
      b.d = half_at(raw);
      b.m = half_at(raw + 2);
      decode_scales(raw + 4, b.scale);
      if (type == Type::Q4_K) decode_k(nullptr, raw + 16, b.q);
      else decode_k(raw + 16, raw + 48, b.q);
      break;
    case Type::Q6_K: decode_q6(raw, b.q); std::memcpy(b.scale, raw + 192, 16); b.d = half_at(raw + 208); break;
    default: break;
  }
}

// The words of 32 fields (16 of 6 bits), one lane of a panel; words are 128 bytes apart.
template <int BITS> void put_fields(const uint8_t* q, uint8_t* out) {
  constexpr uint32_t mask = (1u << BITS) - 1;
  constexpr int per_word = 32 / BITS, count = BITS == 6 ? 3 : BITS;
  uint32_t word[count] = {};
  for (int k = 0; k < count; k++)
    for (int j = 0; j < per_word; j++) word[k] |= (q[k * per_word + j] & mask) << (BITS * j);
  if constexpr (BITS == 5) {
    const uint32_t a = q[30] & mask, b = q[31] & mask;
    word[0] |= (a & 3) << 30;
    word[1] |= (a >> 2 & 3) << 30;
    word[2] |= (b & 3) << 30;
    word[3] |= (b >> 2 & 3) << 30;
    word[4] |= (a >> 4 | (b >> 4) << 1) << 30;
  }
  if constexpr (BITS == 6)
    for (int k = 0; k < 3; k++) word[k] |= ((q[15] & mask) >> (2 * k) & 3) << 30;
  for (int k = 0; k < count; k++) std::memcpy(out + 128 * k, &word[k], 4);
}

// Fields of `inputs` inputs from `at` on; returns where the next ones go.
template <int BITS> uint8_t* put_run(const uint8_t* q, int inputs, uint8_t* at) {
  constexpr int step = BITS == 6 ? 16 : 32;
  for (int i = 0; i < inputs; i += step, at += step * BITS * kPanel / 8) put_fields<BITS>(q + i, at);
  return at;
}

void put_word(uint8_t* out, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t word = a | b << 8 | c << 16 | d << 24;
  std::memcpy(out, &word, 4);
}

// One block of one lane into the panel's block at `out`.
void put_block(Type type, const Block& b, int lane, uint8_t* out) {
  std::memcpy(out + 2 * lane, &b.d, 2);
  uint8_t* at = out + 64 + 4 * lane;
  switch (type) {
    case Type::Q8_0: put_run<8>(b.q, 32, at); return;
    case Type::Q4_0: put_run<4>(b.q, 32, at); return;
    case Type::Q5_0: put_run<5>(b.q, 32, at); return;
    case Type::Q6_K:
      for (int part = 0; part < 4; part++) {
        const uint8_t* s = b.scale + 4 * part;
        put_word(at, s[0], s[1], s[2], s[3]);
        at = put_run<6>(b.q + 64 * part, 64, at + 128);
      }
      return;
    default: break;
  }
  std::memcpy(out + 64 + 2 * lane, &b.m, 2);
  at += 64;
  if (type == Type::Q4_1) put_run<4>(b.q, 32, at);
  if (type == Type::Q5_1) put_run<5>(b.q, 32, at);
  if (type != Type::Q4_K && type != Type::Q5_K) return;
  for (int part = 0; part < 4; part++) {
    const uint8_t *s = b.scale + 2 * part, *q = b.q + 64 * part;
    put_word(at, s[0], s[8], s[1], s[9]);
    at = type == Type::Q4_K ? put_run<4>(q, 64, at + 128) : put_run<5>(q, 64, at + 128);
  }
}

void pack_quantised(const Packed& shape, const uint8_t* const* rows, int lanes, uint8_t* out) {
  const TypeInfo& info = type_info(shape.type);
  std::memset(out, 0, shape.panel_bytes());
  Block block;
  for (int64_t b = 0; b < shape.in / info.span; b++)
    for (int lane = 0; lane < lanes; lane++) {
      decode(shape.type, rows[lane] + b * info.raw_bytes, block);
      put_block(shape.type, block, lane, out + b * info.panel_bytes);
    }
}

// Some cache lines of each row at a time, so that what they become stays in the L1 cache.
template <class T> void transpose(const Packed& shape, const uint8_t* const* rows, int lanes, T* out, bool pairs) {
  constexpr int64_t kStep = 512 / static_cast<int64_t>(sizeof(T));
  for (int64_t i0 = 0; i0 < shape.in; i0 += kStep) {
    const int64_t i1 = i0 + kStep < shape.in ? i0 + kStep : shape.in;
    for (int lane = 0; lane < lanes; lane++)
      for (int64_t i = i0; i < i1; i++) {
        T value;
        std::memcpy(&value, rows[lane] + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
        out[pairs ? (i / 2 * kPanel + lane) * 2 + i % 2 : i * kPanel + lane] = value;
      }
  }
}

}  // namespace

void pack(Pool& pool, const Packed& shape, const uint8_t* const* rows, uint8_t* data) {
  const size_t stride = shape.panel_bytes();
  pool.parallel_for(shape.panels(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      uint8_t* out = data + static_cast<size_t>(panel) * stride;
      const uint8_t* const* first = rows + panel * kPanel;
      const int lanes = static_cast<int>(shape.out - panel * kPanel < kPanel ? shape.out - panel * kPanel : kPanel);
      if (lanes < kPanel || shape.in % 2 != 0) std::memset(out, 0, stride);
      if (shape.type == Type::F32) transpose(shape, first, lanes, reinterpret_cast<uint32_t*>(out), false);
      else if (shape.type == Type::F16) transpose(shape, first, lanes, reinterpret_cast<uint16_t*>(out), false);
      else if (shape.type == Type::BF16) transpose(shape, first, lanes, reinterpret_cast<uint16_t*>(out), true);
      else pack_quantised(shape, first, lanes, out);
    }
  });
}

}  // namespace slip
