// SPDX-License-Identifier: Apache-2.0
//
// A row of target logits on the device. A warp holds a segment: lane l the ids l, l + 32, l + 64
// and l + 96 of its 128, which makes the halving sum of core/sampler.h two additions and a
// butterfly, and finds any alignment of rows good enough.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_ROW_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_ROW_CUH_

#include "cuda/rejection_sampler/team.cuh"

namespace dspark::cuda::verify {

constexpr float kMinusInf = -__builtin_inff();

/// A row that this CTA works on, in shared memory: its law, and what is known of it.
struct Row {
  RowLaw law;
  DraftRow draft;
  Stats stats;         // of this CTA's slice: entry 0 is segment `first`
  int32_t first, end;  // the slice
  void* kept;          // elements of the slice, or null
  Keep keep;           // how they are kept
  bool cuts;           // whether `cut` holds less than everything
  bool nan, empty;
  Cut cut;
  float top;
  int32_t top_segment;
  double mass, log_mass;
  double raw_top, raw_log_mass;
  DraftLook look;
};

/// The slice of the CTA with this rank: `slice` of `segments`, the last ones fewer or none.
__device__ __forceinline__ void take_slice(Row& row, int32_t rank, int32_t slice,
                                           int32_t segments) {
  row.first = rank * slice < segments ? rank * slice : segments;
  const int32_t end = row.first + slice;
  row.end = end < segments ? end : segments;
}

/// What the team has found in the slices of the row, which nothing has cut yet.
__device__ __forceinline__ void take_target(Row& row, const Tops& t) {
  row.nan = (t.found & kTargetNan) != 0;
  row.cuts = false;
  row.cut = no_cut();
  row.top = from_ordered_f32(static_cast<uint32_t>(t.key >> 32));
  row.top_segment = static_cast<int32_t>(~static_cast<uint32_t>(t.key));
  row.empty = row.top == kMinusInf;
  row.raw_top = static_cast<double>(raw_differs(row.law) ? from_ordered_f32(t.raw) : row.top);
}

__device__ __forceinline__ int32_t id_of(int32_t segment, int q) {
  return segment * kSegment + lane_id() + 32 * q;
}

/// Element i of a row as bits; what lies outside is -inf.
__device__ __forceinline__ uint32_t load_bits(const void* row, int32_t dtype, int32_t i, bool in) {
  if (dtype == DSPARK_F32) return in ? static_cast<const uint32_t*>(row)[i] : 0xff800000u;
  const uint32_t outside = dtype == DSPARK_BF16 ? 0xff80u : 0xfc00u;
  return in ? static_cast<const uint16_t*>(row)[i] : outside;
}

__device__ __forceinline__ float widen(uint32_t bits, int32_t dtype) {
  if (dtype == DSPARK_F16) return f16_to_f32(static_cast<uint16_t>(bits));
  return float_from_bits(dtype == DSPARK_BF16 ? bits << 16 : bits);
}

/// Four elements of each of the segments from s on, on their way.
struct Batch {
  uint32_t bits[kBatch][4];
};

__device__ __forceinline__ Batch load_batch(const void* row, int32_t dtype, int32_t vocab,
                                            int32_t s, int32_t end) {
  Batch b;
  const bool full = s + kBatch <= end && (s + kBatch) * kSegment <= vocab;
  if (full && dtype == DSPARK_F32) {
    const uint32_t* x = static_cast<const uint32_t*>(row) + id_of(s, 0);
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) b.bits[e / 4][e % 4] = x[32 * e];
  } else if (full) {
    const uint16_t* x = static_cast<const uint16_t*>(row) + id_of(s, 0);
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) b.bits[e / 4][e % 4] = x[32 * e];
  } else {
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) {
      const int32_t id = id_of(s, e);
      const bool in = s + e / 4 < end && id < vocab;
      b.bits[e / 4][e % 4] = load_bits(row, dtype, id, in);
    }
  }
  return b;
}

/// As floats, in place of the bits.
__device__ __forceinline__ void widen_batch(Batch& b, int32_t dtype) {
  if (dtype == DSPARK_F16) {
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) {
      uint32_t& u = b.bits[e / 4][e % 4];
      u = bits_f32(f16_to_f32(static_cast<uint16_t>(u)));
    }
  } else if (dtype == DSPARK_BF16) {
#pragma unroll
    for (int e = 0; e < 4 * kBatch; ++e) b.bits[e / 4][e % 4] <<= 16;
  }
}

