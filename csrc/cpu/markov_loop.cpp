// SPDX-License-Identifier: Apache-2.0
//
// The Markov loop on the CPU. What does not depend on the previous token (the hidden part of the
// heads and of the confidence logit) is computed for all slots before the loop; a step is then:
// embed the previous tokens, finish the heads' inner vectors, one pass over W2 and U, draw.
// Threads share a step by vocabulary segments; nothing they compute depends on who does it. With a
// draft law on the M largest base logits those are selected before the loop, and threads share a
// step by requests.
#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "core/families.h"
#include "core/int8.h"
#include "cpu/arena.h"
#include "cpu/level.h"
#include "cpu/markov_loop_loops.h"
#include "cpu/parallel.h"

namespace dspark::cpu {
namespace {

using Params = dspark_markov_loop_params;

constexpr float kMinTemperature = 1e-3f;
constexpr int kHeadRows = 32;  // rows of a head matrix in one piece of work

// Rows of the linear layer of the head: none, [r, ...] or [3r, ...].
int32_t head_rows(const Params& p) {
  if (p.head == DSPARK_HEAD_VANILLA) return 0;
  return p.head == DSPARK_HEAD_GATED ? p.rank : 3 * p.rank;
}

struct Scratch {
  int32_t threads;
  int32_t segments;
  MarkovRow* rows;           // [R]
  int32_t* previous;         // [R] x_{k-1}
  float* embedding;          // [R, 2r] joint input [s; e] of a row; e is its second half
  float* inner;              // [R, r] what W2 multiplies (heads other than vanilla)
  float* raw;                // [R, head rows] linear layer of one step
  float* hidden_part;        // [R, gamma, head rows] its hidden part, all slots
  float* confidence_part;    // [R, gamma] hidden part of the confidence logit
  float* confidence_raw;     // [R] its embedding part at one step
  const float** hidden;      // [R, gamma] h_k of the active rows
  const float** vectors;     // [R] vectors of one job
  int16_t* quantised;        // [R, quantised_stride] vectors of an int8 W2
  int64_t quantised_stride;  // r and its padding
  double* log_mass;          // [R, segments]
  float* row_z;              // [R, segments, 128]
  int32_t* support;          // [R, gamma, members] columns of a restricted law, ascending
  int32_t* support_nan;      // [R, gamma] whether U has a NaN there
  int32_t members;           // min(M, V_d); 0 = full support
  MarkovThread* per_thread;  // [threads]
  size_t bytes;
};

Scratch carve(const Params& p, void* data) {
  Arena arena(data);
  const int64_t n = p.num_requests;
  const int64_t slots = n * p.gamma;
  const bool truncation = p.top_k != nullptr || p.top_p != nullptr;
  const bool hidden = p.hidden_size > 0;
  Scratch s{};
  s.threads = max_threads(p.num_threads);
  s.segments = (p.draft_vocab_size + kSegment - 1) / kSegment;
  s.rows = arena.take<MarkovRow>(n);
  s.previous = arena.take<int32_t>(n);
  s.embedding = arena.take<float>(n * 2 * p.rank);
  s.inner = arena.take<float>(n * p.rank);
  s.raw = arena.take<float>(n * head_rows(p));
  s.hidden_part = arena.take<float>(slots * head_rows(p));
  s.confidence_part = arena.take<float>(slots);
  s.confidence_raw = arena.take<float>(n);
  s.hidden = arena.take<const float*>(hidden ? slots : 0);
  s.vectors = arena.take<const float*>(n);
  s.quantised_stride = (p.rank + kIntPadding - 1) / kIntPadding * int64_t{kIntPadding};
  s.quantised = arena.take<int16_t>(p.w2_dtype == DSPARK_I8 ? n * s.quantised_stride : 0);
  s.members = p.topk_support < p.draft_vocab_size ? p.topk_support : p.draft_vocab_size;
  const int64_t full = s.members > 0 ? 0 : n;  // rows whose whole vocabulary takes part
  s.log_mass = arena.take<double>(full * s.segments);
  s.row_z = arena.take<float>(truncation ? full * s.segments * kSegment : 0);
  s.support = arena.take<int32_t>(slots * s.members);
  s.support_nan = arena.take<int32_t>(s.members > 0 ? slots : 0);
  s.per_thread = arena.take<MarkovThread>(s.threads);
  for (int32_t t = 0; t < s.threads; ++t) {
    MarkovThread thread{};
    thread.best = arena.take<MarkovBest>(n);
    thread.bias = arena.take<float>(full * kSegment);
    thread.noise = arena.take<Philox4>(n);
    thread.bins = arena.take<uint64_t>(truncation ? kTruncateBins : 0);
    thread.support.heap = arena.take<uint64_t>(s.members);
    thread.support.bias = arena.take<float>(s.members);
    thread.support.z = arena.take<float>(int64_t{kSegment} * s.members);
    thread.support.segment = arena.take<int32_t>(s.members);
    thread.support.maxima = arena.take<double>(s.members);
    thread.support.log_mass = arena.take<double>(s.members);
    if (s.per_thread != nullptr) s.per_thread[t] = thread;
  }
  s.bytes = arena.bytes();
  return s;
}

class Loop {
 public:
  Loop(const Params& p, void* data)
      : p_(p),
        s_(carve(p, data)),
        loops_(pick(baseline::kMarkovLoops, v3::kMarkovLoops, v4::kMarkovLoops)) {}

