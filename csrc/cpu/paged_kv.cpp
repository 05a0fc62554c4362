// SPDX-License-Identifier: Apache-2.0
//
// Appending moves each new row once: the floor is the bytes of k and v read plus the bytes written.
// Rows of one dtype without rotation are copied as bytes; the rest go through a float32 row, so a
// value is rounded exactly once. The work is cut into runs of tokens, not requests, so that one
// long prefill uses all threads.
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/families.h"
#include "core/math.h"
#include "cpu/parallel.h"

namespace dspark::cpu {
namespace {

// Below this many bytes a second thread costs more than it moves.
constexpr int64_t kBytesPerThread = INT64_C(1) << 18;

struct Scratch {
  double* inv_freq;  // [E / 2]
  float* row;        // [D]
  float* cosine;     // [E / 2]
  float* sine;       // [E / 2]
};

int turning(const dspark_paged_kv_params& p) { return p.rope_dim > 0 ? p.rope_dim : p.head_dim; }

double amplitude(const dspark_paged_kv_params& p) {
  return p.rope_amplitude > 0.0 ? p.rope_amplitude : 1.0;
}

int64_t floats_per_thread(const dspark_paged_kv_params& p) {
  return (INT64_C(2) * p.head_dim + 15) / 16 * 16;  // a cache line each: no false sharing
}

Scratch scratch_of(const dspark_paged_kv_params& p, void* data, int thread) {
  auto* inv_freq = static_cast<double*>(data);
  auto* floats = reinterpret_cast<float*>(inv_freq + (p.head_dim / 2 + 7) / 8 * 8);
  float* row = floats + thread * floats_per_thread(p);
  return {inv_freq, row, row + p.head_dim, row + p.head_dim + p.head_dim / 2};
}

void widen(float* to, const void* from, int32_t dtype, int n) {
  if (dtype == DSPARK_F32) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  const auto* h = static_cast<const uint16_t*>(from);
  if (dtype == DSPARK_BF16) {
    for (int i = 0; i < n; ++i) to[i] = bf16_to_f32(h[i]);
  } else {
    for (int i = 0; i < n; ++i) to[i] = f16_to_f32(h[i]);
  }
}

void narrow(void* to, int32_t dtype, const float* from, int n, float scale) {
  if (dtype == DSPARK_F32) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  auto* h = static_cast<uint16_t*>(to);
  if (dtype == DSPARK_F8_E4M3) {
    auto* b = static_cast<uint8_t*>(to);
    for (int i = 0; i < n; ++i) b[i] = f32_to_f8(from[i] / scale);
  } else if (dtype == DSPARK_BF16) {
    for (int i = 0; i < n; ++i) h[i] = f32_to_bf16(from[i]);
  } else {
    for (int i = 0; i < n; ++i) h[i] = f32_to_f16(from[i]);
  }
}

void set_angles(const Scratch& s, int half, int64_t position, double factor) {
  for (int i = 0; i < half; ++i) {
    double sine, cosine;
    sin_cos_f64(static_cast<double>(position) * s.inv_freq[i], &sine, &cosine);
    s.cosine[i] = static_cast<float>(cosine * factor);
    s.sine[i] = static_cast<float>(sine * factor);
  }
}

// Pairs (x[i * step], x[i * step + apart]).
void rotate(const Scratch& s, int half, int step, int apart) {
  for (int i = 0; i < half; ++i) {
    float* x = s.row + i * step;
    const float a = x[0], b = x[apart];
    x[0] = a * s.cosine[i] - b * s.sine[i];
    x[apart] = b * s.cosine[i] + a * s.sine[i];
  }
}

void* element(void* data, int32_t dtype, int64_t i) {
  return static_cast<char*>(data) + i * dtype_bytes(dtype);
}

// The scales of one of the caches.
struct Scale {
  const float* values;
  int32_t stride;
  float of(int64_t head) const { return kv_scale(values, stride, static_cast<int32_t>(head)); }
};

bool scales_are_usable(const dspark_paged_kv_params& p) {
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    const float k = Scale{p.k_scale, p.k_scale_stride}.of(h);
    if (!is_kv_scale(k) || !is_kv_scale(Scale{p.v_scale, p.v_scale_stride}.of(h))) return false;
  }
  return true;
}

// One token's heads of k or v to one row of its cache. With `rotated`, the angles are set.
void move_heads(const dspark_paged_kv_params& p, const Scratch& s, const void* from,
                int64_t from_stride, void* to, Scale scale, bool rotated) {
  const int d = p.head_dim;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    const void* source = advance(from, p.dtype, h * from_stride);
    void* target = element(to, p.cache_dtype, h * p.head_stride);
    if (p.dtype == p.cache_dtype && !rotated) {
      std::memcpy(target, source, static_cast<size_t>(d * dtype_bytes(p.dtype)));
      continue;
    }
    widen(s.row, source, p.dtype, d);
    if (rotated) {
      const int half = turning(p) / 2;
      const bool beside = p.rope_interleaved != 0;
      rotate(s, half, beside ? 2 : 1, beside ? 1 : half);
    }
    narrow(target, p.cache_dtype, s.row, d, scale.of(h));
  }
}