/// Penalties of ids id, id + 32, ...
template <int kCount>
__device__ __forceinline__ void penalise_ids(const RowLaw& law, int32_t id, float (&x)[kCount]) {
  const Penalties& p = law.penalties;
  int32_t count[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int32_t said = p.counts != nullptr && id + 32 * e < law.vocab ? p.counts[id + 32 * e] : 0;
    count[e] = said > 0 ? said : 0;
  }
#pragma unroll 1
  for (int32_t j = -1; j < p.num_drafts; ++j) {
    const int32_t away = (j < 0 ? p.anchor : p.drafts[j]) - id;
#pragma unroll
    for (int e = 0; e < kCount; ++e) count[e] += away == 32 * e ? 1 : 0;
  }
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int32_t at = id + 32 * e;
    const bool reads = p.prompt != nullptr && at < law.vocab;
    const bool prompt = reads && (p.prompt[at >> 5] >> (at & 31) & 1u) != 0;
    x[e] = penalise_logit(p, x[e], count[e], prompt);
  }
}

/// Token mask, bias, min-tokens and penalties of ids id, id + 32, ...; what lies outside of the
/// vocabulary stays at -inf. `nan` tells of one that they made.
template <int kCount>
__device__ __forceinline__ void process_ids(const RowLaw& law, int32_t id, float (&x)[kCount],
                                            bool* nan) {
  if (law.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] += id + 32 * e < law.vocab ? law.bias[id + 32 * e] : 0.0f;
  }
  if (law.mask != nullptr) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int32_t at = id + 32 * e;
      const uint32_t word = at < law.vocab ? law.mask[at >> 5] : 0u;
      x[e] = (word >> (at & 31) & 1u) != 0 ? x[e] : kMinusInf;
    }
  }
#pragma unroll 1
  for (int32_t j = 0; j < law.num_stops; ++j) {
    // Unsigned: a stop id may be any int32, and those below zero are nobody's.
    const uint32_t away = static_cast<uint32_t>(law.stops[j]) - static_cast<uint32_t>(id);
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] = away == 32u * e ? kMinusInf : x[e];
  }
  if (penalised(law.penalties)) penalise_ids(law, id, x);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    *nan |= x[e] != x[e];
    x[e] = clean_logit(x[e], largest_finite(DSPARK_F32));
  }
}

/// The processed logit of one id, before the cut.
__device__ __forceinline__ float logit_before_cut(const RowLaw& law, int32_t id) {
  bool nan = false;
  float x[1] = {clean_logit(load_f32(law.logits, law.dtype, id), largest_finite(law.dtype))};
  if (processed(law)) process_ids(law, id, x, &nan);
  return x[0];
}

/// Four logits of a segment: unprocessed, or as the law has them behind its cut.
__device__ __forceinline__ void segment_logits(const Row& row, int32_t s, bool raw, float (&z)[4]) {
  const RowLaw& law = row.law;
  const bool own = row.kept != nullptr && s >= row.first && s < row.end;
  const int32_t first = id_of(s, 0);
  if (own && row.keep == Keep::kFloat && !raw) {
    const float* kept = static_cast<const float*>(row.kept) + (first - row.first * kSegment);
#pragma unroll
    for (int q = 0; q < 4; ++q) z[q] = kept[32 * q];
  } else {
    const bool here = own && row.keep == Keep::kRaw;
    const void* from = here ? row.kept : law.logits;
    const int32_t offset = here ? row.first * kSegment : 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int32_t id = first + 32 * q;
      const uint32_t bits = load_bits(from, law.dtype, id - offset, id < law.vocab);
      z[q] = clean_logit(widen(bits, law.dtype), largest_finite(law.dtype));
    }
    bool nan = false;
    if (!raw && processed(law)) process_ids(law, first, z, &nan);
  }
  if (raw || !row.cuts) return;
#pragma unroll
  for (int q = 0; q < 4; ++q) z[q] = inside(row.cut, z[q], first + 32 * q) ? z[q] : kMinusInf;
}

/// The largest of 128, to all lanes; of the zeros, +0.
__device__ __forceinline__ float segment_max(const float (&z)[4]) {
  const float a = max_f32(z[0], z[1]), b = max_f32(z[2], z[3]);
  return from_ordered_f32(__reduce_max_sync(~0u, ordered_f32(max_f32(a, b))));
}

/// The halving sum of 128 weights, to all lanes.
__device__ __forceinline__ float segment_sum(const float (&w)[4]) {
  float sum = (w[0] + w[2]) + (w[1] + w[3]);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

/// exp((z - m) / T) of four ids; all 0 in a segment without support.
__device__ __forceinline__ void segment_weights(const float (&z)[4], float m, float scale,
                                                float (&w)[4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q) w[q] = m == kMinusInf ? 0.0f : weight_of(z[q], m, scale);
}

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_ROW_CUH_
