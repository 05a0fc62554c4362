// SPDX-License-Identifier: Apache-2.0
//
// Verification on the CPU. A request walks its rows in order and stops at the first rejection, so
// rows behind it are never touched. Requests go to threads; with fewer requests than threads, the
// segments of each row do. Nothing a row leaves behind depends on either split.
#include "cpu/rejection_sampler.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/families.h"
#include "cpu/level.h"
#include "cpu/parallel.h"
#include "cpu/request.h"

namespace dspark::cpu {
namespace {

constexpr float kNegInf = -__builtin_inff();

// Requests side by side; 1 when the segments of a row are what the threads share.
int lanes_of(const dspark_rejection_sampler_params& p) {
  const int threads = max_threads(p.num_threads);
  return p.num_requests >= threads ? threads : 1;
}

// Hands out pieces of the workspace, each on a cache line of its own.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <class T>
  void take(T** field, size_t count) {
    if (base_ != nullptr) *field = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

size_t lay_out(char* base, int32_t vocab, RowScratch* t) {
  const size_t segments = static_cast<size_t>(segments_of(vocab));
  const size_t chunks = (segments + kChunk - 1) / kChunk;
  Arena arena(base);
  arena.take(&t->z, segments * kSegment);
  arena.take(&t->max, segments);
  arena.take(&t->sum, segments);
  arena.take(&t->raw_max, segments);
  arena.take(&t->raw_sum, segments);
  arena.take(&t->residual, segments);
  arena.take(&t->flags, chunks);
  arena.take(&t->best, chunks);
  arena.take(&t->order, segments * kSegment);
  arena.take(&t->histogram, kBuckets);
  return arena.used();
}

size_t lane_bytes(int32_t vocab) {
  RowScratch unused{};
  return (sizeof(Lane) + 63) / 64 * 64 + lay_out(nullptr, vocab, &unused);
}

bool same_penalties(const Penalties& a, const Penalties& b) {
  if (!penalised(a) && !penalised(b)) return true;
  return a.repetition == b.repetition && a.presence == b.presence && a.frequency == b.frequency &&
         a.counts == b.counts && a.prompt == b.prompt && a.drafts == b.drafts &&
         a.num_drafts == b.num_drafts && a.anchor == b.anchor;
}

bool same_law(const RowLaw& a, const RowLaw& b) {
  return a.logits == b.logits && a.mask == b.mask && a.bias == b.bias && a.dtype == b.dtype &&
         a.num_stops == b.num_stops && (a.num_stops == 0 || a.stops == b.stops) &&
         same_penalties(a.penalties, b.penalties) && a.vocab == b.vocab &&
         a.temperature == b.temperature && a.min_p == b.min_p && a.top_p == b.top_p &&
         a.top_k == b.top_k;
}

// body(begin, end, piece) over all segments; returns the number of pieces.
template <class Body>
int32_t over_segments(const Lane& lane, const Body& body) {
  const int32_t segments = lane.segments;
  if (lane.threads <= 1) {
    body(0, segments, 0);
    return 1;
  }
  const int32_t pieces = (segments + kChunk - 1) / kChunk;
  parallel_for(lane.threads, pieces, [&](int64_t i, int) {
    const int32_t begin = static_cast<int32_t>(i) * kChunk;
    const int32_t end = begin + kChunk < segments ? begin + kChunk : segments;
    body(begin, end, static_cast<int32_t>(i));
  });
  return pieces;
}

// The same for the columns of a draft row, of which there are at most as many as ids.
template <class Body>
int32_t over_columns(const Lane& lane, int32_t columns, const Body& body) {
  return over_segments(lane, [&](int32_t begin, int32_t end, int32_t piece) {
    const int32_t first = begin * kSegment < columns ? begin * kSegment : columns;
    body(first, end * kSegment < columns ? end * kSegment : columns, piece);
  });
}

}  // namespace

void normalise(Lane& lane, double mass) {
  lane.mass = mass;
  lane.empty = mass == 0.0;
  lane.row.top = static_cast<double>(lane.top);
  lane.row.log_mass = log_mass_of(mass);
}

void normalise_raw(Lane& lane, float top, double mass) {
  lane.raw_mass = mass;
  lane.raw_top = static_cast<double>(top);
  lane.raw_log_mass = log_mass_of(mass);
}

void analyse(Lane& lane, const RowLaw& law) {
  if (lane.valid && same_law(lane.row.law, law)) return;
  RowView& row = lane.row;
  const RowScratch& t = row.scratch;
  const RejectionLoops& loops = *lane.loops;
  row.law = law;
  row.cut = no_cut();
  lane.valid = true;
  const int32_t pieces = over_segments(lane, [&](int32_t begin, int32_t end, int32_t piece) {
    t.flags[piece] = loops.scan(row, begin, end) ? 1 : 0;
  });
  lane.nan = false;
  for (int32_t i = 0; i < pieces; ++i) lane.nan |= t.flags[i] != 0;

  const double temperature = static_cast<double>(law.temperature);
  const double mass = loops.mass_sum(t.max, t.sum, lane.segments, temperature, &lane.top);
  normalise(lane, mass);
  normalise_raw(lane, lane.top, mass);
  if (raw_differs(law)) {
    float top;
    const double raw = loops.mass_sum(t.raw_max, t.raw_sum, lane.segments, 1.0, &top);
    normalise_raw(lane, top, raw);
  }
  if (lane.empty || !truncated(law)) return;

  row.cut = find_cut(loops, row, lane.segments, lane.top, mass);
  over_segments(
      lane, [&](int32_t begin, int32_t end, int32_t) { loops.restrict_support(row, begin, end); });
  const double kept = loops.mass_sum(t.max, t.sum, lane.segments, temperature, &lane.top);
  normalise(lane, kept);
}

bool draft_has_nan(const Lane& lane, const DraftRow& draft) {
  const int32_t pieces =
      over_columns(lane, draft.vocab, [&](int32_t begin, int32_t end, int32_t i) {
        lane.row.scratch.flags[i] = lane.loops->draft_nan(draft, begin, end) ? 1 : 0;
      });
  bool nan = false;
  for (int32_t i = 0; i < pieces; ++i) nan |= lane.row.scratch.flags[i] != 0;
  return nan;
}

float logit_of(const Lane& lane, int32_t token) {
  float z[kSegment];
  lane.loops->segment(lane.row, token / kSegment, z);
  return z[token % kSegment];
}

double log_prob(const Lane& lane, float z) {
  const RowView& row = lane.row;
  return log_prob_of(z, row.top, row.log_mass, row.law.temperature);
}

float raw_logit(const Lane& lane, int32_t token) {
  const RowLaw& law = lane.row.law;
  return clean_logit(load_f32(law.logits, law.dtype, token), largest_finite(law.dtype));
}

double raw_log_prob(const Lane& lane, int32_t token) {
  const RowLaw& law = lane.row.law;
  const float x = load_f32(law.logits, law.dtype, token);
  return raw_log_prob_of(x, law.dtype, lane.raw_top, lane.raw_log_mass);
}

int32_t argmax(const Lane& lane) {
  const float* max = lane.row.scratch.max;
  int32_t s = 0;
  while (max[s] != lane.top) ++s;
  float z[kSegment];
  lane.loops->segment(lane.row, s, z);
  int32_t i = 0;
  while (z[i] != lane.top) ++i;
  return s * kSegment + i;
}

int32_t lowest_allowed(const Lane& lane) {
  const RowLaw& law = lane.row.law;
  for (int32_t id = 0; id < law.vocab; ++id) {
    bool allowed = law.mask == nullptr || (law.mask[id >> 5] >> (id & 31) & 1u) != 0;
    for (int32_t j = 0; allowed && j < law.num_stops; ++j) allowed = law.stops[j] != id;
    if (allowed) return id;
  }
  return 0;
}

namespace {

// Put `key` into the sorted list of at most `n`; returns its length.
int32_t insert(uint64_t* keys, int32_t size, int32_t n, uint64_t key) {
  int32_t i = size < n ? size : n - 1;
  for (; i > 0 && keys[i - 1] > key; --i) keys[i] = keys[i - 1];
  keys[i] = key;
  return size < n ? size + 1 : n;
}

}  // namespace

void list_top(const Lane& lane, bool raw, const TopList& list) {
  const RowView& row = lane.row;
  // Largest logits of the segments under the law that is listed; a truncation has cut those of an
  // unprocessed row.
  const bool cut = raw && !raw_differs(row.law) && truncated(row.law);
  const float* max = raw && raw_differs(row.law) ? row.scratch.raw_max : row.scratch.max;
  uint64_t keys[DSPARK_MAX_TOP_LOGPROBS];
  int32_t size = 0;
  for (int32_t s = 0; s < lane.segments && list.n > 0; ++s) {
    // Ids ascend, so a segment whose largest logit ties with the last of a full list stays outside.
    const bool full = size == list.n;
    if (!cut && full && rank_key(max[s], s * kSegment) > keys[size - 1]) continue;
    float z[kSegment];
    raw ? lane.loops->raw_segment(row, s, z) : lane.loops->segment(row, s, z);
    for (int32_t i = 0; i < kSegment; ++i) {
      if (z[i] == kNegInf) continue;
      const uint64_t key = rank_key(z[i], s * kSegment + i);
      if (size < list.n || key < keys[size - 1]) size = insert(keys, size, list.n, key);
    }
  }
  for (int32_t j = 0; j < list.n; ++j) {
    list.ids[j] = j < size ? static_cast<int32_t>(keys[j] & 0xffffffffu) : -1;
    list.logprob[j] = kNegInf;
    if (j >= size) continue;
    const double value =
        raw ? raw_log_prob(lane, list.ids[j]) : log_prob(lane, logit_of(lane, list.ids[j]));
    list.logprob[j] = static_cast<float>(value);
  }
}

namespace {

// An id of the winning segment, by the integer weights; when all of these are 0, the last id with
// positive weight.
int32_t pick_inside(const float* w, uint64_t u53) {
  const int picked = inner_pick(w, u53);
  if (picked >= 0) return picked;
  int last = kSegment - 1;
  while (last > 0 && !(w[last] > 0.0f)) --last;
  return last;
}

Drawn draw_from(const Lane& lane, const float* sums, const DraftRow* draft, int32_t without,
                const RowDraw& d) {
  const RowView& row = lane.row;
  const RowScratch& t = row.scratch;
  const DrawStream noise{d.seed, d.position, d.distance, d.segment_kind};
  const double temperature = static_cast<double>(row.law.temperature);
  const int32_t pieces = over_segments(lane, [&](int32_t begin, int32_t end, int32_t piece) {
    t.best[piece] = lane.loops->best_key(t.max, sums, temperature, noise, d.forced != nullptr,
                                         lane.first_segment, begin, end);
  });
  uint64_t best = 0;
  for (int32_t i = 0; i < pieces; ++i) best = t.best[i] > best ? t.best[i] : best;
  if (best == 0) return Drawn{0, -1};
  const int32_t s = static_cast<int32_t>(packed_segment(best)) - lane.first_segment;
  float w[kSegment];
  lane.loops->weights(row, draft, s, w);
  if (without >= 0 && without / kSegment == s) w[without % kSegment] = 0.0f;
  return Drawn{best, s * kSegment + pick_inside(w, forced_or_u53(d, d.segment_kind + 1))};
}

}  // namespace

Drawn sample_row(const Lane& lane, const RowDraw& d) {
  return draw_from(lane, lane.row.scratch.sum, nullptr, -1, d);
}

namespace {

// Weight sum of the segment of `token` without it.
float sum_without(const Lane& lane, int32_t token) {
  float w[kSegment];
  lane.loops->weights(lane.row, nullptr, token / kSegment, w);
  w[token % kSegment] = 0.0f;
  return halving_sum(w);
}

// Sums of segments relative to their maxima, as a share of the whole row.
double share_of(const Lane& lane, const float* sums) {
  float top;
  const RowView& row = lane.row;
  const double temperature = static_cast<double>(row.law.temperature);
  return lane.loops->mass_sum(row.scratch.max, sums, lane.segments, temperature, &top) / lane.mass;
}

}  // namespace

Drawn sample_without(const Lane& lane, int32_t token, const RowDraw& d) {
  const RowScratch& t = lane.row.scratch;
  const int32_t s = token / kSegment;
  const float whole = t.sum[s];
  t.sum[s] = sum_without(lane, token);
  const Drawn drawn = draw_from(lane, t.sum, nullptr, token, d);
  t.sum[s] = whole;
  return drawn;
}

double share_without(const Lane& lane, int32_t token) {
  const RowScratch& t = lane.row.scratch;
  const int32_t s = token / kSegment;
  const float whole = t.sum[s];
  t.sum[s] = sum_without(lane, token);
  const double share = share_of(lane, t.sum);
  t.sum[s] = whole;
  return share;
}

namespace {

void fill_residual(const Lane& lane, const DraftRow& draft) {
  over_segments(lane, [&](int32_t begin, int32_t end, int32_t) {
    lane.loops->residual(lane.row, draft, begin, end);
  });
}

}  // namespace

double residual_share(const Lane& lane, const DraftRow& draft) {
  fill_residual(lane, draft);
  return share_of(lane, lane.row.scratch.residual);
}

Drawn sample_residual(const Lane& lane, const DraftRow& draft, const RowDraw& d) {
  fill_residual(lane, draft);
  return draw_from(lane, lane.row.scratch.residual, &draft, -1, d);
}

size_t lanes_bytes(const dspark_rejection_sampler_params& p) {
  return static_cast<size_t>(lanes_of(p)) * lane_bytes(p.vocab_size);
}

namespace {

/// Ids of a row that are worth a thread: fewer take less time than threads need to meet.
constexpr int32_t kIdsPerThread = 1 << 15;

int row_threads(const dspark_rejection_sampler_params& p) {
  const int worth = std::max(1, p.vocab_size / kIdsPerThread);
  return std::min(worth, max_threads(p.num_threads));
}

}  // namespace

Lanes set_up_lanes(const dspark_rejection_sampler_params& p, void* scratch) {
  const Lanes lanes{static_cast<char*>(scratch), lane_bytes(p.vocab_size), lanes_of(p)};
  for (int i = 0; i < lanes.count; ++i) {
    Lane& lane = lanes.at(i);
    lane = Lane{};
    lay_out(reinterpret_cast<char*>(&lane) + (sizeof(Lane) + 63) / 64 * 64, p.vocab_size,
            &lane.row.scratch);
    lane.loops = &pick(baseline::rejection_loops, v3::rejection_loops, v4::rejection_loops);
    lane.segments = segments_of(p.vocab_size);
    lane.threads = lanes.count > 1 ? 1 : row_threads(p);
  }
  return lanes;
}

size_t rejection_sampler_workspace(const dspark_rejection_sampler_params& p) {
  return lanes_bytes(p);
}

void rejection_sampler(const dspark_rejection_sampler_params& p, void* scratch) {
  const Lanes lanes = set_up_lanes(p, scratch);
  parallel_for(lanes.count, p.num_requests,
               [&](int64_t r, int thread) { verify_request(p, r, lanes.at(thread)); });
}

}  // namespace dspark::cpu
