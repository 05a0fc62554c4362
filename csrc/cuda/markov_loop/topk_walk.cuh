// SPDX-License-Identifier: Apache-2.0
//
// The gamma steps of one request over its supports, in one CTA. What a step may need is known
// before the loop (topk_select.cuh asked for it in L2), so a step is a chain of latencies:
//
//   e = W1[x_{k-1}]            from L2                                       0.2 us
//   head                       gated, rnn: rows of its matrix from L2        (below)
//   dots                       members times r-vector, four lanes a row      0.3 us
//   z, weights                 a thread a member                             0.1 us
//   log-masses, keys           a thread a segment that has a member          0.2 us
//   best key, token            two reductions, inverse CDF by the owner      0.2 us
//
// 1 us a step at M = 64, r = 256 (model at 1.755 GHz, not measured): 7 us for gamma = 7, whatever R
// <= 132 is. With scan and settle, about 14 us at R <= 8 and 28 us at R = 32, where reading U is 16
// of them. The gated head adds r^2 floats a step, 262 KB and 2.3 us at r = 256; the rnn head six
// times that: one CTA a request is not made for it, the full law's kernel shares it over the GPU.
//
// The sampler is that of a full row whose other logits are -inf. A segment mostly has one or two
// members; the sum of its weights is then one addition at most. Three and more are added by a warp
// on 128 places in the sampler's tree. So are all bits those of the CPU backend, lse included.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_WALK_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_WALK_CUH_

#include "core/sampler.h"
#include "cuda/markov_loop/topk_dots.cuh"
#include "cuda/markov_loop/topk_head.cuh"
#include "cuda/prim/async.h"

namespace dspark::cuda::topk {

constexpr float kMinTemperature = 1e-3f;
constexpr float kMinusInf = -__builtin_inff();

/// Words of a CTA, in shared memory.
struct WalkWords {
  uint64_t best[kWarps];       // best key of a warp
  uint32_t magnitude[kWarps];  // largest of a warp (int8)
  uint64_t u53;                // inner draw of the step
  int32_t previous;            // x_{k-1}
  uint32_t crowded;            // segments with three members or more
  uint32_t status;
  float confidence;
};

struct WalkShared {
  Member* members;   // [2, members] of this step and of the next
  float* z;          // [members]
  float* weight;     // [members]
  float* sum;        // [members] of a crowded segment, at its first member
  int32_t* crowded;  // [members] first members of crowded segments
  float* places;     // [kWarps, kSegment] weights of a crowded segment
  int32_t* q;        // [r] the vector as integers (int8)
  Vectors vectors;
  WalkWords* words;
};

/// Lay the arrays out, each on 16 bytes; returns the bytes.
DSPARK_HD uint32_t carve_walk(WalkShared& s, unsigned char* memory, int32_t members, int32_t rank,
                              int32_t rows) {
  const uint32_t vector = (static_cast<uint32_t>(rank) + 15) / 16 * 64;
  const uint32_t each = (static_cast<uint32_t>(members) * 4 + 15) / 16 * 16;
  uint32_t at = 0;
  const auto take = [&](uint32_t bytes) {
    unsigned char* place = memory == nullptr ? nullptr : memory + at;
    at += (bytes + 15) / 16 * 16;
    return place;
  };
  s.words = reinterpret_cast<WalkWords*>(take(sizeof(WalkWords)));
  s.members = reinterpret_cast<Member*>(take(2 * static_cast<uint32_t>(members) * sizeof(Member)));
  s.z = reinterpret_cast<float*>(take(each));
  s.weight = reinterpret_cast<float*>(take(each));
  s.sum = reinterpret_cast<float*>(take(each));
  s.crowded = reinterpret_cast<int32_t*>(take(each));
  s.places = reinterpret_cast<float*>(take(kWarps * kSegment * 4));
  s.q = reinterpret_cast<int32_t*>(take(vector));
  s.vectors.inner = reinterpret_cast<float*>(take(vector));
  s.vectors.joint = reinterpret_cast<float*>(take(static_cast<uint32_t>(rank) * 8));
  s.vectors.raw = reinterpret_cast<float*>(take(static_cast<uint32_t>(rows) * 4));
  return at;
}

/// One request at one step.
struct Step {
  int32_t request;
  int32_t k;          // from 0
  int32_t row;        // request * gamma + k
  float temperature;  // 1 on greedy rows: the lse's
  bool greedy;
  float quantum;  // s of the vector (int8)
  const Member* members;
};

// Bring a slot's members into shared memory.
__device__ __forceinline__ void fetch_members(const Args& args, const WalkShared& s,
                                              int32_t request, int32_t k) {
  const int32_t count = args.plan.members;
  const int64_t row = int64_t{request} * args.p.gamma + k;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    prim::cp_async_16(s.members + k % 2 * count + i, args.work.members + row * count + i);
  }
  prim::cp_async_commit();
}

