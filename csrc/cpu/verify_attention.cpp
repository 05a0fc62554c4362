// SPDX-License-Identifier: Apache-2.0
//
// The work is cut into pieces: (request, KV heads, a few query tokens). All rows of a KV head
// (tokens times the heads of the group) go over a block of keys while it is in the first-level
// cache, so a key is read once per piece: with q_len <= 8 once per step, the floor. With requests
// enough for the threads a piece takes all KV heads of a block before the next block, so that it
// reads the cache in the order of memory. What the next step reads is asked for during this one.
//
// Keys are summed in splits of kSplit positions that start at multiples of kSplit, each with its
// own online softmax, merged in ascending order. With fewer pieces than threads the splits of a
// piece run on several threads; else one thread runs them in turn. Both do the same arithmetic, and
// a row skips what lies outside its own range, so its bytes depend on its request alone:
// batch_invariant costs nothing here and is always on. The work plan is not needed.
#include "core/dtype.h"
#include "core/families.h"
#include "core/math.h"
#include "cpu/level.h"
#include "cpu/parallel.h"
#include "cpu/verify_attention_loops.h"

namespace dspark::cpu {
namespace {

using Params = dspark_verify_attention_params;

constexpr int64_t kSplit = 512;    // keys; a multiple of kBlock
constexpr int kRowsPerPiece = 64;  // enough to hide how keys and values are laid out
constexpr int kDirectRows = 8;     // up to here a float32 value is used once or twice: not moved
constexpr int64_t kMaxState = 1 << 16;       // floats: the state of all KV heads fits in L2
constexpr int64_t kMaxParts = 512;           // bounds the workspace of the split form
constexpr int64_t kWorkPerThread = 1 << 21;  // multiply-adds, ~50 us: less is not worth a fork

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
constexpr double kLn2 = 0.69314718055994531;

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Sizes that follow from the params alone.
struct Shape {
  int group, width, tokens_per_piece;
  int rows;        // most query rows of a piece that share a KV head
  int heads;       // KV heads of a piece
  int64_t ahead;   // pieces of kAheadBytes in a row of the cache, or a bit more
  int64_t splits;  // upper bound per request

  explicit Shape(const Params& p) {
    group = p.num_q_heads / p.num_kv_heads;
    width = static_cast<int>(round_up(p.head_dim, kWidthAlign));
    const int fit = group < kRowsPerPiece ? kRowsPerPiece / group : 1;
    tokens_per_piece = p.max_q_len < fit ? (p.max_q_len < 1 ? 1 : p.max_q_len) : fit;
    rows = tokens_per_piece * group;
    const int64_t all = static_cast<int64_t>(rows) * width * p.num_kv_heads;
    const int threads = max_threads(p.num_threads);
    const bool busy = threads == 1 || p.num_requests >= 2 * threads;
    heads = busy && all <= kMaxState ? p.num_kv_heads : 1;
    ahead = heads * round_up(p.head_dim * dtype_bytes(p.cache_dtype), kAheadBytes) / kAheadBytes;
    splits = (static_cast<int64_t>(p.max_pages) * p.page_size + kSplit - 1) / kSplit;
  }

  // Floats of one state, and of one thread's scratch. Multiples of 16: cache lines, not shared.
  int64_t state() const { return round_up(static_cast<int64_t>(heads) * rows * (width + 2), 16); }
  int64_t per_thread() const {
    const int64_t floats = static_cast<int64_t>(heads) * rows * width +  // q
                           static_cast<int64_t>(rows) * (kBlock + 2) +   // scores, ranges
                           INT64_C(2) * kBlock * width +                 // k, v
                           (3 + 2 * ahead) * kBlock * 2;                 // pointers
    return 2 * state() + round_up(floats, 16);
  }
};

AttentionState state_at(float* at, const Shape& shape) {
  const int64_t rows = static_cast<int64_t>(shape.heads) * shape.rows;
  return {at + rows * shape.width, at + rows * (shape.width + 1), at};
}

struct Scratch {
  AttentionState total, part;
  float *q, *scores, *panel;      // [rows, width], [rows, kBlock], [kPanelFloats]
  const void **k_rows, **v_rows;  // [kBlock]
  const void** ahead;             // [2 * kBlock * shape.ahead]
  int *begin, *end;               // [rows]

