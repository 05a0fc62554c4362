// SPDX-License-Identifier: Apache-2.0
//
// The Markov loop in one launch.
//
//   start   W2 tiles begin to load, then the kernels ahead are waited for; requests are read;
//   hidden
//           part of the head
//   k = 0..gamma-1:
//     tokens   of step k - 1 from the exchange                              (x_{k-1})
//     head     gated, rnn: inner vectors, units dealt out to CTAs, one exchange
//     score    the CTA's segments, pass after pass: dot products of a tile
//              (tile_<source>.cuh), then z, log-mass, key, champion and its candidate token
//              (epilogue.cuh)
//     publish  best key and candidate of every row (exchange.cuh)
//     meanwhile, before waiting: lse of step k - 1, confidence logit of step k, and the base logits
//              of step k + 1 are asked for in L2
//   finish  tokens and lse of the last step
//
// CTA i owns the same vocabulary segments in all steps (static ownership): what of its part of W2
// fits into its shared memory is read once a round, and the rest is the only thing that competes
// for L2, since U is read past it. A segment's 128 ids are the unit of sampling, whatever the grid
// is, so grid, batch and tile shapes are not part of any result.
//
// Memory traffic of a step: W2 without its resident part, from L2 or HBM, once; one row of U a
// request, once; W1 one row a request, from L2, asked for by the CTA that proposes it. Floor (a
// model of one H200, no measurement): V = 151,936, r = 256, bf16: 7 us a step at R = 1, of
// which 1.2 us are the exchange; 61 us for gamma = 7. Predicted, not measured: 1.35 times that for
// R <= 32. Above, the epilogue's arithmetic counts: exp in the common arithmetic of all backends is
// about 35 instructions a logit, 24 us a step at R = 128.
#ifndef DSPARK_CUDA_MARKOV_LOOP_KERNEL_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_KERNEL_CUH_

#include "cuda/markov_loop/epilogue.cuh"
#include "cuda/markov_loop/exchange.cuh"
#include "cuda/markov_loop/heads.cuh"
#include "cuda/markov_loop/steps.cuh"
#include "cuda/markov_loop/tile_source.h"
#include "cuda/prim/dependency.h"

namespace dspark::cuda::markov {

// The pass over this CTA's segments at one step: every row's champion.
template <class Source>
__device__ __forceinline__ void score(const Args& args, const Shared& s, int32_t rows, int32_t step,
                                      Source& source) {
  const Config& c = args.config;
  const int32_t owned = first_segment(c, blockIdx.x + 1) - first_segment(c, blockIdx.x);
  const bool one_group = rows <= c.group;
  Tile t;
  t.step = step;
  t.first_row = 0;
  t.count = one_group ? rows : c.group;
  source.begin_step(step);
  source.load_vectors(t.first_row, t.count);
  bool loaded = true;
  if constexpr (kAhead<Source>) {
    source.vectors_ready();
    __syncthreads();
    source.start_first();
    loaded = false;
  }
  for (t.position = 0; t.position < owned; t.position += c.batch) {
    t.segments = owned - t.position < c.batch ? owned - t.position : c.batch;
    for (t.first_row = 0; t.first_row < rows; t.first_row += c.group) {
      t.count = rows - t.first_row < c.group ? rows - t.first_row : c.group;
      const bool last = t.first_row + c.group >= rows;
      const Pairs pairs = deal(t, rows, source);
      BaseLogits base;
      load_base(args.p, s, t, pairs, base);
      if (loaded) source.vectors_ready();
      __syncthreads();  // vectors are there, the bias buffer is free
      source.dots(t.position, t.segments, t.count, last);
      __syncthreads();  // the bias buffer is complete, the vectors are free
      const bool over = last && t.position + t.segments >= owned;
      loaded = !one_group && !over;
      if (loaded) {
        const int32_t next = last ? 0 : t.first_row + c.group;
        const int32_t left = rows - next;
        source.load_vectors(next, left < c.group ? left : c.group);
      }
      finish_tile(args, s, t, pairs, base, source);
    }
    source.end_pass(t.position, t.segments);
  }
  if constexpr (kAhead<Source>) source.finish_last();
  __syncthreads();  // champions are complete
}

// One step between two exchanges.
template <class Source>
__device__ __forceinline__ void run_step(const Args& args, const Shared& s, int32_t rows,
                                         int32_t step, Source& source, Exchange& exchange) {
  if (step > 0) collect(args, s, rows, step - 1, exchange);
  if (step == args.first_step) prepare_step(args.p, s, rows, step);
  __syncthreads();  // x_{k-1} is there
  if ((args.phases & kHead) != 0 && args.p.head != DSPARK_HEAD_VANILLA) {
    inner_vectors(args, s, rows, step);
    exchange.admit();
    exchange.arrive();
    exchange.wait();
  }
  if ((args.phases & kScore) == 0) return;
  exchange.recycle(step);
  score(args, s, rows, step, source);
  exchange.admit();
  publish(args, s, rows, step, exchange);
  exchange.arrive();
  __syncthreads();  // champions have been read
  if (step + 1 < args.last_step) prepare_step(args.p, s, rows, step + 1);
  if (step > 0) reduce_lse(args, s, rows, step - 1);
  confidence_logits(args.p, s, rows, step);
  if (step + 1 < args.last_step) prefetch_base(args, s, rows, step + 1);
  exchange.wait();
}

template <class Source>
__device__ __forceinline__ void run_launch(const Args& args) {
  DSPARK_DYNAMIC_SHARED(memory);
  const Shared s = carve_shared(memory, args.config, args.p.num_requests);
  const bool start = (args.phases & kStart) != 0;
  Source source(args, s, args.p.num_requests);
  if ((args.phases & kScore) != 0) source.open();
  // W2 does not depend on the kernels ahead in the stream; everything from here on may.
  prim::grid_dependency_wait();
  const int32_t rows = read_requests(args.p, s, start);
  if (rows == 0) {
    if ((args.phases & kScore) != 0) source.close();
    return;
  }
  Exchange exchange(args.work, args.config, args.p.num_requests);
  exchange.open(start);
  if (start && args.p.head != DSPARK_HEAD_VANILLA) hidden_parts(args, s, rows);
  for (int32_t step = args.first_step; step < args.last_step; ++step) {
    run_step(args, s, rows, step, source, exchange);
  }
  if ((args.phases & kFinish) != 0) {
    collect(args, s, rows, args.p.gamma - 1, exchange);
    reduce_lse(args, s, rows, args.p.gamma - 1);
  }
  __syncthreads();
  flush_status(args.p, s, rows);
  if ((args.phases & kScore) != 0) source.close();
}

template <class Source>
__global__ void __launch_bounds__(kThreads, 1)
    markov_loop_kernel(const __grid_constant__ Args args) {
  if constexpr (kCompiled<Source>) run_launch<Source>(args);
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_KERNEL_CUH_
