// SPDX-License-Identifier: Apache-2.0
#include "cuda/markov_loop/kernel.cuh"
#include "cuda/markov_loop/kernel_screen.h"
#include "cuda/markov_loop/tile_screen.cuh"

namespace dspark::cuda::markov {

Kernel screen_kernel(const Config& c) {
  return c.group == kMinMmaGroup ? markov_loop_kernel<ScreenSource<kMinMmaGroup>>
                                 : markov_loop_kernel<ScreenSource<kMaxMmaGroup>>;
}

}  // namespace dspark::cuda::markov
