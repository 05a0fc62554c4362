// SPDX-License-Identifier: Apache-2.0
//
// The M largest base logits of every slot, exactly: logit descending, column ascending, NaN as
// -inf.
//
// scan: a CTA owns a slice of one row of U and reads it once, 2,048 columns at a time, eight
// neighbours a thread. A column is a candidate when its key is above the M-th largest key seen in
// batches before; those had lower columns, so a tie with it has lost already. Candidates gather in
// shared memory; when there could be too many, the M largest of them stay and the threshold rises.
// On random logits a slice of n columns keeps about M ln(n / 2048) candidates beyond its first
// batch, and hardly any warp has one: the pass is a load, eight conversions and compares, one vote.
//
// settle: a CTA a row takes the M largest of its slices' candidates, orders them by column, adds
// the noise of their segments, lists them for the caller, and asks for their rows of W2 and W1 in
// L2: the walk reads nothing else.
//
// Selection (keep_largest) is a search on the bits of the packed pair key << 32 | ~column, all
// distinct: two bits a turn, counted over the CTA, bits on which all candidates agree left out. No
// histogram: logits share their high bits, and a hot bin serialises.
//
// Traffic: U once, R gamma V_d elements, from HBM; 68 MB and 15.8 us at R = 32, gamma = 7, V =
// 151,936 in bf16 (model of one H200, 4.3 TB/s). Candidates: 16 KB a row at most. Predicted: 4 us
// at R = 1 (one load of HBM and two selections of 1 us each), 18 us at R = 32; settle 2 us.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_SELECT_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_SELECT_CUH_

#include <type_traits>

#include "core/dtype.h"
#include "core/philox.h"
#include "core/sampler.h"
#include "cuda/markov_loop/topk_args.h"
#include "cuda/prim/dependency.h"
#include "cuda/prim/memory.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda::topk {

constexpr uint32_t kMinusInfKey = 0x007fffffu;  // ordered_f32(-inf), the smallest there is
constexpr int kHeld = kRoom / kThreads;         // candidates a thread has in registers
constexpr int kCountBits = 10;                  // a warp counts at most 32 * kHeld candidates

static_assert(kRoom % kThreads == 0 && 32 * kHeld < 1 << kCountBits, "three counts in one word");

struct SelectShared {
  uint64_t candidates[kRoom];
  uint32_t columns[DSPARK_MAX_SUPPORT];
  uint32_t partial[2][kWarps];  // two turns of a count
  uint32_t varying[4][kWarps];  // AND and OR of the candidates, low and high words
  uint32_t count;               // of candidates
  uint32_t nan;
};

__device__ __forceinline__ int32_t column_of(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ uint64_t candidate_of(uint32_t key, int32_t column) {
  return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(column);
}

/// Request of slot `row`, or -1 when it takes no part.
__device__ __forceinline__ int32_t request_of(const Params& p, int32_t row) {
  const int32_t r = row / p.gamma;
  return p.active == nullptr || p.active[r] != 0 ? r : -1;
}

// AND and OR over the CTA's candidates. Ends with the barrier that completes them.
__device__ __forceinline__ void agree(SelectShared& s, const uint64_t (&x)[kHeld], uint32_t n,
                                      uint64_t* all, uint64_t* any) {
  const uint32_t thread = threadIdx.x;
  uint64_t ones = ~uint64_t{0}, some = 0;
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    const bool held = e * kThreads + thread < n;
    ones &= held ? x[e] : ~uint64_t{0};
    some |= held ? x[e] : 0;
  }
  const uint32_t words[4] = {static_cast<uint32_t>(ones), static_cast<uint32_t>(ones >> 32),
                             static_cast<uint32_t>(some), static_cast<uint32_t>(some >> 32)};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word =
        i < 2 ? __reduce_and_sync(~0u, words[i]) : __reduce_or_sync(~0u, words[i]);
    if (thread % 32 == 0) s.varying[i][thread / 32] = word;
  }
  __syncthreads();
  uint32_t total[4] = {~0u, ~0u, 0, 0};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    total[0] &= s.varying[0][w];
    total[1] &= s.varying[1][w];
    total[2] |= s.varying[2][w];
    total[3] |= s.varying[3][w];
  }
  *all = static_cast<uint64_t>(total[1]) << 32 | total[0];
  *any = static_cast<uint64_t>(total[3]) << 32 | total[2];
}

