// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "core/dtype.h"
#include "core/math.h"
#include "core/philox.h"
#include "cuda/prim/async.h"
#include "cuda/prim/barrier.h"
#include "cuda/prim/convert.h"
#include "cuda/prim/memory.h"
#include "cuda/prim/mma.h"
#include "simt/conformance.h"

namespace dspark::conformance {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// ---- warps: 32 words in, one row of 32 words out for each operation

__global__ void shuffles(const uint32_t* in, uint32_t* out) {
  const unsigned lane = threadIdx.x;
  const uint32_t v = in[lane];
  out[lane] = __shfl_sync(kAll, v, static_cast<int>(lane * 7 % 32));
  out[32 + lane] = __shfl_xor_sync(kAll, v, 5);
  out[64 + lane] = __shfl_up_sync(kAll, v, 3);
  out[96 + lane] = __shfl_down_sync(kAll, v, 3);
  out[128 + lane] = __shfl_sync(kAll, v, 19, 16);
  out[160 + lane] = __shfl_xor_sync(kAll, v, 9, 8);
  out[192 + lane] = __shfl_up_sync(kAll, v, 3, 8);
  out[224 + lane] = __shfl_down_sync(kAll, v, 3, 8);
}
const Case kShuffles("shuffles", 128, 1024, &shuffles);

__global__ void votes(const uint32_t* in, uint32_t* out) {
  const unsigned lane = threadIdx.x;
  const uint32_t v = in[lane];
  out[lane] = __ballot_sync(kAll, v % 3 == 0);
  out[32 + lane] = static_cast<uint32_t>(__any_sync(kAll, v == in[7]));
  out[64 + lane] = static_cast<uint32_t>(__all_sync(kAll, v % 2 == 0));
  out[96 + lane] = __match_any_sync(kAll, v % 5);
  if (lane < 16) out[128 + lane] = __ballot_sync(0xffffu, v % 2 == 0);
}
const Case kVotes("votes", 128, 640, &votes);

__global__ void reductions(const uint32_t* in, uint32_t* out) {
  const unsigned lane = threadIdx.x;
  const uint32_t v = in[lane];
  const int32_t s = static_cast<int32_t>(v);
  out[lane] = __reduce_add_sync(kAll, v);
  out[32 + lane] = __reduce_min_sync(kAll, v);
  out[64 + lane] = __reduce_max_sync(kAll, v);
  out[96 + lane] = static_cast<uint32_t>(__reduce_min_sync(kAll, s));
  out[128 + lane] = static_cast<uint32_t>(__reduce_max_sync(kAll, s));
  out[160 + lane] = __reduce_and_sync(kAll, v | 0xffff0000u);
  out[192 + lane] = __reduce_or_sync(kAll, v & 0x0f0f0f0fu);
}
const Case kReductions("reductions", 128, 896, &reductions);

__global__ void block_votes(const uint32_t* in, uint32_t* out) {
  const unsigned t = threadIdx.x;
  const uint32_t v = in[t];
  const int any = __syncthreads_or(v == in[77]), all = __syncthreads_and(v != in[77]);
  const int count = __syncthreads_count(v % 2 != 0);
  out[t] = static_cast<uint32_t>(any != 0) | static_cast<uint32_t>(all != 0) << 1 |
           static_cast<uint32_t>(count) << 2;
}
const Case kBlockVotes("block_votes", 384, 384, &block_votes, 96);

// ---- integers and bits: pairs of words in

__global__ void integers(const uint32_t* in, uint32_t* out) {
  const unsigned lane = threadIdx.x;
  const uint32_t a = in[2 * lane], b = in[2 * lane + 1];
  const uint64_t wide = static_cast<uint64_t>(a) << 32 | b;
  const uint64_t high = __umul64hi(wide, 0x9e3779b97f4a7c15ull);
  uint32_t* o = out + 12 * lane;
  o[0] = static_cast<uint32_t>(__popc(a));
  o[1] = static_cast<uint32_t>(__clz(static_cast<int>(a >> (b % 33 == 32 ? 31 : b % 33))));
  o[2] = static_cast<uint32_t>(__ffs(static_cast<int>(a << (b % 32))));
  o[3] = __brev(a);
  o[4] = __umulhi(a, b);
  o[5] = static_cast<uint32_t>(high);
  o[6] = static_cast<uint32_t>(high >> 32);
  o[7] = static_cast<uint32_t>(__dp4a(static_cast<int>(a), static_cast<int>(b), 17));
  o[8] = __byte_perm(a, b, 0x7160);
  o[9] = __funnelshift_r(a, b, b);
  o[10] = static_cast<uint32_t>(__popcll(wide));
  o[11] = static_cast<uint32_t>(__clzll(static_cast<long long>(wide >> 9)));
}
const Case kIntegers("integers", 256, 1536, &integers);

// ---- atomics: 1024 words in, added up by many threads

__global__ void atomics(const uint32_t* in, uint32_t* out) {
  const unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t v = in[t];
  auto* wide = reinterpret_cast<unsigned long long*>(out + 16);
  atomicAdd(&out[0], v);
  atomicAdd(reinterpret_cast<int*>(&out[1]), static_cast<int>(v));
  atomicMax(&out[2], v);
  atomicMin(reinterpret_cast<int*>(&out[3]), static_cast<int>(v));
  atomicOr(&out[4], v & 0x11111111u);
  for (uint32_t seen = out[32 + t % 4], next = seen;; seen = next) {  // a sum by compare and swap
    next = atomicCAS(&out[5], seen, seen + (v & 0xffu));
    if (next == seen) break;
  }
  atomicAdd(&wide[0], static_cast<unsigned long long>(v) << 20);
  atomicMax(&wide[1], static_cast<unsigned long long>(v) << 20 | t);
  atomicExch(&out[6], 99u);
  prim::red_release_add(&out[7], v);
  prim::red_max(reinterpret_cast<uint64_t*>(out + 24), static_cast<uint64_t>(v) << 31 | t);
}
const Case kAtomics("atomics", 4096, 256, &atomics, 256, 4);

// ---- memory order: block 0 hands numbers to block 1 and back

__global__ void handover(const uint32_t* in, uint32_t* out) {
  uint32_t* flag = out + 1024;
  uint64_t* wide = reinterpret_cast<uint64_t*>(out + 1024 + 16);
  const unsigned t = threadIdx.x;
  for (uint32_t turn = 0; turn < 8; ++turn) {
    const bool writes = blockIdx.x == turn % 2;
    if (writes) {
      for (unsigned i = t; i < 1024; i += blockDim.x) {
        out[i] = out[i] * 3 + in[i] + turn;
      }
      __syncthreads();
      if (t == 0) {
        if (turn % 4 < 2) {
          prim::st_release(flag, turn + 1);
        } else {
          prim::fence_gpu();
          prim::st_relaxed(flag, turn + 1);
        }
        prim::st_release(wide, static_cast<uint64_t>(turn) << 40);
      }
    } else {
      if (t == 0) {
        if (turn % 4 < 2) {
          while (prim::ld_acquire(flag) != turn + 1) {
          }
        } else {
          while (prim::ld_relaxed(flag) != turn + 1) {
          }
          prim::fence_gpu();
        }
        while (prim::ld_acquire(wide) != static_cast<uint64_t>(turn) << 40) {
        }
      }
      __syncthreads();
    }
  }
}
const Case kHandover("handover", 4096, 4352, &handover, 128, 2, true);

__global__ void streams(const uint32_t* in, uint32_t* out) {
  const unsigned t = threadIdx.x;
  const uint4 four = prim::ld_stream(reinterpret_cast<const uint4*>(in) + t);
  const uint2 two = prim::ld_stream(reinterpret_cast<const uint2*>(in) + t);
  const uint16_t half = prim::ld_stream(reinterpret_cast<const uint16_t*>(in) + t);
  prim::prefetch_l2(in);
  out[t] = four.x + 3 * four.y + 5 * four.z + 7 * four.w;
  out[64 + t] = two.x + 3 * two.y;
  out[128 + t] = prim::ld_stream(in + t);
  out[192 + t] = half;
}
const Case kStreams("streams", 1024, 1024, &streams, 64);

// ---- asynchronous copies: thread t copies t % 17 bytes of its 16

__global__ void copies(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t buffer[2][4 * 64];
  const unsigned t = threadIdx.x;
  prim::cp_async_16(&buffer[0][4 * t], in + 4 * t, static_cast<int>(t % 17));
  prim::cp_async_commit();
  prim::cp_async_16(&buffer[1][4 * t], in + 4 * (63 - t));
  prim::cp_async_commit();
  prim::cp_async_wait<1>();
  __syncthreads();
  for (unsigned i = 0; i < 4; ++i) out[4 * t + i] = buffer[0][4 * (63 - t) + i];
  prim::cp_async_wait<0>();
  __syncthreads();
  for (unsigned i = 0; i < 4; ++i) out[256 + 4 * t + i] = buffer[1][4 * (63 - t) + i];
}
const Case kCopies("copies", 1024, 2048, &copies, 64);

// ---- barriers of a part of the block: two producers and two consumers, a ring of two stages

__global__ void ring(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t stage[2][64];
  const unsigned t = threadIdx.x % 64;
  const bool producer = threadIdx.x < 64;
  for (int i = 0; i < 8; ++i) {
    const int s = i % 2;
    if (producer) {
      if (i >= 2) prim::barrier_sync(3 + s, 128);  // the stage is free again
      stage[s][t] = in[64 * i + t];
      prim::barrier_arrive(1 + s, 128);
    } else {
      prim::barrier_sync(1 + s, 128);
      out[64 * i + t] = stage[s][63 - t];
      if (i < 6) prim::barrier_arrive(3 + s, 128);
    }
  }
}
const Case kRing("ring", 2048, 2048, &ring, 128);

// ---- matrices. in: A row-major, then B with a column a row ([N][K])

__global__ void load_matrices(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[32 * 4];
  const unsigned lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) tile[4 * lane + i] = in[4 * lane + i];
  __syncwarp();
  uint32_t four[4], two[2];
  prim::ldmatrix_x4(four, &tile[4 * lane]);
  prim::ldmatrix_x2(two, &tile[4 * (31 - lane)]);
  for (int i = 0; i < 4; ++i) out[32 * i + lane] = four[i];
  for (int i = 0; i < 2; ++i) out[128 + 32 * i + lane] = two[i];
}
const Case kLoadMatrices("load_matrices", 512, 768, &load_matrices);