  void run() {
    for (int32_t r = 0; r < p_.num_requests; ++r) start(r);
    if (num_rows_ == 0) return;
    hidden_parts();
    if (s_.members > 0) select_supports();
    for (int32_t k = 0; k < p_.gamma; ++k) {
      embed();
      confidence(k);
      inner_vectors(k);
      if (p_.w2_dtype == DSPARK_I8) quantise_vectors();
      draw_slot(k);
    }
  }

 private:
  int32_t request(int32_t row) const { return s_.rows[row].request; }
  float* joint(int32_t row) const { return s_.embedding + int64_t{2} * row * p_.rank; }
  float* embedding(int32_t row) const { return joint(row) + p_.rank; }

  // Read the arguments of one request; what is out of range counts as greedy, or as off.
  void start(int32_t r) {
    if (p_.active != nullptr && p_.active[r] == 0) return;
    int32_t status = 0;
    float t = p_.temperature == nullptr ? 0.0f : p_.temperature[r];
    if (t != 0.0f && !(t >= kMinTemperature && std::isfinite(t))) {
      status |= DSPARK_BAD_PARAM;
      t = 0.0f;
    }
    float top_p = p_.top_p == nullptr ? 1.0f : p_.top_p[r];
    if (!(top_p > 0.0f && top_p <= 1.0f)) {
      status |= DSPARK_BAD_PARAM;
      top_p = 1.0f;
    }
    MarkovRow& row = s_.rows[num_rows_];
    row = MarkovRow{};
    row.request = r;
    row.greedy = t == 0.0f;
    row.temperature = row.greedy ? 1.0f : t;
    row.top_k = p_.top_k == nullptr ? 0 : p_.top_k[r];
    row.top_p = top_p;
    const bool cuts = (row.top_k > 0 && row.top_k < p_.draft_vocab_size) || top_p < 1.0f;
    row.truncated = !row.greedy && cuts;
    row.forced = p_.debug_uniform != nullptr;
    s_.previous[num_rows_] = p_.anchor[r];
    p_.status[r] = status;
    for (int32_t i = 0; i < p_.rank; ++i) joint(num_rows_)[i] = 0.0f;  // s_0 = 0
    ++num_rows_;
  }

  // out[v, i] = row_i . vector_v, rows of a head matrix shared among threads.
  void matrix(const float* weight, int64_t stride, int32_t rows, int32_t length,
              const float* const* vectors, int32_t num_vectors, float* out) {
    const int64_t pieces = (rows + kHeadRows - 1) / kHeadRows;
    parallel_for(p_.num_threads, pieces, [&](int64_t piece, int) {
      const int32_t first = static_cast<int32_t>(piece) * kHeadRows;
      Dots d{};
      d.matrix = weight + first * stride;
      d.dtype = DSPARK_F32;
      d.row_stride = stride;
      d.num_rows = rows - first < kHeadRows ? rows - first : kHeadRows;
      d.length = length;
      d.vectors = vectors;
      d.num_vectors = num_vectors;
      d.out = out + first;
      d.out_stride = rows;
      loops_.dots(d);
    });
  }

  // Columns of the head's matrix that multiply h_k: gated [h; e], rnn [s; e; h].
  int64_t head_stride() const {
    return p_.hidden_size + (p_.head == DSPARK_HEAD_GATED ? p_.rank : 2 * p_.rank);
  }

