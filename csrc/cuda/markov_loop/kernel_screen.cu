// SPDX-License-Identifier: Apache-2.0
#include "cuda/markov_loop/kernel.cuh"
#include "cuda/markov_loop/kernel_screen.h"
#include "cuda/markov_loop/tile_screen.cuh"

namespace dspark::cuda::markov {

Kernel screen_kernel(const Config& c) {
  if (c.group == 8) return markov_loop_kernel<ScreenSource<8>>;
  return c.group == 16 ? markov_loop_kernel<ScreenSource<16>>
                       : markov_loop_kernel<ScreenSource<32>>;
}

}  // namespace dspark::cuda::markov