__global__ void load_transposed(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[32 * 4];
  const unsigned lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) tile[4 * lane + i] = in[4 * lane + i];
  __syncwarp();
  uint32_t four[4];
  prim::ldmatrix_x4_trans(four, &tile[4 * lane]);
  for (int i = 0; i < 4; ++i) out[32 * i + lane] = four[i];
}
const Case kLoadTransposed("load_transposed", 512, 512, &load_transposed);

// ---- conversions: all pairs of e4m3 with one half counting up, pairs of floats, exponents

__global__ void conversions(const uint32_t* in, uint32_t* out) {
  const unsigned t = threadIdx.x;
  const float x = float_from_bits(in[t]), y = float_from_bits(in[255 - t]);
  out[t] = prim::e4m3_to_f16(t | (255 - t) << 8);
  out[256 + t] = prim::pack_bf16(x, y);
  out[512 + t] = prim::pack_f16(x, y);
}
const Case kConversions("conversions", 1024, 3072, &conversions, 256);

__global__ void exponentials(const uint32_t* in, uint32_t* out) {
  const float x = float_from_bits(in[threadIdx.x]);
  out[threadIdx.x] = bits_f32(prim::exp2_approx(x));
  out[256 + threadIdx.x] = bits_f32(prim::reciprocal_approx(1.0f - x));
}
const Case kExponentials("exponentials", 1024, 2048, &exponentials, 256);