  void hidden_parts() {
    const int32_t rows = head_rows(p_);
    if (rows == 0 && p_.confidence_weight == nullptr) return;
    const int32_t slots = num_rows_ * p_.gamma;
    for (int32_t v = 0; v < slots; ++v) {
      s_.hidden[v] = p_.hidden + request(v / p_.gamma) * p_.hidden_request_stride +
                     v % p_.gamma * p_.hidden_slot_stride;
    }
    if (rows > 0) {
      const float* weight = p_.head_weight + (p_.head == DSPARK_HEAD_RNN ? 2 * p_.rank : 0);
      matrix(weight, head_stride(), rows, p_.hidden_size, s_.hidden, slots, s_.hidden_part);
    }
    if (p_.confidence_weight != nullptr) {
      matrix(p_.confidence_weight, 0, 1, p_.hidden_size, s_.hidden, slots, s_.confidence_part);
    }
  }

  // e = W1[x_{k-1}], the zero row when the id is no row of W1.
  void embed() {
    for (int32_t row = 0; row < num_rows_; ++row) {
      const int32_t id = s_.previous[row];
      const bool known = id >= 0 && id < p_.vocab_size;
      if (!known) p_.status[request(row)] |= DSPARK_BAD_DRAFT_ID;
      float* e = embedding(row);
      for (int32_t i = 0; i < p_.rank; ++i) {
        e[i] = known ? load_f32(p_.w1, p_.w1_dtype, id * p_.w1_stride + i) : 0.0f;
      }
      s_.vectors[row] = e;
    }
  }

  // w . [h_k; e] + b, before x_k is drawn: never a function of x_k.
  void confidence(int32_t k) {
    if (p_.confidence_weight == nullptr) return;
    const bool embedded = p_.confidence_size > p_.hidden_size;
    if (embedded) {
      matrix(p_.confidence_weight + p_.hidden_size, 0, 1, p_.rank, s_.vectors, num_rows_,
             s_.confidence_raw);
    }
    for (int32_t row = 0; row < num_rows_; ++row) {
      const float part = s_.confidence_part[row * p_.gamma + k];
      const float sum = embedded ? part + s_.confidence_raw[row] : part;
      p_.confidence_logit[int64_t{request(row)} * p_.gamma + k] = sum + p_.confidence_bias;
    }
  }

  // The r-vectors that W2 multiplies, one per row, into s_.vectors.
  void inner_vectors(int32_t k) {
    const int32_t n = head_rows(p_);
    if (n == 0) return;  // vanilla: the embeddings themselves
    const bool gated = p_.head == DSPARK_HEAD_GATED;
    for (int32_t row = 0; row < num_rows_; ++row) {
      s_.vectors[row] = gated ? embedding(row) : joint(row);
    }
    matrix(p_.head_weight + (gated ? p_.hidden_size : 0), head_stride(), n,
           gated ? p_.rank : 2 * p_.rank, s_.vectors, num_rows_, s_.raw);
    for (int32_t row = 0; row < num_rows_; ++row) {
      float* raw = s_.raw + int64_t{row} * n;
      const float* part = s_.hidden_part + (int64_t{row} * p_.gamma + k) * n;
      for (int32_t i = 0; i < n; ++i) raw[i] = (raw[i] + part[i]) + p_.head_bias[i];
      float* inner = s_.inner + int64_t{row} * p_.rank;
      if (gated) {
        loops_.gate(raw, embedding(row), inner, p_.rank);
      } else {
        loops_.recur(raw, joint(row), inner, p_.rank);
      }
      s_.vectors[row] = inner;
    }
  }

  // What an int8 W2 multiplies: the r-vectors as 16-bit integers (core/int8.h).
  void quantise_vectors() {
    for (int32_t row = 0; row < num_rows_; ++row) {
      const float* x = s_.vectors[row];
      uint32_t largest = 0;
      for (int32_t i = 0; i < p_.rank; ++i) {
        const uint32_t magnitude = int8_magnitude(x[i]);
        largest = magnitude > largest ? magnitude : largest;
      }
      const float quantum = int8_quantum(largest);
      const float inverse = int8_inverse(quantum);
      s_.rows[row].quantum = quantum;
      int16_t* q = s_.quantised + row * s_.quantised_stride;
      for (int32_t i = 0; i < p_.rank; ++i)
        q[i] = static_cast<int16_t>(int8_quantise(x[i], inverse));
      for (int64_t i = p_.rank; i < s_.quantised_stride; ++i) q[i] = 0;
    }
  }

