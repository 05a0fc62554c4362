// SPDX-License-Identifier: Apache-2.0
//
// The random-number contract. Philox4x32-10 (Salmon et al., SC'11) with
//   key     = (seed low, seed high)
//   counter = (index, position low, position high, kind << 8 | (position - anchor position))
// where `position` is the one the draw decides: draft k decides n + k, row i decides n + i + 1.
// Batch slot, batch size, grid and thread count never enter.
#ifndef DSPARK_CORE_PHILOX_H_
#define DSPARK_CORE_PHILOX_H_

#include <stdint.h>

#include "core/macros.h"
#include "core/math.h"

namespace dspark {

/// What a draw is for. Draws of different kinds are independent.
enum DrawKind : uint32_t {
  kDraftSegment = 0,
  kDraftInner = 1,
  kAccept = 2,
  kResidualSegment = 3,
  kResidualInner = 4,
  kBonusSegment = 5,
  kBonusInner = 6,
  kTargetSegment = 7,
  kTargetInner = 8,
  kSynthetic = 9
};

struct Philox4 {
  uint32_t w[4];
};

DSPARK_HD Philox4 philox4x32_10(Philox4 counter, uint32_t key0, uint32_t key1) {
  uint32_t a = counter.w[0], b = counter.w[1], c = counter.w[2], d = counter.w[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * a;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c;
    const uint32_t na = static_cast<uint32_t>(p1 >> 32) ^ b ^ key0;
    const uint32_t nc = static_cast<uint32_t>(p0 >> 32) ^ d ^ key1;
    b = static_cast<uint32_t>(p1);
    d = static_cast<uint32_t>(p0);
    a = na;
    c = nc;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return Philox4{{a, b, c, d}};
}

/// One stream of draws: a request's seed, the position decided, the distance to the anchor, a kind.
/// `distance` is 0 for kinds kTargetSegment and kTargetInner.
struct DrawStream {
  uint64_t seed;
  int64_t position;
  uint32_t distance;
  uint32_t kind;
};

DSPARK_HD Philox4 draw(const DrawStream& s, uint32_t index) {
  const uint64_t position = static_cast<uint64_t>(s.position);
  const Philox4 counter{{index, static_cast<uint32_t>(position),
                         static_cast<uint32_t>(position >> 32), s.kind << 8 | s.distance}};
  return philox4x32_10(counter, static_cast<uint32_t>(s.seed), static_cast<uint32_t>(s.seed >> 32));
}

/// The 53-bit integer of a draw that decides: inner and accept draws.
DSPARK_HD uint64_t draw_u53(const DrawStream& s) {
  const Philox4 r = draw(s, 0);
  return static_cast<uint64_t>(r.w[0]) << 21 | r.w[1] >> 11;
}

/// Gumbel noise -log(-log(1 - v)), v = (k + 1/2) 2^-32, from one 32-bit word. 1 - v is exact.
DSPARK_HD double gumbel(uint32_t word) {
  const double one_minus_v = (4294967295.5 - static_cast<double>(word)) * 2.3283064365386963e-10;
  return -log_f64(-log_f64(one_minus_v));
}

/// Noise of segment `s` (ids 128 s .. 128 s + 127): word s & 3 of draw s >> 2.
DSPARK_HD double segment_gumbel(const DrawStream& stream, uint32_t s) {
  const Philox4 words = draw(stream, s >> 2);
  // Chosen, not indexed: an index would put the words into a GPU thread's memory.
  const uint32_t low = (s & 1) != 0 ? words.w[1] : words.w[0];
  const uint32_t high = (s & 1) != 0 ? words.w[3] : words.w[2];
  return gumbel((s & 2) != 0 ? high : low);
}

}  // namespace dspark

#endif  // DSPARK_CORE_PHILOX_H_
