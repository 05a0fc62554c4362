// SPDX-License-Identifier: Apache-2.0
//
// The gated and the rnn head, and the confidence logit.
//
// A unit i of a head needs its own rows of the head's matrix and nobody else's result, so units are
// dealt out to the CTAs once: CTA c has units c, c + grid, ... of all rows in all steps. It
// computes their hidden part for all slots before the first step (the largest part of the work: d
// columns) and finds it again by itself; a step costs the r or 2r columns that depend on the token,
// and one more exchange, behind which every CTA reads all inner vectors.
//
// A half-warp has one unit and up to two vectors. Lane l of 16 adds elements l, l + 16, ...: the
// sums, and so the inner vectors, have the bits of the CPU backend.
#ifndef DSPARK_CUDA_MARKOV_LOOP_HEADS_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_HEADS_CUH_

#include "core/heads.h"
#include "cuda/markov_loop/vectors.cuh"

namespace dspark::cuda::markov {

constexpr int kHeadVectors = 2;  // vectors that share one read of a row of the head's matrix
constexpr int kHeadUnroll = 4;   // columns of a lane whose loads are under way at once

/// Where a head's matrix has what; gated [h; e], rnn [s; e; h].
struct HeadLayout {
  int32_t gates;        // rows of a unit: 1 or 3, `rank` rows apart
  int32_t stride;       // columns of a row
  int32_t hidden_from;  // column of h
  int32_t joint_from;   // column of e or [s; e]
  int32_t joint;        // its columns
};

__device__ __forceinline__ HeadLayout head_layout(const Params& p) {
  if (p.head == DSPARK_HEAD_GATED) {
    return {1, p.hidden_size + p.rank, 0, p.hidden_size, p.rank};
  }
  return {3, p.hidden_size + 2 * p.rank, 2 * p.rank, 0, 2 * p.rank};
}

using UnitSums = float[3][kHeadVectors];

// sum[g][v] += row g of a unit times vector v over the columns j, j + 16, ... < end of this lane;
// `element(v, j)` reads the vectors. Returns the lane's next column.
template <class Element>
__device__ __forceinline__ int32_t add_products(const float* row, int64_t gate_stride,
                                                int32_t gates, int32_t j, int32_t end,
                                                const Element& element, UnitSums& sum) {
#pragma unroll 1
  for (; j < end; j += 16 * kHeadUnroll) {
    float w[kHeadUnroll][3], x[kHeadUnroll][kHeadVectors];
#pragma unroll
    for (int u = 0; u < kHeadUnroll; ++u) {
      const int32_t column = j + 16 * u;
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        w[u][g] = g < gates && column < end ? row[g * gate_stride + column] : 0.0f;
      }
#pragma unroll
      for (int v = 0; v < kHeadVectors; ++v) x[u][v] = column < end ? element(v, column) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kHeadUnroll; ++u) {
      if (j + 16 * u >= end) return j + 16 * u;
#pragma unroll
      for (int g = 0; g < 3; ++g) {
#pragma unroll
        for (int v = 0; v < kHeadVectors; ++v) sum[g][v] = fma_f32(w[u][g], x[u][v], sum[g][v]);
      }
    }
  }
  return j;
}

__device__ __forceinline__ void finish_sums(UnitSums& sum) {
#pragma unroll
  for (int g = 0; g < 3; ++g) {
#pragma unroll
    for (int v = 0; v < kHeadVectors; ++v) sum[g][v] = sum_half_warp(sum[g][v]);
  }
}