// e = W1[x_{k-1}], or zeros; the vanilla head's vector.
__device__ __forceinline__ void embed(const Params& p, const WalkShared& s) {
  const int32_t id = s.words->previous;
  const bool known = id >= 0 && id < p.vocab_size;
  const bool vanilla = p.head == DSPARK_HEAD_VANILLA;
  for (int32_t i = threadIdx.x; i < p.rank; i += kThreads) {
    const float e = known ? load_f32(p.w1, p.w1_dtype, id * p.w1_stride + i) : 0.0f;
    s.vectors.joint[p.rank + i] = e;
    if (vanilla) s.vectors.inner[i] = e;
  }
  if (threadIdx.x == 0 && !known) s.words->status |= DSPARK_BAD_DRAFT_ID;
}

// The vector as integers; returns s. Whole CTA; ends with a barrier.
__device__ __forceinline__ float quantise(const Params& p, const WalkShared& s) {
  const float* x = s.vectors.inner;
  uint32_t largest = 0;
  for (int32_t i = threadIdx.x; i < p.rank; i += kThreads)
    largest = max(largest, int8_magnitude(x[i]));
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) s.words->magnitude[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) largest = max(largest, s.words->magnitude[w]);
  const float quantum = int8_quantum(largest);
  const float inverse = int8_inverse(quantum);
  for (int32_t i = threadIdx.x; i < p.rank; i += kThreads) s.q[i] = int8_quantise(x[i], inverse);
  __syncthreads();
  return quantum;
}

__device__ __forceinline__ float member_bias(const Params& p, const WalkShared& s, const Step& step,
                                             int32_t column, bool aligned) {
  const int64_t at = column * p.w2_stride;
  const float* x = s.vectors.inner;
  if (p.w2_dtype == DSPARK_I8) {
    const float dot = row_dot(static_cast<const int8_t*>(p.w2) + at, s.q, p.rank, aligned);
    return int8_bias(dot, step.quantum, p.w2_scale[column]);
  }
  if (p.w2_dtype == DSPARK_BF16) {
    return row_dot(static_cast<const Bf16*>(p.w2) + at, x, p.rank, aligned);
  }
  if (p.w2_dtype == DSPARK_F16) {
    return row_dot(static_cast<const Half*>(p.w2) + at, x, p.rank, aligned);
  }
  return row_dot(static_cast<const float*>(p.w2) + at, x, p.rank, aligned);
}

// z of all members. Whole CTA; ends with a barrier.
__device__ __forceinline__ void form(const Args& args, const WalkShared& s, const Step& step) {
  const Params& p = args.p;
  const int32_t count = args.plan.members;
  const bool aligned = rows_aligned(p);
  const float largest = largest_finite(p.base_dtype);
  for (int32_t first = 0; first < count; first += kRowsAtOnce) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x) / kRowLanes;
    const Member member = step.members[i < count ? i : count - 1];
    const float bias = member_bias(p, s, step, member.column, aligned);
    if (i >= count || threadIdx.x % kRowLanes != 0) continue;
    float z = member.u + bias;
    if (z != z) atomicOr(&s.words->status, static_cast<uint32_t>(DSPARK_NAN_DRAFT));
    z = z != z ? kMinusInf : round_to_dtype(z, p.base_dtype);
    s.z[i] = z > largest ? largest : z;
  }
  __syncthreads();
}