// Status bit of a position, 0 with `offset` set to its row when it can be written.
int32_t locate(const dspark_paged_kv_params& p, int64_t r, int64_t position, int64_t* offset) {
  const int64_t column = position / p.page_size;
  if (column >= p.max_pages) return DSPARK_KV_OVERFLOW;
  const int32_t page = p.page_table[r * p.page_table_stride + column];
  if (page < 0 || page >= p.num_pages) return DSPARK_BAD_PAGE;
  *offset = page * p.page_stride + position % p.page_size * p.row_stride;
  return 0;
}

// Rows of a request to append, -1 when its bounds are wrong.
int64_t rows_of(const dspark_paged_kv_params& p, int64_t r) {
  const int64_t begin = p.cu_seqlens[r], end = p.cu_seqlens[r + 1];
  if (begin < 0 || end < begin || end > p.num_tokens || p.kv_len[r] < 0) return -1;
  const int64_t rows = p.num_new == nullptr ? end - begin : p.num_new[r];
  return rows < 0 || rows > end - begin ? -1 : rows;
}

int32_t check_request(const dspark_paged_kv_params& p, int64_t r, bool usable) {
  const int64_t rows = rows_of(p, r), length = p.kv_len[r];
  if (!usable || rows < 0) return DSPARK_BAD_PARAM;
  int32_t status = 0;
  int64_t unused;
  // One look per page: the first token of the append, then the first of every further page.
  for (int64_t i = 0; i < rows; i += p.page_size - (length + i) % p.page_size) {
    const int32_t bit = locate(p, r, length + i, &unused);
    status |= bit;
    if (bit == DSPARK_KV_OVERFLOW) break;
  }
  return status;
}

// Tokens [first, last) of k and v, whatever requests they belong to.
void append_run(const dspark_paged_kv_params& p, const Scratch& s, int64_t first, int64_t last) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if ((p.status[r] & DSPARK_BAD_PARAM) != 0) continue;
    const int64_t begin = p.cu_seqlens[r];
    const int64_t from = begin > first ? begin : first;
    const int64_t end = begin + rows_of(p, r);
    const int64_t to = end < last ? end : last;
    for (int64_t t = from; t < to; ++t) {
      const int64_t position = p.kv_len[r] + (t - begin);
      int64_t offset;
      if (locate(p, r, position, &offset) != 0) continue;
      const bool rotated = p.rope_theta > 0.0;
      if (rotated) set_angles(s, turning(p) / 2, position, amplitude(p));
      move_heads(p, s, advance(p.k, p.dtype, t * p.k_token_stride), p.k_head_stride,
                 element(p.k_cache, p.cache_dtype, offset), {p.k_scale, p.k_scale_stride}, rotated);
      move_heads(p, s, advance(p.v, p.dtype, t * p.v_token_stride), p.v_head_stride,
                 element(p.v_cache, p.cache_dtype, offset), {p.v_scale, p.v_scale_stride}, false);
    }
  }
}

}  // namespace

size_t paged_kv_workspace(const dspark_paged_kv_params& p) {
  const auto inv_freq = static_cast<size_t>((p.head_dim / 2 + 7) / 8 * 8);
  const auto threads = static_cast<size_t>(max_threads(p.num_threads));
  return inv_freq * sizeof(double) +
         threads * static_cast<size_t>(floats_per_thread(p)) * sizeof(float);
}

void paged_kv(const dspark_paged_kv_params& p, void* data) {
  const Scratch shared = scratch_of(p, data, 0);
  const int turn = turning(p);
  for (int i = 0; p.rope_theta > 0.0 && i < turn / 2; ++i) {
    shared.inv_freq[i] =
        p.rope_inv_freq != nullptr ? p.rope_inv_freq[i] : std::pow(p.rope_theta, -2.0 * i / turn);
  }
  const bool usable = scales_are_usable(p);
  for (int64_t r = 0; r < p.num_requests; ++r) p.status[r] = check_request(p, r, usable);

  const int64_t bytes = INT64_C(2) * p.num_tokens * p.num_kv_heads * p.head_dim *
                        (dtype_bytes(p.dtype) + dtype_bytes(p.cache_dtype));
  const int64_t pieces = bytes / kBytesPerThread + 1;
  const int threads = thread_count(p.num_threads, pieces);
  parallel_for(threads, threads, [&](int64_t piece, int thread) {
    append_run(p, scratch_of(p, data, thread), p.num_tokens * piece / threads,
               p.num_tokens * (piece + 1) / threads);
  });
}

void paged_kv_commit(const dspark_paged_kv_commit_params& p) {
  for (int64_t r = 0; r < p.num_requests; ++r) {
    if ((p.active != nullptr && p.active[r] == 0) || p.num_emitted[r] <= 0) continue;
    p.kv_len[r] += p.num_emitted[r];
    p.position[r] += p.num_emitted[r];
  }
}

}  // namespace dspark::cpu