  Scratch(float* at, const Shape& shape) {
    total = state_at(at, shape);
    part = state_at(at + shape.state(), shape);
    panel = at + 2 * shape.state();
    k_rows = reinterpret_cast<const void**>(panel + kPanelFloats);
    v_rows = k_rows + kBlock;
    ahead = v_rows + kBlock;
    scores = reinterpret_cast<float*>(ahead + 2 * kBlock * shape.ahead);
    q = scores + static_cast<int64_t>(shape.rows) * kBlock;
    begin =
        reinterpret_cast<int*>(q + static_cast<int64_t>(shape.heads) * shape.rows * shape.width);
    end = begin + shape.rows;
  }
};

// A request whose lengths and pages are in order.
struct Request {
  int64_t index, first_token, q_len, kv_len;

  Request(const Params& p, int64_t r)
      : index(r),
        first_token(p.cu_seqlens[r]),
        q_len(p.cu_seqlens[r + 1] - first_token),
        kv_len(p.kv_len[r]) {}

  // Visible keys [low, high) of query row i.
  int64_t low(const Params& p, int64_t i) const {
    return p.window > 0 ? max64(0, kv_len - q_len + i - p.window + 1) : 0;
  }
  int64_t high(const Params& p, int64_t i) const {
    return p.causal != 0 ? max64(0, kv_len - q_len + i + 1) : kv_len;
  }
};

float k_scale(const Params& p, int64_t head) {
  return kv_scale(p.k_scale, p.k_scale_stride, static_cast<int32_t>(head));
}

float v_scale(const Params& p, int64_t head) {
  return kv_scale(p.v_scale, p.v_scale_stride, static_cast<int32_t>(head));
}

bool scales_are_usable(const Params& p) {
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    if (!is_kv_scale(k_scale(p, h)) || !is_kv_scale(v_scale(p, h))) return false;
  }
  return true;
}

int32_t check_request(const Params& p, int64_t r, bool usable, bool* bounds) {
  const int64_t begin = p.cu_seqlens[r], end = p.cu_seqlens[r + 1], length = p.kv_len[r];
  *bounds = begin >= 0 && begin <= end && end <= p.num_tokens;
  if (!*bounds || end - begin > p.max_q_len || length < 0) return DSPARK_BAD_PARAM;
  if (begin == end) return 0;
  if (!usable) return DSPARK_BAD_PARAM;
  const Request request(p, r);
  const int64_t capacity = static_cast<int64_t>(p.max_pages) * p.page_size;
  const int64_t high = min64(request.high(p, request.q_len - 1), capacity);
  int32_t status = length > capacity ? DSPARK_KV_OVERFLOW : 0;
  for (int64_t c = request.low(p, 0) / p.page_size; c * p.page_size < high; ++c) {
    const int32_t page = p.page_table[r * p.page_table_stride + c];
    if (page < 0 || page >= p.num_pages) status |= DSPARK_BAD_PAGE;
  }
  return status;
}

// `value` to all heads of a token.
void fill_token(const Params& p, int64_t token, float value, float lse) {
  const int64_t per_token = static_cast<int64_t>(p.num_q_heads) * p.head_dim;
  for (int64_t i = 0; i < per_token; ++i) store_f32(p.out, p.dtype, token * per_token + i, value);
  for (int64_t h = 0; p.lse != nullptr && h < p.num_q_heads; ++h) {
    p.lse[token * p.num_q_heads + h] = lse;
  }
}

// One piece: rows m = (h * tokens + t) * group + g of KV heads [head, head + shape.heads) and
// tokens [first, first + tokens).
class Piece {
 public:
  Piece(const Params& p, const Shape& shape, const VerifyAttentionLoops& loops, int64_t r,
        int64_t index)
      : p_(p), shape_(shape), loops_(loops), request_(p, r) {
    const int64_t per_token = p.num_kv_heads / shape.heads;
    head_ = index % per_token * shape.heads;
    first_ = index / per_token * shape.tokens_per_piece;
    tokens_ = static_cast<int>(min64(shape.tokens_per_piece, request_.q_len - first_));
    low_ = request_.low(p, first_);
    high_ = request_.high(p, first_ + tokens_ - 1);
    rows_ = tokens_ * shape.group;
  }