/// The members of one segment: [first, last), and their largest logit.
struct Span {
  int32_t first, last;
  float largest;
};

__device__ __forceinline__ Span span_of(const WalkShared& s, const Step& step, int32_t count,
                                        int32_t i) {
  const int32_t segment = step.members[i].column / kSegment;
  Span span{i, i + 1, s.z[i]};
  while (span.first > 0 && step.members[span.first - 1].column / kSegment == segment) {
    --span.first;
    span.largest = max(span.largest, s.z[span.first]);
  }
  while (span.last < count && step.members[span.last].column / kSegment == segment) {
    span.largest = max(span.largest, s.z[span.last]);
    ++span.last;
  }
  span.largest += 0.0f;  // +0 and -0 are equal logits: keep one of them
  return span;
}

// Weights of the members; sums of crowded segments. Whole CTA; ends with a barrier.
__device__ __forceinline__ void weigh(const WalkShared& s, const Step& step, int32_t count) {
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    const Span span = span_of(s, step, count, i);
    const bool empty = span.largest == kMinusInf;
    s.weight[i] = empty ? 0.0f : exp_f32((s.z[i] - span.largest) / step.temperature);
    if (span.first == i && span.last - i > 2 && !empty) {
      s.crowded[atomicAdd(&s.words->crowded, 1u)] = i;
    }
  }
  __syncthreads();
  const uint32_t crowded = s.words->crowded;
  if (crowded == 0) return;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* places = s.places + warp * kSegment;
  for (uint32_t c = warp; c < crowded; c += kWarps) {
    const Span span = span_of(s, step, count, s.crowded[c]);
    for (int j = lane; j < kSegment; j += 32) places[j] = 0.0f;
    __syncwarp();
    for (int32_t i = span.first + lane; i < span.last; i += 32) {
      places[step.members[i].column % kSegment] = s.weight[i];
    }
    __syncwarp();
    float t = (places[lane] + places[lane + 64]) + (places[lane + 32] + places[lane + 96]);
    for (int d = 16; d > 0; d /= 2) t += __shfl_xor_sync(~0u, t, d);  // halving_sum()
    if (lane == 0) s.sum[span.first] = t;  // the places that a lane clears are those that it read
  }
  __syncthreads();
}

// The best key of this thread's members, and which; log-masses for the lse.
__device__ __forceinline__ uint64_t rank_members(const Args& args, const WalkShared& s,
                                                 const Step& step, int32_t* place) {
  const int32_t count = args.plan.members;
  uint64_t best = 0;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    const Member member = step.members[i];
    const Span span = span_of(s, step, count, i);
    double log_mass = static_cast<double>(kMinusInf);
    if (span.first == i && span.largest != kMinusInf) {
      const int32_t size = span.last - i;
      const float sum = size == 1   ? s.weight[i]
                        : size == 2 ? s.weight[i] + s.weight[i + 1]
                                    : s.sum[i];
      log_mass = static_cast<double>(span.largest) / static_cast<double>(step.temperature) +
                 log_f64(static_cast<double>(sum));
    }
    args.work.log_mass[int64_t{step.row} * count + i] = log_mass;
    uint64_t key = 0;
    if (step.greedy) {
      const uint64_t high = static_cast<uint64_t>(ordered_f32(s.z[i])) << 32;
      if (s.z[i] != kMinusInf) key = high | ~static_cast<uint32_t>(member.column);
    } else if (span.first == i && span.largest != kMinusInf) {
      key = pack_key(log_mass + member.gumbel, static_cast<uint32_t>(member.column / kSegment));
    }
    if (key > best) {
      best = key;
      *place = i;
    }
  }
  return best;
}