/// Fragments of A [16][K] and B [8][K], `words` 32-bit words to a row, straight from memory.
__device__ void fragments(const uint32_t* in, uint32_t (&a)[4], uint32_t (&b)[2], unsigned words) {
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  a[0] = in[g * words + t];
  a[1] = in[(g + 8) * words + t];
  a[2] = in[g * words + t + 4];
  a[3] = in[(g + 8) * words + t + 4];
  b[0] = in[(16 + g) * words + t];
  b[1] = in[(16 + g) * words + t + 4];
}

template <class T>
__device__ void store(uint32_t* out, const T (&d)[4]) {
  const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
  T* o = reinterpret_cast<T*>(out);
  for (unsigned e = 0; e < 4; ++e) o[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = d[e];
}

__global__ void multiply_bf16(const uint32_t* in, uint32_t* out) {
  uint32_t a[4], b[2];
  float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  fragments(in, a, b, 8);
  prim::mma_bf16(d, a, b);
  store(out, d);
}
const Case kMultiplyBf16("multiply_bf16", 768, 512, &multiply_bf16);

__global__ void multiply_f16(const uint32_t* in, uint32_t* out) {
  uint32_t a[4], b[2];
  float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  fragments(in, a, b, 8);
  prim::mma_f16(d, a, b);
  store(out, d);
}
const Case kMultiplyF16("multiply_f16", 768, 512, &multiply_f16);

__global__ void multiply_s8(const uint32_t* in, uint32_t* out) {
  uint32_t a[4], b[2];
  int32_t d[4] = {1, 2, 3, 4};
  fragments(in, a, b, 8);
  prim::mma_s8(d, a, b);
  store(out, d);
}
const Case kMultiplyS8("multiply_s8", 768, 512, &multiply_s8);

// ---- the arithmetic that all backends share, bit by bit

__global__ void arithmetic(const uint32_t* in, uint32_t* out) {
  const unsigned t = threadIdx.x;
  const float x = float_from_bits(in[t]);  // in (-80, 0]
  const double y = static_cast<double>(x);
  uint64_t* wide = reinterpret_cast<uint64_t*>(out + 4 * 256);
  out[t] = bits_f32(exp_f32(x));
  out[256 + t] = bits_f32(expm1_f32(x));
  out[512 + t] = static_cast<uint32_t>(f32_to_bf16(x)) << 16 | f32_to_f16(x);
  out[768 + t] = philox4x32_10(Philox4{{in[t], t, 2, 3}}, 5, in[255 - t]).w[t % 4];
  wide[t] = bits_f64(exp_f64(y));
  wide[256 + t] = bits_f64(expm1_f64(y));
  wide[512 + t] = bits_f64(log_f64(1.0 - y));
}
const Case kArithmetic("arithmetic", 1024, 4096 + 6144, &arithmetic, 256);

}  // namespace
}  // namespace dspark::conformance