// How many candidates reach each of three values; one barrier. `turn` alternates between calls.
__device__ __forceinline__ void count_three(SelectShared& s, const uint64_t (&x)[kHeld], uint32_t n,
                                            int turn, const uint64_t (&value)[3],
                                            uint32_t (&count)[3]) {
  uint32_t mine = 0;
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    if (static_cast<uint32_t>(e) * kThreads >= n) break;  // absent ones are 0 and reach nothing
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const uint32_t reaches = x[e] >= value[i] ? 1 : 0;
      mine += reaches << (i * kCountBits);
    }
  }
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) s.partial[turn][threadIdx.x / 32] = mine;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i) count[i] = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t word = s.partial[turn][w];
#pragma unroll
    for (int i = 0; i < 3; ++i) count[i] += word >> (i * kCountBits) & ((1u << kCountBits) - 1);
  }
}

// The largest value that at least `wanted` < n candidates reach, or any value that exactly `wanted`
// reach.
__device__ __forceinline__ uint64_t find_threshold(SelectShared& s, const uint64_t (&x)[kHeld],
                                                   uint32_t n, uint32_t wanted) {
  uint64_t prefix, any;
  agree(s, x, n, &prefix, &any);  // bits on which all agree are the threshold's bits
  uint64_t left = prefix ^ any;
  for (int turn = 0; left != 0; turn ^= 1) {
    const uint64_t high = uint64_t{1} << (63 - __clzll(static_cast<long long>(left)));
    left ^= high;
    const uint64_t low =
        left == 0 ? 0 : uint64_t{1} << (63 - __clzll(static_cast<long long>(left)));
    left ^= low;
    const uint64_t value[3] = {prefix | high | low, prefix | high, prefix | low};
    uint32_t count[3];
    count_three(s, x, n, turn, value, count);
    uint32_t reached = 0;
#pragma unroll
    for (int i = 2; i >= 0; --i) {  // the largest value that enough candidates reach
      if (count[i] >= wanted) {
        prefix = value[i];
        reached = count[i];
      }
    }
    if (reached == wanted) break;
  }
  return prefix;
}

/// Keep the `wanted` largest candidates, in no order. Whole CTA; begins and ends with a barrier.
/// Returns the key that a later column has to beat: 0 while there are fewer than `wanted`.
__device__ __forceinline__ uint32_t keep_largest(SelectShared& s, uint32_t wanted) {
  __syncthreads();
  const uint32_t n = s.count;
  if (n < wanted) {
    __syncthreads();  // nobody adds a candidate before everybody has read the count
    return 0;
  }
  uint64_t x[kHeld];
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    const uint32_t i = e * kThreads + threadIdx.x;
    x[e] = i < n ? s.candidates[i] : 0;
  }
  // With exactly `wanted` the smallest is not worth a search: its AND is a bound from below.
  uint64_t threshold, any;
  if (n == wanted) {
    agree(s, x, n, &threshold, &any);
  } else {
    threshold = find_threshold(s, x, n, wanted);
  }
  // Everybody has read the candidates: both searches have a barrier behind that.
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    if (x[e] != 0 && x[e] >= threshold) s.candidates[atomicAdd(&s.count, 1u)] = x[e];
  }
  __syncthreads();
  return static_cast<uint32_t>(threshold >> 32);
}

// Eight neighbouring elements of a row of U, on their way.
template <class T>
struct Chunk {
  T x[8];
};

template <class T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int32_t column, int32_t begin,
                                               int32_t end) {
  constexpr int kWords = static_cast<int>(sizeof(T)) / 2;  // of 16 bytes
  Chunk<T> chunk;
  if (column >= begin && column + 8 <= end) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 word = prim::ld_stream(reinterpret_cast<const uint4*>(row + column) + w);
      __builtin_memcpy(chunk.x + 8 / kWords * w, &word, sizeof word);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const bool inside = column + e >= begin && column + e < end;
      chunk.x[e] = inside ? row[column + e] : T{0};
    }
  }
  return chunk;
}

template <int kDtype>
__device__ __forceinline__ float widen(uint16_t x) {
  return kDtype == DSPARK_BF16 ? bf16_to_f32(x) : f16_to_f32(x);
}
template <int kDtype>
__device__ __forceinline__ float widen(float x) {
  return x;
}