  int64_t first_split() const { return low_ / kSplit; }
  int64_t last_split() const { return low_ < high_ ? (high_ - 1) / kSplit + 1 : first_split(); }

  void load_queries(const Scratch& s) const {
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const float scale = p_.scale * k_scale(p_, head_ + h) * kLog2E;
      for (int64_t t = 0; t < tokens_; ++t) {
        const int64_t token = request_.first_token + first_ + t;
        const int64_t head = (head_ + h) * shape_.group;
        loops_.widen(s.q + (h * rows_ + t * shape_.group) * shape_.width, shape_.width,
                     advance(p_.q, p_.dtype, token * p_.q_token_stride + head * p_.q_head_stride),
                     p_.dtype, p_.q_head_stride, shape_.group, p_.head_dim, scale);
      }
    }
  }

  // Keys [split * kSplit, ...) of the piece into `state`, which is started here.
  void run_split(const Scratch& s, int64_t split, const AttentionState& state) const {
    for (int m = 0; m < shape_.heads * rows_; ++m) {
      state.max[m] = -kInfinity;
      state.sum[m] = 0.0f;
    }
    const int64_t floats = static_cast<int64_t>(shape_.heads) * rows_ * shape_.width;
    for (int64_t i = 0; i < floats; ++i) state.acc[i] = 0.0f;
    const int64_t end = min64(high_, (split + 1) * kSplit);
    int64_t key = max64(low_, split * kSplit) / kBlock * kBlock;
    for (; key < end; key += kBlock) run_block(s, key, state);
  }

  void merge(const AttentionState& total, const AttentionState& part, int64_t split) const {
    for (int m = 0; m < shape_.heads * rows_; ++m) {
      const int64_t i = first_ + m % rows_ / shape_.group;
      const int64_t low = request_.low(p_, i), high = request_.high(p_, i);
      if (low >= high || low >= (split + 1) * kSplit || high <= split * kSplit) continue;
      // A row's first split is copied: adding it to zeros would turn -0 into +0.
      const bool starts = low >= split * kSplit;
      loops_.merge(total, part, m, shape_.width, starts);
    }
  }

  void finish(const AttentionState& state) const {
    for (int m = 0; m < shape_.heads * rows_; ++m) {
      const int64_t i = first_ + m % rows_ / shape_.group;
      const int64_t head = (head_ + m / rows_) * shape_.group + m % shape_.group;
      const int64_t row = (request_.first_token + i) * p_.num_q_heads + head;
      void* out = static_cast<char*>(p_.out) + row * p_.head_dim * dtype_bytes(p_.dtype);
      float lse = -kInfinity;
      if (request_.low(p_, i) < request_.high(p_, i)) {
        loops_.finish(out, p_.dtype, state, m, shape_.width, p_.head_dim,
                      v_scale(p_, head_ + m / rows_));
        const float sum = state.sum[m];
        lse = sum > 0.0f ? static_cast<float>(state.max[m] * kLn2 + log_f64(sum))
                         : state.max[m] + sum;
      } else {
        for (int d = 0; d < p_.head_dim; ++d) store_f32(out, p_.dtype, d, 0.0f);
      }
      if (p_.lse != nullptr) p_.lse[row] = lse;
    }
  }

