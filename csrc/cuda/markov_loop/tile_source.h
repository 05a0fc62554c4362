// SPDX-License-Identifier: Apache-2.0
//
// What a tile source is. The kernel (kernel.cuh) owns the steps, the exchange and the sampling; a
// source owns W2: it computes dot products of W2's rows with the r-vectors of a group of requests,
// as fast as the hardware it is written for can.
//
// A CTA owns the segments [first_segment(cta), first_segment(cta + 1)), 128 rows of W2 each, in all
// steps. In a step it visits them in passes of up to config.batch segments; in a pass, group after
// group of up to config.group rows (requests that take part), so that what W2 tile a pass needs is
// loaded once however many rows there are. The kernel calls, all threads of the CTA together:
//
//   Source source(args, shared, rows)
//   source.open()                           once: start loading W2, which depends on no token
//   each step, behind the previous tokens:
//     source.begin_step(step)
//     source.load_vectors(first_row, count) of the first group
//     each pass, each group:
//       source.vectors_ready()              if load_vectors was called since the last time
//       __syncthreads()                     vectors and the free bias buffer, for everybody
//       source.dots(position, segments, count, last)
//       __syncthreads()                     the bias buffer is complete; vectors are free again
//       source.load_vectors(...)            of the next group, when there is more than one
//       (the epilogue reads bias() of every word)
//     source.end_pass(position, segments)   behind the last group's second barrier
//   source.close()                          once, at the end: nothing of it may be in flight
//
// A source is a class with these members; all are __device__:
//
//   Source(const Args&, const Shared&, int32_t rows)
//       shared.source .. + config.source_bytes is its shared memory, 1024-byte aligned, not
//       initialised. `rows`: at most so many requests take part; how many is known behind open().
//   void open()                 args.first_step .. last_step - 1 are the steps of this launch. W2
//   may
//       be read, nothing else: the kernels ahead in the stream may still be at work.
//   void begin_step(int32_t step)
//   int32_t segment(int32_t position) const
//       The segment that this step visits at `position`, 0 .. owned - 1. A source is free to choose
//       the order (resident tiles last, the rest forwards and backwards in turn): no result depends
//       on it.
//   void load_vectors(int32_t first_row, int32_t count)
//       Bring what W2 multiplies into shared memory: element j of row n is vector_element(args,
//       shared, n, j) of vectors.cuh. May be asynchronous.
//   void vectors_ready()        this thread's part of load_vectors is done.
//   void dots(int32_t position, int32_t segments, int32_t count, bool last)
//       For s < segments, i < count, id < 128: word id of pair s * count + i, that is
//       shared.bias[(s * count + i) * kBiasStride + id], becomes W2[128 segment(position + s) + id]
//       times vector i of the group. Rows of W2 from V_d on: any value, and no memory read there.
//       `last`: the pass's last group. The sum's order of additions must not depend on rows, count,
//       segments or position: a request's bits are its own. No barrier of the whole CTA inside is
//       needed, but allowed.
//   void end_pass(int32_t position, int32_t segments)
//   float bias(float word, int32_t i, int32_t column) const
//       What is added to U, from a word that dots() wrote (an int32 may hide in it), for row i of
//       the group and W2 row `column` < V_d. Called by the warp that finishes the pair, when the
//       vectors of the next group may be loading already: what bias() needs of a group must not lie
//       in their place.
//   void close()
//
// and a host function in config.h that fills Config for it. kThreads threads call; a source may
// give warps different roles inside dots(), all warps take part in the epilogue.
#ifndef DSPARK_CUDA_MARKOV_LOOP_TILE_SOURCE_H_
#define DSPARK_CUDA_MARKOV_LOOP_TILE_SOURCE_H_

#include "cuda/markov_loop/args.h"
#include "cuda/markov_loop/shared.cuh"
#include "cuda/markov_loop/vectors.cuh"

namespace dspark::cuda::markov {

/// Whether dots() leaves the next tile's products under way, to run beside the epilogue. Such a
/// source stores the vectors of all rows at the first load_vectors() of a step, and has
///   void start_first()   behind the barrier that completes these vectors: begin the first tile
///   void finish_last()   at the end of a step: nothing is under way any more
template <class Source>
constexpr bool kAhead = false;

/// Whether this compilation's architecture has the instructions of a source; without them the
/// kernel is empty. The host's choice never comes there.
template <class Source>
constexpr bool kCompiled = true;

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_TILE_SOURCE_H_