// Candidates of one chunk: columns of the slice above the threshold.
template <int kDtype, class T>
__device__ __forceinline__ void offer_chunk(SelectShared& s, const Chunk<T>& chunk, int32_t column,
                                            int32_t begin, int32_t end, uint32_t threshold,
                                            uint32_t* nan) {
  uint32_t key[8];
  uint32_t hits = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float u = widen<kDtype>(chunk.x[e]);
    const bool inside = column + e >= begin && column + e < end;
    *nan |= inside && u != u ? 1u : 0u;
    key[e] = u != u ? kMinusInfKey : ordered_f32(u);
    hits |= (inside && key[e] > threshold ? 1u : 0u) << e;
  }
  if (hits == 0) return;
  uint32_t at = atomicAdd(&s.count, static_cast<uint32_t>(__popc(hits)));
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if ((hits >> e & 1u) != 0) s.candidates[at++] = candidate_of(key[e], column + e);
  }
}

template <int kDtype, class T>
__device__ __forceinline__ void scan_slice(const Args& args, SelectShared& s, const T* row,
                                           int32_t begin, int32_t end) {
  const uint32_t wanted = static_cast<uint32_t>(args.p.topk_support);
  // Chunks begin at multiples of 16 bytes: columns are shifted by what the row is off.
  const int32_t off =
      static_cast<int32_t>(reinterpret_cast<uintptr_t>(row + begin) / sizeof(T) % (16 / sizeof(T)));
  int32_t column = begin - off + 8 * static_cast<int32_t>(threadIdx.x);
  uint32_t threshold = 0, nan = 0;
  // 32 bytes a thread under way: 24 KB on a multiprocessor with three CTAs keep HBM busy.
  constexpr bool kTwo = sizeof(T) == 2;
  Chunk<T> next = load_chunk(row, column, begin, end);
  Chunk<T> after;
  if constexpr (kTwo) after = load_chunk(row, column + kBatch, begin, end);
  for (int32_t first = begin - off; first < end; first += kBatch, column += kBatch) {
    const Chunk<T> chunk = next;
    if constexpr (kTwo) {
      next = after;
      after = load_chunk(row, column + 2 * kBatch, begin, end);
    } else {
      next = load_chunk(row, column + kBatch, begin, end);
    }
    offer_chunk<kDtype>(s, chunk, column, begin, end, threshold, &nan);
    __syncthreads();
    const uint32_t count = s.count;
    const bool full = count > kRoom - kBatch || (threshold == 0 && count >= wanted);
    if (full || first + kBatch >= end) {
      threshold = keep_largest(s, wanted);
    } else {
      __syncthreads();  // the count has been read before a candidate is added
    }
  }
  if (nan != 0) atomicOr(&s.nan, 1u);
  __syncthreads();
}

// z of a slot outside its support, when the caller stores logits: the walk writes the members.
__device__ __forceinline__ void fill_logits(const Params& p, int32_t r, int32_t slot, int32_t begin,
                                            int32_t end) {
  const int64_t at = r * p.logits_request_stride + slot * p.logits_slot_stride;
  for (int32_t c = begin + static_cast<int32_t>(threadIdx.x); c < end; c += kThreads) {
    store_f32(p.logits, p.base_dtype, at + c, -__builtin_inff());
  }
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads, 3) scan_kernel(const __grid_constant__ Args args) {
  __shared__ SelectShared s;
  const Params& p = args.p;
  const int32_t row = static_cast<int32_t>(blockIdx.x) / args.plan.slices;
  const int32_t slice = static_cast<int32_t>(blockIdx.x) % args.plan.slices;
  const int32_t r = request_of(p, row);
  if (r < 0) return;
  if (threadIdx.x == 0) s.count = s.nan = 0;
  __syncthreads();
  const int32_t begin = slice * args.plan.columns;
  const int32_t last = begin + args.plan.columns;
  const int32_t end = last < p.draft_vocab_size ? last : p.draft_vocab_size;
  const int32_t slot = row % p.gamma;
  using Element = typename std::conditional<kDtype == DSPARK_F32, float, uint16_t>::type;
  const Element* u = static_cast<const Element*>(p.base_logits);
  scan_slice<kDtype>(args, s, u + r * p.base_request_stride + slot * p.base_slot_stride, begin,
                     end);
  uint64_t* out = args.work.candidates + static_cast<int64_t>(blockIdx.x) * p.topk_support;
  for (int32_t i = threadIdx.x; i < p.topk_support; i += kThreads) {
    out[i] = static_cast<uint32_t>(i) < s.count ? s.candidates[i] : 0;
  }
  if (threadIdx.x == 0) args.work.nan[blockIdx.x] = s.nan;
  if (p.logits != nullptr) fill_logits(p, r, slot, begin, end);
}