extern "C" {

/// Run the case `name`: `in` and `out` in device memory (of the host, in the emulation).
DSPARK_API dspark_status dspark_conformance(const char* name, const void* in, void* out,
                                            void* stream) {
  using namespace dspark;
  for (const auto* c = conformance::Case::first(); c != nullptr; c = c->next) {
    if (strcmp(c->name, name) != 0) continue;
    const auto* words = static_cast<const uint32_t*>(in);
    auto* results = static_cast<uint32_t*>(out);
    if (c->run != nullptr) return c->run(words, results, stream);
    prim::LaunchConfig config;
    config.grid = dim3(c->blocks);
    config.block = dim3(c->threads);
    config.stream = stream;
    config.cooperative = c->cooperative;
    return prim::launch(name, c->kernel, config, words, results);
  }
  return failed_status(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__, "no case %s", name);
}

/// Describe case number `i`; its name, or NULL behind the last one.
DSPARK_API const char* dspark_conformance_case(int i, size_t* in_bytes, size_t* out_bytes,
                                               int* capability) {
  const auto* c = dspark::conformance::Case::first();
  while (c != nullptr && i-- > 0) c = c->next;
  if (c == nullptr) return nullptr;
  *in_bytes = c->in_bytes;
  *out_bytes = c->out_bytes;
  *capability = c->capability;
  return c->name;
}

}  // extern "C"