  // The pass over W2 and U, then one token per row.
  void draw_slot(int32_t k) {
    for (int32_t t = 0; t < s_.threads; ++t) {
      for (int32_t row = 0; row < num_rows_; ++row) {
        s_.per_thread[t].best[row].key = 0;
        s_.per_thread[t].best[row].nan = 0;
      }
    }
    if (p_.debug_uniform != nullptr) {
      for (int32_t row = 0; row < num_rows_; ++row) {
        s_.rows[row].u53 = p_.debug_uniform[int64_t{request(row)} * p_.gamma + k];
      }
    }
    MarkovStep step{};
    step.params = &p_;
    step.slot = k;
    step.num_rows = num_rows_;
    step.num_segments = s_.segments;
    step.rows = s_.rows;
    step.vectors = s_.vectors;
    step.quantised = s_.quantised;
    step.quantised_stride = s_.quantised_stride;
    step.log_mass = s_.log_mass;
    step.row_z = s_.row_z;
    if (s_.members > 0) {
      draw_supports(step);
      return;
    }
    const int64_t chunks = (s_.segments + kMarkovChunk - 1) / kMarkovChunk;
    parallel_for(p_.num_threads, chunks,
                 [&](int64_t c, int t) { loops_.chunk(step, c, s_.per_thread[t]); });
    parallel_for(p_.num_threads, num_rows_, [&](int64_t row, int t) {
      const MarkovPick drawn = loops_.finish(step, static_cast<int32_t>(row), s_.per_thread,
                                             s_.threads, s_.per_thread[t].bins);
      emit(static_cast<int32_t>(row), k, drawn);
    });
  }

  // The columns of the M largest base logits of every slot: one pass over U.
  void select_supports() {
    const int64_t slots = int64_t{num_rows_} * p_.gamma;
    parallel_for(p_.num_threads, slots, [&](int64_t slot, int t) {
      const int32_t r = request(static_cast<int32_t>(slot / p_.gamma));
      const int64_t offset = r * p_.base_request_stride + slot % p_.gamma * p_.base_slot_stride;
      uint64_t* heap = s_.per_thread[t].support.heap;
      s_.support_nan[slot] = loops_.select_support(p_, offset, s_.members, heap);
      int32_t* columns = s_.support + slot * s_.members;
      for (int32_t i = 0; i < s_.members; ++i) {
        columns[i] = static_cast<int32_t>(~static_cast<uint32_t>(heap[i]));
      }
      std::sort(columns, columns + s_.members);
    });
  }

  void draw_supports(const MarkovStep& step) {
    parallel_for(p_.num_threads, num_rows_, [&](int64_t row, int t) {
      const int64_t slot = row * p_.gamma + step.slot;
      MarkovPick drawn =
          loops_.support(step, static_cast<int32_t>(row), s_.support + slot * s_.members,
                         s_.members, s_.per_thread[t]);
      drawn.nan |= s_.support_nan[slot];
      emit(static_cast<int32_t>(row), step.slot, drawn);
    });
  }

  void emit(int32_t row, int32_t k, const MarkovPick& drawn) {
    const int32_t r = request(row);
    const int64_t at = int64_t{r} * p_.gamma + k;
    const int32_t token =
        p_.draft_to_target == nullptr ? drawn.column : p_.draft_to_target[drawn.column];
    if (drawn.nan) p_.status[r] |= DSPARK_NAN_DRAFT;
    if (drawn.empty) p_.status[r] |= DSPARK_EMPTY_SUPPORT;
    p_.tokens[at] = token;
    p_.logit[at] = drawn.logit;
    if (p_.lse != nullptr) p_.lse[at] = drawn.lse;
    s_.previous[row] = token;
  }

  const Params& p_;
  Scratch s_;
  const MarkovLoops& loops_;
  int32_t num_rows_ = 0;
};

}  // namespace

size_t markov_loop_workspace(const dspark_markov_loop_params& p) { return carve(p, nullptr).bytes; }

void markov_loop(const dspark_markov_loop_params& p, void* scratch) { Loop(p, scratch).run(); }

}  // namespace dspark::cpu