 private:
  // Keys [key, key + kBlock), as far as the piece sees them.
  void run_block(const Scratch& s, int64_t key, const AttentionState& state) const {
    find_ranges(s, key);
    const int64_t ahead = find_ahead(s, key + kBlock);
    const int first = static_cast<int>(max64(low_ - key, 0));
    const int last = static_cast<int>(min64(high_ - key, kBlock));
    find_rows(s, key, first, last);
    const bool direct =
        p_.cache_dtype == DSPARK_F32 && p_.head_dim == shape_.width && rows_ <= kDirectRows;
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const int64_t at = h * p_.head_stride, m = h * rows_;
      const int64_t asked = ahead * h / shape_.heads;
      loops_.block({rows_,
                    p_.head_dim,
                    shape_.width,
                    p_.soft_cap * kLog2E,
                    s.q + m * shape_.width,
                    s.begin,
                    s.end,
                    first,
                    last,
                    s.k_rows,
                    s.v_rows,
                    at,
                    p_.cache_dtype,
                    direct,
                    s.panel,
                    s.scores,
                    {state.max + m, state.sum + m, state.acc + m * shape_.width},
                    s.ahead + asked,
                    static_cast<int>(ahead * (h + 1) / shape_.heads - asked)});
    }
  }

  // The keys of the block at `key` that each row sees.
  void find_ranges(const Scratch& s, int64_t key) const {
    for (int64_t t = 0; t < tokens_; ++t) {
      const int64_t low = max64(request_.low(p_, first_ + t) - key, 0);
      const int64_t high = min64(request_.high(p_, first_ + t) - key, kBlock);
      for (int64_t m = t * shape_.group; m < (t + 1) * shape_.group; ++m) {
        s.begin[m] = static_cast<int>(min64(low, kBlock));
        s.end[m] = static_cast<int>(max64(high, 0));
      }
    }
  }

  // body(n, byte offset in the caches) of the rows n in [first, last) of the block at `key`.
  template <class Body>
  void for_rows(int64_t key, int64_t first, int64_t last, const Body& body) const {
    const int32_t* table = p_.page_table + request_.index * p_.page_table_stride;
    const int64_t bytes = dtype_bytes(p_.cache_dtype), step = p_.row_stride * bytes;
    int64_t column = (key + first) / p_.page_size;
    int64_t in_page = key + first - column * p_.page_size;
    for (int64_t n = first; n < last; ++column, in_page = 0) {
      const int64_t stop = min64(last, n + p_.page_size - in_page);
      int64_t offset = bytes * (table[column] * p_.page_stride + in_page * p_.row_stride +
                                head_ * p_.head_stride);
      for (; n < stop; ++n, offset += step) body(n, offset);
    }
  }

  // Where the rows of the block lie. Keys outside [first, last) repeat a valid one: tiles may read
  // them, no result uses them.
  void find_rows(const Scratch& s, int64_t key, int first, int last) const {
    const auto* k = static_cast<const char*>(p_.k_cache);
    const auto* v = static_cast<const char*>(p_.v_cache);
    for_rows(key, first, last, [&](int64_t n, int64_t offset) {
      s.k_rows[n] = k + offset;
      s.v_rows[n] = v + offset;
    });
    for (int n = 0; n < first; ++n) s.k_rows[n] = s.k_rows[first];
    for (int n = last; n < kBlock; ++n) s.k_rows[n] = s.k_rows[last - 1];
  }

  // What the block at `key` will read, in the order of memory where a row holds all heads.
  int64_t find_ahead(const Scratch& s, int64_t key) const {
    const int64_t last = min64(high_ - key, kBlock), size = dtype_bytes(p_.cache_dtype);
    const bool whole = p_.head_stride == p_.head_dim;
    const int64_t bytes = p_.head_dim * size * (whole ? shape_.heads : 1);
    const void** to = s.ahead;
    for (int64_t h = 0; h < (whole ? 1 : shape_.heads); ++h) {
      for (int side = 0; side < 2; ++side) {
        const void* cache = side == 0 ? p_.k_cache : p_.v_cache;
        const char* from = static_cast<const char*>(cache) + h * p_.head_stride * size;
        for_rows(key, 0, last, [&](int64_t, int64_t offset) {
          const char* const end = from + offset + bytes;
          for (const char* at = from + offset; at < end; at += kAheadBytes) *to++ = at;
        });
      }
    }
    return to - s.ahead;
  }

  const Params& p_;
  const Shape& shape_;
  const VerifyAttentionLoops& loops_;
  Request request_;
  int64_t head_, first_, low_, high_;
  int tokens_, rows_;
};

const VerifyAttentionLoops& loops_in_use() {
  return pick(baseline::verify_attention_loops, v3::verify_attention_loops,
              v4::verify_attention_loops);
}

int64_t max_parts(const Params& p, const Shape& shape) {
  const int64_t threads = max_threads(p.num_threads);
  return threads > 1 ? min64(threads * shape.splits, kMaxParts) : 0;
}

// Memory of a call: prefix sums of pieces, scratch per thread, states of the split form.
struct Memory {
  int64_t* first_piece;  // [R + 1]
  float* threads;
  float* parts;
};

Memory memory_of(const Params& p, const Shape& shape, void* data) {
  Memory m;
  m.first_piece = static_cast<int64_t*>(data);
  m.threads = reinterpret_cast<float*>(m.first_piece + round_up(p.num_requests + INT64_C(1), 8));
  m.parts = m.threads + max_threads(p.num_threads) * shape.per_thread();
  return m;
}