// Ask for a member's rows of W2 and W1 in L2.
__device__ __forceinline__ void prefetch_rows(const Params& p, int32_t column, int32_t token) {
  const char* w2 = static_cast<const char*>(advance(p.w2, p.w2_dtype, column * p.w2_stride));
  for (int64_t b = 0; b < p.rank * dtype_bytes(p.w2_dtype); b += 128) prim::prefetch_l2(w2 + b);
  if (token < 0 || token >= p.vocab_size) return;
  const char* w1 = static_cast<const char*>(advance(p.w1, p.w1_dtype, token * p.w1_stride));
  for (int64_t b = 0; b < p.rank * dtype_bytes(p.w1_dtype); b += 128) prim::prefetch_l2(w1 + b);
}

// The kept candidate `i` takes its place among the members.
__device__ __forceinline__ void settle_member(const Args& args, const SelectShared& s, int32_t row,
                                              int32_t r, int32_t i, bool noisy) {
  const Params& p = args.p;
  const int32_t members = args.plan.members;
  const uint32_t column = s.columns[i];
  int32_t place = 0;
#pragma unroll 8
  for (int32_t j = 0; j < members; ++j) place += s.columns[j] < column ? 1 : 0;
  const uint32_t key = static_cast<uint32_t>(s.candidates[i] >> 32);
  Member member;
  member.column = static_cast<int32_t>(column);
  member.u = float_from_bits(key >> 31 ? key & 0x7fffffffu : ~key);  // ordered_f32 backwards
  member.gumbel = 0.0;
  if (noisy) {
    const uint32_t distance = static_cast<uint32_t>(row % p.gamma) + 1;
    const DrawStream stream{p.seed[r], p.position[r] + distance, distance, kDraftSegment};
    member.gumbel = segment_gumbel(stream, column / kSegment);
  }
  args.work.members[static_cast<int64_t>(row) * members + place] = member;
  const int32_t token =
      p.draft_to_target == nullptr ? member.column : p.draft_to_target[member.column];
  if (p.support_ids != nullptr) {
    p.support_ids[static_cast<int64_t>(row) * p.topk_support + place] = token;
  }
  prefetch_rows(p, member.column, token);
}

__global__ void __launch_bounds__(kThreads) settle_kernel(const __grid_constant__ Args args) {
  __shared__ SelectShared s;
  const Params& p = args.p;
  const int32_t row = static_cast<int32_t>(blockIdx.x);
  const int32_t r = request_of(p, row);
  prim::grid_dependency_wait();
  if (r < 0) return;
  if (threadIdx.x == 0) s.count = s.nan = 0;
  __syncthreads();
  const int32_t total = args.plan.slices * p.topk_support;
  const uint64_t* candidates = args.work.candidates + static_cast<int64_t>(row) * total;
  for (int32_t i = threadIdx.x; i < total; i += kThreads) {
    const uint64_t candidate = candidates[i];
    if (candidate != 0) s.candidates[atomicAdd(&s.count, 1u)] = candidate;
  }
  if (args.plan.slices > 1) {
    keep_largest(s, static_cast<uint32_t>(p.topk_support));
  } else {
    __syncthreads();
  }
  const int32_t members = args.plan.members;
  for (int32_t i = threadIdx.x; i < members; i += kThreads) {
    s.columns[i] = static_cast<uint32_t>(column_of(s.candidates[i]));
  }
  __syncthreads();
  const float t = p.temperature == nullptr ? 0.0f : p.temperature[r];
  const bool noisy = t != 0.0f && p.debug_uniform == nullptr;
  for (int32_t i = threadIdx.x; i < members; i += kThreads) {
    settle_member(args, s, row, r, i, noisy);
  }
  if (p.support_ids == nullptr) return;
  for (int32_t i = members + static_cast<int32_t>(threadIdx.x); i < p.topk_support; i += kThreads) {
    p.support_ids[static_cast<int64_t>(row) * p.topk_support + i] = -1;
  }
}

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_SELECT_CUH_