// The member drawn inside the segment that begins at member `first`.
__device__ __forceinline__ int32_t draw_inside(const WalkShared& s, const Step& step, int32_t count,
                                               int32_t first) {
  const Span span = span_of(s, step, count, first);
  uint64_t total = 0;
  for (int32_t i = first; i < span.last; ++i) total += weight_integer(s.weight[i]);
  const uint64_t target = cdf_target(s.words->u53, total);
  uint64_t sum = weight_integer(s.weight[first]);
  int32_t i = first;
  while (sum <= target) sum += weight_integer(s.weight[++i]);
  return i;
}

// The owner of the best key draws the token and writes it. Whole CTA; ends with a barrier.
__device__ __forceinline__ void choose(const Args& args, const WalkShared& s, const Step& step) {
  const Params& p = args.p;
  int32_t place = 0;
  const uint64_t mine = rank_members(args, s, step, &place);
  uint64_t best = mine;
  for (int d = 16; d > 0; d /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, best, d);
    best = other > best ? other : best;
  }
  if (threadIdx.x % 32 == 0) s.words->best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = s.words->best[w] > best ? s.words->best[w] : best;
  const bool empty = best == 0;
  if (empty ? threadIdx.x == 0 : mine == best) {
    if (!step.greedy && !empty) place = draw_inside(s, step, args.plan.members, place);
    const int32_t column = empty ? 0 : step.members[place].column;
    const int32_t token = p.draft_to_target == nullptr ? column : p.draft_to_target[column];
    if (empty) s.words->status |= DSPARK_EMPTY_SUPPORT;
    s.words->previous = token;
    p.tokens[step.row] = token;
    p.logit[step.row] = empty ? kMinusInf : s.z[place];
    s.words->crowded = 0;
  }
  prim::cp_async_wait<0>();  // the next slot's members
  __syncthreads();
}

// z of the members to the caller, as a list and into the row that the scan has filled.
__device__ __forceinline__ void store_members(const Args& args, const WalkShared& s,
                                              const Step& step) {
  const Params& p = args.p;
  const int32_t count = args.plan.members;
  if (p.support_logits != nullptr) {
    for (int32_t i = threadIdx.x; i < p.topk_support; i += kThreads) {
      const int64_t at = int64_t{step.row} * p.topk_support + i;
      store_f32(p.support_logits, p.base_dtype, at, i < count ? s.z[i] : kMinusInf);
    }
  }
  if (p.logits == nullptr) return;
  const int64_t at = step.request * p.logits_request_stride + step.k * p.logits_slot_stride;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    store_f32(p.logits, p.base_dtype, at + step.members[i].column, s.z[i]);
  }
}

