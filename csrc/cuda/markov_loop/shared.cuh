// SPDX-License-Identifier: Apache-2.0
//
// What a CTA keeps in shared memory beside the tiles: one record a request. Requests are counted
// without the inactive ones, in ascending order: a "row".
#ifndef DSPARK_CUDA_MARKOV_LOOP_SHARED_CUH_
#define DSPARK_CUDA_MARKOV_LOOP_SHARED_CUH_

#include "core/dtype.h"
#include "cuda/markov_loop/args.h"
#include "cuda/prim/memory.h"
#include "cuda/prim/platform.h"

namespace dspark::cuda::markov {

constexpr float kMinTemperature = 1e-3f;
constexpr float kMinusInf = -__builtin_inff();

/// Champions are kept per row, or per (warp, row) while there are fewer rows than warps.
DSPARK_HD int32_t num_entries(int32_t rows) { return rows <= kWarps ? kWarps * kWarps : rows; }
/// Room for the entries of any number of active ones among `requests`.
DSPARK_HD int32_t max_entries(int32_t requests) {
  return requests < kWarps * kWarps ? kWarps * kWarps : requests;
}

/// Bytes of Shared behind the source's memory.
inline uint32_t shared_record_bytes(int32_t rows, int32_t pairs) {
  return static_cast<uint32_t>(pairs * kBiasStride * 4 + max_entries(rows) * 16 + rows * 24 + 128);
}

struct Shared {
  unsigned char* source;  // the tile source's own
  float* bias;            // [pairs, kBiasStride] dot products of a tile, then its z
  uint64_t* best_key;     // [entries] the best segment (sampled) or id (greedy) so far, 0: none
  uint64_t* best_pick;    // [entries] its candidate: column, logit bits << 32
  uint64_t* u53;          // [rows] inner draw of this step
  double* scratch;        // [kWarps] block reductions
  int32_t* previous;      // [rows] x_{k-1}, or what came in its place: check known()
  float* temperature;     // [rows] T, 0: greedy
  int32_t* request;       // [rows] place in the caller's arrays
  uint32_t* status;       // [rows] status bits that this CTA has seen
  int32_t* count;         // [1] rows
};

__device__ __forceinline__ Shared carve_shared(unsigned char* memory, const Config& c,
                                               int32_t rows) {
  Shared s;
  s.source = memory;
  s.best_key = reinterpret_cast<uint64_t*>(memory + c.source_bytes);
  s.best_pick = s.best_key + max_entries(rows);
  s.u53 = s.best_pick + max_entries(rows);
  s.scratch = reinterpret_cast<double*>(s.u53 + rows);
  s.previous = reinterpret_cast<int32_t*>(s.scratch + kWarps);
  s.temperature = reinterpret_cast<float*>(s.previous + rows);
  s.request = reinterpret_cast<int32_t*>(s.temperature + rows);
  s.status = reinterpret_cast<uint32_t*>(s.request + rows);
  s.count = reinterpret_cast<int32_t*>(s.status + rows);
  // 16 bytes for the count and its padding: the bias is read as float4.
  const uint32_t records =
      static_cast<uint32_t>(reinterpret_cast<unsigned char*>(s.count) - memory);
  s.bias = reinterpret_cast<float*>(memory + (records + 4 + 15) / 16 * 16);
  return s;
}

/// Whether this CTA writes a row's results.
__device__ __forceinline__ bool owns_row(int32_t row) { return row % gridDim.x == blockIdx.x; }

/// The first row, of those a grid apart, whose side work of a step is this CTA's.
__device__ __forceinline__ int32_t turn(int32_t rows, int32_t step) {
  const uint32_t shift = static_cast<uint32_t>(step) * static_cast<uint32_t>(rows) % gridDim.x;
  return static_cast<int32_t>(blockIdx.x >= shift ? blockIdx.x - shift
                                                  : blockIdx.x + gridDim.x - shift);
}

/// Whether x_{k-1} is a row of W1.
__device__ __forceinline__ bool known(const Params& p, int32_t id) {
  return id >= 0 && id < p.vocab_size;
}

// The rows, in ascending order of the requests. One warp.
__device__ __forceinline__ void list_rows(const Params& p, const Shared& s) {
  const uint32_t lane = threadIdx.x & 31;
  int32_t count = 0;
  for (int32_t first = 0; first < p.num_requests; first += 32) {
    const int32_t r = first + static_cast<int32_t>(lane);
    const bool active = r < p.num_requests && (p.active == nullptr || p.active[r] != 0);
    const uint32_t mask = __ballot_sync(~0u, active);
    if (active) s.request[count + __popc(mask & ((1u << lane) - 1))] = r;
    count += __popc(mask);
  }
  if (lane == 0) *s.count = count;
}

/// Read the requests' arguments; what is out of range counts as greedy. Whole CTA; ends with a
/// barrier. Returns the number of rows.
__device__ __forceinline__ int32_t read_requests(const Params& p, const Shared& s, bool start) {
  if (threadIdx.x < 32) list_rows(p, s);
  __syncthreads();
  const int32_t rows = *s.count;
  for (int32_t n = threadIdx.x; n < rows; n += kThreads) {
    const int32_t r = s.request[n];
    uint32_t status = 0;
    float t = p.temperature == nullptr ? 0.0f : p.temperature[r];
    if (t != 0.0f && !(t >= kMinTemperature && t < __builtin_inff())) {
      status |= DSPARK_BAD_PARAM;
      t = 0.0f;
    }
    s.temperature[n] = t;
    s.previous[n] = p.anchor[r];
    if (!known(p, s.previous[n])) status |= DSPARK_BAD_DRAFT_ID;
    s.status[n] = 0;
    // The owner's first word; the other bits are added atomically behind the first exchange.
    if (start && owns_row(n)) p.status[r] = static_cast<int32_t>(status);
  }
  __syncthreads();
  return rows;
}

/// Add the status bits that this CTA has seen.
__device__ __forceinline__ void flush_status(const Params& p, const Shared& s, int32_t rows) {
  for (int32_t n = threadIdx.x; n < rows; n += kThreads) {
    if (s.status[n] != 0) {
      atomicOr(reinterpret_cast<uint32_t*>(p.status) + s.request[n], s.status[n]);
    }
  }
}

/// Sum of the CTA's values, in an order that depends on the thread numbers alone; everybody gets
/// it. Two barriers.
__device__ __forceinline__ double block_sum(double x, double* scratch) {
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  __syncthreads();  // the scratch of the reduction before has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = scratch[0];
  for (int w = 1; w < kWarps; ++w) sum += scratch[w];
  return sum;
}
__device__ __forceinline__ double block_max(double x, double* scratch) {
  for (int d = 16; d > 0; d /= 2) {
    const double other = __shfl_xor_sync(~0u, x, d);
    x = other > x ? other : x;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double largest = scratch[0];
  for (int w = 1; w < kWarps; ++w) largest = scratch[w] > largest ? scratch[w] : largest;
  return largest;
}

}  // namespace dspark::cuda::markov

#endif  // DSPARK_CUDA_MARKOV_LOOP_SHARED_CUH_