/// Work of this half-warp: (unit, block of vectors) items of the CTA, one after the other.
/// `body(unit, first, valid)` is called by whole warps; without `valid` its result is not wanted.
template <class Body>
__device__ __forceinline__ void for_units(const Params& p, int32_t num_vectors, const Body& body) {
  const int32_t units =
      (p.rank - static_cast<int32_t>(blockIdx.x) + static_cast<int32_t>(gridDim.x) - 1) /
      static_cast<int32_t>(gridDim.x);
  const int32_t blocks = (num_vectors + kHeadVectors - 1) / kHeadVectors;
  const int32_t items = units > 0 ? units * blocks : 0;
  const int32_t half = threadIdx.x / 16;
  for (int32_t first = half / 2 * 2; first < items; first += kThreads / 16) {
    const int32_t wanted = first + half % 2;
    const int32_t item = wanted < items ? wanted : items - 1;
    const int32_t unit = blockIdx.x + item / blocks * gridDim.x;
    body(unit, item % blocks * kHeadVectors, wanted < items);
  }
}

/// Hidden part of this CTA's units, all slots.
__device__ __forceinline__ void hidden_parts(const Args& args, const Shared& s, int32_t rows) {
  const Params& p = args.p;
  const HeadLayout layout = head_layout(p);
  const int32_t slots = rows * p.gamma;
  const int32_t stride = head_rows(p);
  for_units(p, slots, [&](int32_t unit, int32_t first, bool valid) {
    const float* vectors[kHeadVectors];
#pragma unroll
    for (int v = 0; v < kHeadVectors; ++v) {
      const int32_t slot = first + v < slots ? first + v : slots - 1;
      vectors[v] = p.hidden + s.request[slot / p.gamma] * p.hidden_request_stride +
                   slot % p.gamma * p.hidden_slot_stride;
    }
    UnitSums sum = {};
    add_products(
        p.head_weight + int64_t{unit} * layout.stride + layout.hidden_from,
        int64_t{p.rank} * layout.stride, layout.gates, threadIdx.x % 16, p.hidden_size,
        [&](int v, int32_t j) { return vectors[v][j]; }, sum);
    finish_sums(sum);
    if (!valid || threadIdx.x % 16 != 0) return;
#pragma unroll
    for (int v = 0; v < kHeadVectors; ++v) {
      if (first + v >= slots) break;
#pragma unroll
      for (int g = 0; g < 3; ++g) {
        if (g >= layout.gates) break;
        args.work.hidden_part[int64_t{first + v} * stride + g * p.rank + unit] = sum[g][v];
      }
    }
  });
}

// Element j of the state of a row at the begin of a step; s_0 = 0.
__device__ __forceinline__ float state_element(const Args& args, int32_t step, int32_t row,
                                               int32_t j) {
  if (step == 0) return 0.0f;
  const int64_t set = step % 2 * int64_t{args.p.num_requests};
  return load_shared_f32(args.work.state + (set + row) * args.p.rank + j);
}

// The unit's value of one row from its raw sums.
__device__ __forceinline__ void finish_unit(const Args& args, const Shared& s, int32_t step,
                                            int32_t row, int32_t unit, const float (&raw)[3]) {
  const Params& p = args.p;
  const int64_t slot = int64_t{row} * p.gamma + step;
  const float* part = args.work.hidden_part + slot * head_rows(p) + unit;
  float* inner = args.work.inner + int64_t{row} * p.rank + unit;
  const float first = (raw[0] + part[0]) + p.head_bias[unit];
  if (p.head == DSPARK_HEAD_GATED) {
    *inner = gate_unit(first, embedding(p, s, row, unit));
    return;
  }
  const float candidate = (raw[1] + part[p.rank]) + p.head_bias[p.rank + unit];
  const float output = (raw[2] + part[2 * p.rank]) + p.head_bias[2 * p.rank + unit];
  const int64_t set = (step + 1) % 2 * int64_t{p.num_requests};
  args.work.state[(set + row) * p.rank + unit] =
      next_state(first, candidate, state_element(args, step, row, unit));
  *inner = output_unit(output);
}

