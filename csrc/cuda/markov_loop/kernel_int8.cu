// SPDX-License-Identifier: Apache-2.0
#include "cuda/markov_loop/kernel.cuh"
#include "cuda/markov_loop/kernel_int8.h"
#include "cuda/markov_loop/tile_imma.cuh"
#include "cuda/markov_loop/tile_int.cuh"

namespace dspark::cuda::markov {

Kernel int8_kernel(const Config& c) {
  if (c.source == Source::kInt) return markov_loop_kernel<IntSource>;
  return c.group == kMinMmaGroup ? markov_loop_kernel<ImmaSource<kMinMmaGroup>>
                                 : markov_loop_kernel<ImmaSource<kMaxMmaGroup>>;
}

}  // namespace dspark::cuda::markov
