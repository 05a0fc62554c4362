// SPDX-License-Identifier: Apache-2.0
//
// The heads of the walk over a restricted law. A half-warp has one row of a head's matrix: lane l
// of 16 adds elements l, l + 16, ... and the 16 sums are added by halves, the order of the CPU
// backend, so every inner vector and confidence logit has its bits.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TOPK_HEAD_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_TOPK_HEAD_CUH_

#include "core/heads.h"
#include "cuda/markov_loop/topk_args.h"
#include "cuda/markov_loop/topk_select.cuh"
#include "cuda/prim/platform.h"

namespace dspark::cuda::topk {

/// Slots that share one read of a row of the head's matrix.
constexpr int kHeadSlots = 4;

/// Sum over a half-warp by halves (8, 4, 2, 1).
__device__ __forceinline__ float sum_half_warp(float x) {
  for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

/// Where a head's matrix has what: gated [h; e], rnn [s; e; h].
__device__ __forceinline__ int32_t head_stride(const Params& p) {
  return p.hidden_size + (p.head == DSPARK_HEAD_GATED ? p.rank : 2 * p.rank);
}
__device__ __forceinline__ int32_t hidden_from(const Params& p) {
  return p.head == DSPARK_HEAD_RNN ? 2 * p.rank : 0;
}
__device__ __forceinline__ int32_t joint_from(const Params& p) {
  return p.head == DSPARK_HEAD_GATED ? p.hidden_size : 0;
}

// Row `unit` of what multiplies h_k: of the head, and behind its rows the confidence weights.
__device__ __forceinline__ const float* hidden_row(const Args& args, int32_t unit) {
  const Params& p = args.p;
  if (unit == args.plan.units - 1 && p.confidence_weight != nullptr) return p.confidence_weight;
  return p.head_weight + int64_t{unit} * head_stride(p) + hidden_from(p);
}

/// hidden_part of all slots: an item is one row and four slots; a half-warp has one at a time.
__global__ void __launch_bounds__(kThreads) head_kernel(const __grid_constant__ Args args) {
  const Params& p = args.p;
  const int32_t blocks = (args.plan.rows + kHeadSlots - 1) / kHeadSlots;
  const int64_t items = int64_t{args.plan.units} * blocks;
  const int32_t halves = kThreads / 16;
  const int64_t item = int64_t{blockIdx.x} * halves + threadIdx.x / 16;
  const int64_t held = item < items ? item : items - 1;  // both halves of a warp stay together
  const int32_t unit = static_cast<int32_t>(held / blocks);
  const int32_t first = static_cast<int32_t>(held % blocks) * kHeadSlots;
  const float* row = hidden_row(args, unit);
  const float* h[kHeadSlots];
  bool wanted[kHeadSlots];
#pragma unroll
  for (int v = 0; v < kHeadSlots; ++v) {
    const int32_t slot = first + v;
    const int32_t r = slot < args.plan.rows ? request_of(p, slot) : -1;
    wanted[v] = item < items && r >= 0;
    h[v] = p.hidden +
           (wanted[v] ? r * p.hidden_request_stride + slot % p.gamma * p.hidden_slot_stride : 0);
  }
  float sum[kHeadSlots] = {};
#pragma unroll 4
  for (int32_t j = threadIdx.x % 16; j < p.hidden_size; j += 16) {
    const float w = row[j];
#pragma unroll
    for (int v = 0; v < kHeadSlots; ++v) {
      if (wanted[v]) sum[v] = fma_f32(w, h[v][j], sum[v]);
    }
  }
#pragma unroll
  for (int v = 0; v < kHeadSlots; ++v) {
    const float total = sum_half_warp(sum[v]);
    if (threadIdx.x % 16 == 0 && wanted[v]) {
      args.work.hidden_part[int64_t{first + v} * args.plan.units + unit] = total;
    }
  }
}

/// What a request's CTA keeps of its vectors, in shared memory.
struct Vectors {
  float* joint;  // [2r] state s of the rnn head, then e = W1[x_{k-1}]
  float* raw;    // [head rows] linear layer of a step
  float* inner;  // [r] what W2 multiplies
};

// raw = weight . joint for the rows of a head. Whole CTA, no barrier.
__device__ __forceinline__ void joint_part(const Params& p, const Vectors& v, int32_t rows) {
  const bool gated = p.head == DSPARK_HEAD_GATED;
  const float* joint = gated ? v.joint + p.rank : v.joint;
  const int32_t length = gated ? p.rank : 2 * p.rank;
  const int32_t stride = head_stride(p);
  for (int32_t first = threadIdx.x / 32 * 2; first < rows; first += 2 * kWarps) {
    const int32_t unit = first + static_cast<int32_t>(threadIdx.x) / 16 % 2;
    const float* row =
        p.head_weight + int64_t{unit < rows ? unit : rows - 1} * stride + joint_from(p);
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t j = threadIdx.x % 16; j < length; j += 16) sum = fma_f32(row[j], joint[j], sum);
    sum = sum_half_warp(sum);
    if (threadIdx.x % 16 == 0 && unit < rows) v.raw[unit] = sum;
  }
}

/// inner of a step, and the rnn head's next state. Whole CTA; ends with a barrier.
__device__ __forceinline__ void inner_vector(const Args& args, const Vectors& v, int32_t rows,
                                             int32_t slot) {
  const Params& p = args.p;
  float* e = v.joint + p.rank;
  joint_part(p, v, rows);
  __syncthreads();
  const float* part = args.work.hidden_part + int64_t{slot} * args.plan.units;
  for (int32_t i = threadIdx.x; i < p.rank; i += kThreads) {
    const float first = (v.raw[i] + part[i]) + p.head_bias[i];
    if (p.head == DSPARK_HEAD_GATED) {
      v.inner[i] = gate_unit(first, e[i]);
      continue;
    }
    const int32_t c = p.rank + i, o = 2 * p.rank + i;
    const float candidate = (v.raw[c] + part[c]) + p.head_bias[c];
    const float output = (v.raw[o] + part[o]) + p.head_bias[o];
    v.joint[i] = next_state(first, candidate, v.joint[i]);
    v.inner[i] = output_unit(output);
  }
  __syncthreads();
}

/// w . [h_k; e] + b of a slot, by the CTA's last warp: never a function of x_k.
__device__ __forceinline__ void confidence_logit(const Args& args, const Vectors& v, int32_t slot,
                                                 float* out) {
  const Params& p = args.p;
  const float* e = v.joint + p.rank;
  float sum = args.work.hidden_part[int64_t{slot} * args.plan.units + args.plan.units - 1];
  if (p.confidence_size > p.hidden_size) {
    float raw = 0.0f;
    for (int32_t j = threadIdx.x % 16; j < p.rank; j += 16) {
      raw = fma_f32(p.confidence_weight[p.hidden_size + j], e[j], raw);
    }
    sum = sum + sum_half_warp(raw);
  }
  if (threadIdx.x % 32 == 0) *out = sum + p.confidence_bias;
}

}  // namespace dspark::cuda::topk

#endif  // DSPARK_CUDA_MARKOV_LOOP_TOPK_HEAD_CUH_