// Status of every request, rows without work, and the pieces of the rest. Returns multiply-adds.
double lay_out(const Params& p, const Shape& shape, const Memory& memory) {
  const bool usable = scales_are_usable(p);
  double work = 0.0;
  memory.first_piece[0] = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    bool bounds;
    p.status[r] = check_request(p, r, usable, &bounds);
    const int64_t q_len = bounds ? INT64_C(0) + p.cu_seqlens[r + 1] - p.cu_seqlens[r] : 0;
    int64_t pieces = 0;
    if (p.status[r] == 0) {
      pieces = round_up(q_len, shape.tokens_per_piece) / shape.tokens_per_piece *
               (p.num_kv_heads / shape.heads);
      work += 2.0 * q_len * p.kv_len[r] * p.num_q_heads * p.head_dim;
    } else {
      const float nan = kInfinity - kInfinity;
      for (int64_t i = 0; i < q_len; ++i) fill_token(p, p.cu_seqlens[r] + i, nan, nan);
    }
    memory.first_piece[r + 1] = memory.first_piece[r] + pieces;
  }
  return work;
}

Piece piece_at(const Params& p, const Shape& shape, const Memory& memory,
               const VerifyAttentionLoops& loops, int64_t index) {
  int64_t low = 0, high = p.num_requests;  // the last request that starts at or before `index`
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (memory.first_piece[middle] <= index ? low : high) = middle;
  }
  return Piece(p, shape, loops, low, index - memory.first_piece[low]);
}

void run_piece(const Piece& piece, const Scratch& s) {
  piece.load_queries(s);
  const int64_t first = piece.first_split(), last = piece.last_split();
  if (first < last) piece.run_split(s, first, s.total);
  for (int64_t split = first + 1; split < last; ++split) {
    piece.run_split(s, split, s.part);
    piece.merge(s.total, s.part, split);
  }
  piece.finish(s.total);
}

}  // namespace

size_t verify_attention_workspace(const Params& p) {
  const Shape shape(p);
  const int64_t floats =
      max_threads(p.num_threads) * shape.per_thread() + max_parts(p, shape) * shape.state();
  return static_cast<size_t>(round_up(p.num_requests + INT64_C(1), 8)) * sizeof(int64_t) +
         static_cast<size_t>(floats) * sizeof(float);
}

void verify_attention(const Params& p, void* data) {
  const Shape shape(p);
  const Memory memory = memory_of(p, shape, data);
  const VerifyAttentionLoops& loops = loops_in_use();
  const double work = lay_out(p, shape, memory);
  const int64_t pieces = memory.first_piece[p.num_requests];
  const double worth = work / kWorkPerThread;
  const int threads =
      thread_count(p.num_threads, worth < 1e6 ? static_cast<int64_t>(worth) + 1 : 1000000);
  const auto scratch = [&](int thread) {
    return Scratch(memory.threads + thread * shape.per_thread(), shape);
  };
  if (threads == 1 || pieces >= 2 * threads || pieces * shape.splits > max_parts(p, shape)) {
    parallel_for(threads, pieces, [&](int64_t index, int thread) {
      run_piece(piece_at(p, shape, memory, loops, index), scratch(thread));
    });
    return;
  }
  const auto part = [&](int64_t index, int64_t split) {
    return state_at(memory.parts + (index * shape.splits + split) * shape.state(), shape);
  };
  parallel_for(threads, pieces * shape.splits, [&](int64_t unit, int thread) {
    const int64_t index = unit / shape.splits, split = unit % shape.splits;
    const Piece piece = piece_at(p, shape, memory, loops, index);
    if (split < piece.first_split() || split >= piece.last_split()) return;
    piece.load_queries(scratch(thread));
    piece.run_split(scratch(thread), split, part(index, split));
  });
  parallel_for(threads, pieces, [&](int64_t index, int) {
    const Piece piece = piece_at(p, shape, memory, loops, index);
    const int64_t first = piece.first_split();
    for (int64_t split = first + 1; split < piece.last_split(); ++split) {
      piece.merge(part(index, first), part(index, split), split);
    }
    piece.finish(part(index, first));
  });
}

}  // namespace dspark::cpu