// Joint part of a unit's sums for rows first, first + 1: [e] or [s; e]. T: how W1 is stored; a
// binary16 W1 has kHalf.
template <class T, bool kHalf>
__device__ __forceinline__ void joint_sums(const Args& args, const Shared& s, int32_t step,
                                           int32_t unit, const int32_t (&rows)[kHeadVectors],
                                           UnitSums& sum) {
  const Params& p = args.p;
  const HeadLayout layout = head_layout(p);
  const float* weight = p.head_weight + int64_t{unit} * layout.stride + layout.joint_from;
  const int64_t gate_stride = int64_t{p.rank} * layout.stride;
  const T* embeddings[kHeadVectors];
#pragma unroll
  for (int v = 0; v < kHeadVectors; ++v) {
    const int32_t id = s.previous[rows[v]];
    embeddings[v] = known(p, id) ? static_cast<const T*>(p.w1) + id * p.w1_stride : nullptr;
  }
  int32_t j = threadIdx.x % 16;
  int32_t before = 0;
  if (p.head == DSPARK_HEAD_RNN) {
    before = p.rank;
    j = add_products(
        weight, gate_stride, layout.gates, j, p.rank,
        [&](int v, int32_t i) { return state_element(args, step, rows[v], i); }, sum);
  }
  add_products(
      weight, gate_stride, layout.gates, j, layout.joint,
      [&](int v, int32_t i) {
        if (embeddings[v] == nullptr) return 0.0f;
        return load_f32(embeddings[v],
                        sizeof(T) == 4 ? DSPARK_F32
                        : kHalf        ? DSPARK_F16
                                       : DSPARK_BF16,
                        i - before);
      },
      sum);
}

/// Inner vectors of this CTA's units at one step, all rows.
__device__ __forceinline__ void inner_vectors(const Args& args, const Shared& s, int32_t rows,
                                              int32_t step) {
  const Params& p = args.p;
  for_units(p, rows, [&](int32_t unit, int32_t first, bool valid) {
    int32_t row[kHeadVectors];
#pragma unroll
    for (int v = 0; v < kHeadVectors; ++v) row[v] = first + v < rows ? first + v : rows - 1;
    UnitSums sum = {};
    if (p.w1_dtype == DSPARK_F32) joint_sums<float, false>(args, s, step, unit, row, sum);
    if (p.w1_dtype == DSPARK_BF16) joint_sums<uint16_t, false>(args, s, step, unit, row, sum);
    if (p.w1_dtype == DSPARK_F16) joint_sums<uint16_t, true>(args, s, step, unit, row, sum);
    finish_sums(sum);
    const int32_t v = threadIdx.x % 16;  // one lane a row
    if (!valid || v >= kHeadVectors || first + v >= rows) return;
    float raw[3];
#pragma unroll
    for (int g = 0; g < 3; ++g) raw[g] = v == 0 ? sum[g][0] : sum[g][1];
    finish_unit(args, s, step, first + v, unit, raw);
  });
}

/// w . [h_k; e] + b of this CTA's rows, from x_{k-1}, never from x_k. Off the critical path: runs
/// while other CTAs finish the step.
__device__ __forceinline__ void confidence_logits(const Params& p, const Shared& s, int32_t rows,
                                                  int32_t step) {
  if (p.confidence_weight == nullptr) return;
  for (int32_t row = turn(rows, step); row < rows; row += gridDim.x) {
    const int64_t r = s.request[row];
    const float* h = p.hidden + r * p.hidden_request_stride + step * p.hidden_slot_stride;
    float sum = 0.0f;
#pragma unroll 8
    for (int32_t j = threadIdx.x; j < p.hidden_size; j += kThreads) {
      sum = fma_f32(p.confidence_weight[j], h[j], sum);
    }
    if (p.confidence_size > p.hidden_size) {
      const float* w = p.confidence_weight + p.hidden_size;
      for (int32_t j = threadIdx.x; j < p.rank; j += kThreads) {
        sum = fma_f32(w[j], embedding(p, s, row, j), sum);
      }
    }
    const double total = block_sum(static_cast<double>(sum), s.scratch);
    if (threadIdx.x == 0) {
      p.confidence_logit[r * p.gamma + step] = static_cast<float>(total) + p.confidence_bias;
    }
  }
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_HEADS_CUH_