// lse of all slots, a warp a slot: added in ascending order in float64, as the CPU backend does.
__device__ __forceinline__ void write_lse(const Args& args, int32_t request) {
  const Params& p = args.p;
  const int32_t count = args.plan.members, lane = threadIdx.x % 32;
  for (int32_t k = threadIdx.x / 32; k < p.gamma; k += kWarps) {
    const int64_t row = int64_t{request} * p.gamma + k;
    const double* log_mass = args.work.log_mass + row * count;
    double largest = static_cast<double>(kMinusInf);
    for (int32_t i = lane; i < count; i += 32) largest = max(largest, log_mass[i]);
    for (int d = 16; d > 0; d /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
    const bool empty = largest == static_cast<double>(kMinusInf);
    double sum = 0.0;
    for (int32_t first = 0; first < count; first += 32) {
      const int32_t i = first + lane;
      const double term = i < count && !empty ? exp_f64(log_mass[i] - largest) : 0.0;
#pragma unroll
      for (int j = 0; j < 32; ++j) sum += __shfl_sync(~0u, term, j);
    }
    if (lane == 0) p.lse[row] = empty ? kMinusInf : static_cast<float>(largest + log_f64(sum));
  }
}

// The request's arguments; what is out of range counts as greedy. Thread 0 writes.
__device__ __forceinline__ float read_request(const Args& args, const WalkShared& s, int32_t r) {
  const Params& p = args.p;
  const float given = p.temperature == nullptr ? 0.0f : p.temperature[r];
  const bool bad = given != 0.0f && !(given >= kMinTemperature && given < __builtin_inff());
  if (threadIdx.x == 0) {
    s.words->status = bad ? static_cast<uint32_t>(DSPARK_BAD_PARAM) : 0u;
    s.words->previous = p.anchor[r];
    s.words->crowded = 0;
  }
  // State 0 of the rnn head, and the padding that the dots read.
  for (int32_t i = threadIdx.x; i < p.rank; i += kThreads) s.vectors.joint[i] = 0.0f;
  for (int32_t i = p.rank + static_cast<int32_t>(threadIdx.x); i < (p.rank + 15) / 16 * 16;
       i += kThreads) {
    s.vectors.inner[i] = 0.0f;
    s.q[i] = 0;
  }
  return bad ? 0.0f : given;
}

// The inner draw and the slot's NaN flag; the confidence logit. Between two barriers of the step.
__device__ __forceinline__ void beside(const Args& args, const WalkShared& s, const Step& step) {
  const Params& p = args.p;
  if (threadIdx.x == 0) {
    if (p.debug_uniform != nullptr) {
      s.words->u53 = p.debug_uniform[step.row];
    } else if (!step.greedy) {
      const uint32_t distance = static_cast<uint32_t>(step.k) + 1;
      const int64_t position = p.position[step.request] + distance;
      s.words->u53 = draw_u53(DrawStream{p.seed[step.request], position, distance, kDraftInner});
    }
  }
  for (int32_t i = threadIdx.x; i < args.plan.slices; i += kThreads) {
    if (args.work.nan[int64_t{step.row} * args.plan.slices + i] != 0) {
      atomicOr(&s.words->status, static_cast<uint32_t>(DSPARK_NAN_DRAFT));
    }
  }
  if (p.confidence_weight != nullptr && threadIdx.x / 32 == kWarps - 1) {
    confidence_logit(args, s.vectors, step.row, p.confidence_logit + step.row);
  }
}

__global__ void __launch_bounds__(kThreads, 1) walk_kernel(const __grid_constant__ Args args) {
  DSPARK_DYNAMIC_SHARED(memory);
  const Params& p = args.p;
  const int32_t r = static_cast<int32_t>(blockIdx.x);
  prim::grid_dependency_wait();
  if (p.active != nullptr && p.active[r] == 0) return;
  WalkShared s;
  const int32_t rows = args.plan.units - (p.confidence_weight != nullptr ? 1 : 0);
  carve_walk(s, memory, args.plan.members, p.rank, rows);
  fetch_members(args, s, r, 0);
  const float t = read_request(args, s, r);
  prim::cp_async_wait<0>();
  __syncthreads();
  Step step{};
  step.request = r;
  step.greedy = t == 0.0f;
  step.temperature = step.greedy ? 1.0f : t;
  for (step.k = 0; step.k < p.gamma; ++step.k) {
    step.row = r * p.gamma + step.k;
    step.members = s.members + step.k % 2 * args.plan.members;
    if (step.k + 1 < p.gamma) fetch_members(args, s, r, step.k + 1);
    embed(p, s);
    __syncthreads();
    if (p.head != DSPARK_HEAD_VANILLA) inner_vector(args, s.vectors, rows, step.row);
    if (p.w2_dtype == DSPARK_I8) step.quantum = quantise(p, s);
    beside(args, s, step);
    form(args, s, step);
    store_members(args, s, step);
    weigh(s, step, args.plan.members);
    choose(args, s, step);
  }
  write_lse(args, r);
  if (threadIdx.x == 0) p.status[r] = static_cast<int32_t>(s.words->status);
}

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_WALK_CUH_
