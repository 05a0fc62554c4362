// SPDX-License-Identifier: Apache-2.0
//
// Hot loops of the rejection sampler, compiled once a SIMD level. Only static functions and plain
// loops: the linker must not lend the AVX-512 copy of anything to the others. Sums have one fixed
// shape inside a segment (halving) and are exact over segments, so every level gives the same bits.
#include "core/dtype.h"
#include "core/math.h"
#include "cpu/rejection_sampler.h"

namespace dspark::cpu::DSPARK_SIMD {
namespace {

#define DSPARK_LOOP static inline __attribute__((always_inline))

constexpr float kNegInf = -__builtin_inff();

DSPARK_LOOP int32_t ids_in(int32_t vocab, int32_t segment) {
  const int32_t left = vocab - segment * kSegment;
  return left < kSegment ? left : kSegment;
}

// Elements of segment s as float, -inf behind the end of the row.
DSPARK_LOOP void load(const void* data, int32_t dtype, int32_t vocab, int32_t s, float* x) {
  const int64_t first = static_cast<int64_t>(s) * kSegment;
  const int32_t n = ids_in(vocab, s);
  if (n < kSegment) {
    for (int i = 0; i < kSegment; ++i) x[i] = kNegInf;
  }
  if (dtype == DSPARK_F32) {
    const float* p = static_cast<const float*>(data) + first;
    for (int i = 0; i < n; ++i) x[i] = p[i];
  } else if (dtype == DSPARK_BF16) {
    const uint16_t* p = static_cast<const uint16_t*>(data) + first;
    for (int i = 0; i < n; ++i) x[i] = bf16_to_f32(p[i]);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(data) + first;
    for (int i = 0; i < n; ++i) x[i] = f16_to_f32(p[i]);
  }
}

// NaN becomes -inf, +inf the largest finite value; returns whether there was a NaN.
DSPARK_LOOP bool clean(float* x, float largest) {
  int32_t nan = 0;
#pragma omp simd reduction(| : nan)
  for (int i = 0; i < kSegment; ++i) {
    nan |= x[i] != x[i] ? 1 : 0;
    x[i] = clean_logit(x[i], largest);
  }
  return nan != 0;
}

DSPARK_LOOP float maximum(const float* x) {
  float m = kNegInf;
#pragma omp simd reduction(max : m)
  for (int i = 0; i < kSegment; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// exp((z - m) / T); m is finite.
DSPARK_LOOP void weigh(const float* z, float m, float scale, float* w) {
#pragma omp simd
  for (int i = 0; i < kSegment; ++i) w[i] = weight_of(z[i], m, scale);
}

DSPARK_LOOP float weight_sum(const float* z, float m, float scale) {
  float w[kSegment];
  if (m == kNegInf) return 0.0f;
  weigh(z, m, scale, w);
  return halving_sum(w);
}

// How often the ids of segment s are in the output so far; whether any is.
DSPARK_LOOP bool count(const Penalties& p, int32_t n, int32_t s, int32_t* counts) {
  const int32_t first = s * kSegment;
  for (int i = 0; i < kSegment; ++i) counts[i] = 0;
  int32_t any = 0;
  if (p.counts != nullptr) {
    const int32_t* source = p.counts + first;
#pragma omp simd reduction(| : any)
    for (int i = 0; i < n; ++i) {
      const int32_t c = source[i] > 0 ? source[i] : 0;
      counts[i] = c;
      any |= c;
    }
  }
  for (int j = -1; j < p.num_drafts; ++j) {
    const int32_t id = j < 0 ? p.anchor : p.drafts[j];
    if (id < first || id >= first + n) continue;
    counts[id - first] += 1;
    any = 1;
  }
  return any != 0;
}

// Ids of segment s that are in the prompt, as 0 or 1; whether any is.
DSPARK_LOOP bool in_prompt(const Penalties& p, int32_t n, int32_t s, int32_t* seen) {
  for (int i = 0; i < kSegment; ++i) seen[i] = 0;
  if (p.prompt == nullptr) return false;
  const uint32_t* words = p.prompt + static_cast<int64_t>(s) * (kSegment / 32);
  uint32_t any = 0;
  for (int word = 0; 32 * word < n; ++word) {
    const uint32_t bits = words[word];
    any |= bits;
    for (int i = 0; i < 32; ++i) seen[32 * word + i] = static_cast<int32_t>(bits >> i & 1u);
  }
  return any != 0;
}

// Returns whether a logit has changed: most segments of a row hold nothing that was said.
DSPARK_LOOP bool penalise(const Penalties& p, int32_t n, int32_t s, float* x) {
  int32_t counts[kSegment];
  int32_t seen[kSegment];
  const bool counted = count(p, n, s, counts);
  const bool prompted = in_prompt(p, n, s, seen);
  if (!counted && !prompted) return false;
  float out[kSegment];
#pragma omp simd
  for (int i = 0; i < kSegment; ++i) {
    out[i] = penalise_logit(p, x[i], counts[i], seen[i] != 0);
  }
  for (int i = 0; i < kSegment; ++i) x[i] = out[i];
  return true;
}

// Token mask, bias, min-tokens, penalties. A masked id is at -inf whatever its bias; a NaN that
// they make is looked for once, at the end.
DSPARK_LOOP bool process(const RowLaw& law, int32_t s, float* x) {
  const int32_t n = ids_in(law.vocab, s);
  if (law.bias != nullptr) {
    const float* bias = law.bias + static_cast<int64_t>(s) * kSegment;
    for (int i = 0; i < n; ++i) x[i] += bias[i];
  }
  if (law.mask != nullptr) {
    const uint32_t* words = law.mask + static_cast<int64_t>(s) * (kSegment / 32);
    for (int word = 0; 32 * word < n; ++word) {
      const uint32_t bits = words[word];
      for (int i = 0; i < 32; ++i) {
        x[32 * word + i] = (bits >> i & 1u) != 0 ? x[32 * word + i] : kNegInf;
      }
    }
  }
  const int32_t first = s * kSegment;
  for (int j = 0; j < law.num_stops; ++j) {
    if (law.stops[j] >= first && law.stops[j] < first + n) x[law.stops[j] - first] = kNegInf;
  }
  const bool penalty = penalised(law.penalties) && penalise(law.penalties, n, s, x);
  return (law.bias != nullptr || penalty) && clean(x, largest_finite(DSPARK_F32));
}

DSPARK_LOOP void cut_off(const Cut& cut, int32_t s, float* z) {
  const int32_t first = s * kSegment;
  for (int i = 0; i < kSegment; ++i) {
    z[i] = inside(cut, z[i], first + i) ? z[i] : kNegInf;
  }
}

bool scan(const RowView& row, int32_t begin, int32_t end) {
  const RowLaw& law = row.law;
  const RowScratch& t = row.scratch;
  const float scale = weight_scale(law.temperature);
  const float largest = largest_finite(law.dtype);
  const bool raw = raw_differs(law);
  const bool keep = truncated(law);
  bool nan = false;
  for (int32_t s = begin; s < end; ++s) {
    float x[kSegment];
    load(law.logits, law.dtype, law.vocab, s, x);
    nan |= clean(x, largest);
    if (raw) {
      t.raw_max[s] = maximum(x);
      t.raw_sum[s] = weight_sum(x, t.raw_max[s], weight_scale(1.0f));
      nan |= process(law, s, x);
    }
    t.max[s] = maximum(x);
    t.sum[s] = weight_sum(x, t.max[s], scale);
    if (keep) {
      float* z = t.z + static_cast<int64_t>(s) * kSegment;
      for (int i = 0; i < kSegment; ++i) z[i] = x[i];
    }
  }
  return nan;
}

void segment(const RowView& row, int32_t s, float* z) {
  if (truncated(row.law)) {
    const float* kept = row.scratch.z + static_cast<int64_t>(s) * kSegment;
    for (int i = 0; i < kSegment; ++i) z[i] = kept[i];
    cut_off(row.cut, s, z);
    return;
  }
  load(row.law.logits, row.law.dtype, row.law.vocab, s, z);
  clean(z, largest_finite(row.law.dtype));
  process(row.law, s, z);
}

void raw_segment(const RowView& row, int32_t s, float* x) {
  load(row.law.logits, row.law.dtype, row.law.vocab, s, x);
  clean(x, largest_finite(row.law.dtype));
}

void restrict_support(const RowView& row, int32_t begin, int32_t end) {
  const RowScratch& t = row.scratch;
  const float scale = weight_scale(row.law.temperature);
  for (int32_t s = begin; s < end; ++s) {
    if (t.max[s] < row.cut.z) {
      t.max[s] = kNegInf;
      t.sum[s] = 0.0f;
      continue;
    }
    float z[kSegment];
    segment(row, s, z);
    t.max[s] = maximum(z);
    t.sum[s] = weight_sum(z, t.max[s], scale);
  }
}

// First column whose target id is >= id.
DSPARK_LOOP int32_t lower_column(const int32_t* targets, int32_t n, int32_t id) {
  int32_t lo = 0;
  while (n > 0) {
    const int32_t half = n / 2;
    if (targets[lo + half] < id) {
      lo += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return lo;
}

// Draft logits of the target ids of segment s, -inf where the draft has no column. `column` is the
// first column at or behind the segment, and is moved on.
DSPARK_LOOP void load_draft(const DraftRow& draft, int32_t s, int32_t* column, float* q) {
  if (draft.targets == nullptr) {
    load(draft.logits, draft.dtype, draft.vocab, s, q);
  } else {
    const int32_t first = s * kSegment;
    for (int i = 0; i < kSegment; ++i) q[i] = kNegInf;
    int32_t c = *column;
    for (; c < draft.vocab && draft.targets[c] < first + kSegment; ++c) {
      if (draft.targets[c] >= first) {
        q[draft.targets[c] - first] = load_f32(draft.logits, draft.dtype, c);
      }
    }
    *column = c;
  }
  clean(q, largest_finite(draft.dtype));
}

// Times -expm1(min(0, log q - log p)). The difference is formed in double, so that q close to p
// leaves what is really there; only then is it narrowed.
DSPARK_LOOP void apply_residual(const RowView& row, const DraftRow& draft, const float* z,
                                const float* q, float* w) {
  const double inverse_p = 1.0 / static_cast<double>(row.law.temperature);
  const double inverse_q = 1.0 / draft.temperature;
#pragma omp simd
  for (int i = 0; i < kSegment; ++i) {
    const double lp = (static_cast<double>(z[i]) - row.top) * inverse_p - row.log_mass;
    const double lq = static_cast<double>(q[i]) * inverse_q - draft.lse;
    const float d = static_cast<float>(lq - lp);
    const float factor = d < 0.0f ? -expm1_f32(d) : 0.0f;
    w[i] = z[i] == kNegInf ? 0.0f : w[i] * factor;
  }
}

void residual(const RowView& row, const DraftRow& draft, int32_t begin, int32_t end) {
  const RowScratch& t = row.scratch;
  const float scale = weight_scale(row.law.temperature);
  int32_t column =
      draft.targets == nullptr ? 0 : lower_column(draft.targets, draft.vocab, begin * kSegment);
  for (int32_t s = begin; s < end; ++s) {
    float z[kSegment], q[kSegment], w[kSegment];
    // Without a column in the segment q is 0 there and p stays as it is: most segments of a top-M.
    const bool untouched =
        draft.targets != nullptr && (column == draft.vocab || draft.targets[column] / kSegment > s);
    t.residual[s] = untouched ? t.sum[s] : 0.0f;
    if (untouched) continue;
    load_draft(draft, s, &column, q);
    if (t.max[s] == kNegInf) continue;
    segment(row, s, z);
    weigh(z, t.max[s], scale, w);
    apply_residual(row, draft, z, q, w);
    t.residual[s] = halving_sum(w);
  }
}

bool draft_nan(const DraftRow& draft, int32_t begin, int32_t end) {
  int32_t nan = 0;
  if (draft.dtype == DSPARK_F32) {
    const float* x = static_cast<const float*>(draft.logits);
#pragma omp simd reduction(| : nan)
    for (int32_t i = begin; i < end; ++i) nan |= x[i] != x[i] ? 1 : 0;
    return nan != 0;
  }
  const uint16_t* x = static_cast<const uint16_t*>(draft.logits);
  const uint16_t infinity = draft.dtype == DSPARK_BF16 ? 0x7f80 : 0x7c00;
  uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int32_t i = begin; i < end; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest > infinity;
}

void weights(const RowView& row, const DraftRow* draft, int32_t s, float* w) {
  float z[kSegment];
  segment(row, s, z);
  const float m = row.scratch.max[s];
  if (m == kNegInf) {
    for (int i = 0; i < kSegment; ++i) w[i] = 0.0f;
    return;
  }
  weigh(z, m, weight_scale(row.law.temperature), w);
  if (draft == nullptr) return;
  float q[kSegment];
  int32_t column =
      draft->targets == nullptr ? 0 : lower_column(draft->targets, draft->vocab, s * kSegment);
  load_draft(*draft, s, &column, q);
  apply_residual(row, *draft, z, q, w);
}

double mass_sum(const float* max, const float* sum, int32_t segments, double temperature,
                float* largest) {
  float top = kNegInf;
  for (int32_t s = 0; s < segments; ++s) top = max[s] > top ? max[s] : top;
  *largest = top;
  if (top == kNegInf) return 0.0;
  double high = 0.0, low = 0.0;
#pragma omp simd reduction(+ : high, low)
  for (int32_t s = 0; s < segments; ++s) {
    add_exactly(relative_mass(sum[s], max[s], top, temperature), &high, &low);
  }
  return high + low;
}

// Words of segments [s, s + 4 draws), s a multiple of 4.
DSPARK_LOOP void noise_words(const DrawStream& noise, int32_t s, int draws, uint32_t* words) {
  const uint64_t position = static_cast<uint64_t>(noise.position);
#pragma omp simd
  for (int i = 0; i < draws; ++i) {
    const Philox4 counter{{static_cast<uint32_t>(s / 4 + i), static_cast<uint32_t>(position),
                           static_cast<uint32_t>(position >> 32),
                           noise.kind << 8 | noise.distance}};
    const Philox4 r = philox4x32_10(counter, static_cast<uint32_t>(noise.seed),
                                    static_cast<uint32_t>(noise.seed >> 32));
    words[4 * i] = r.w[0];
    words[4 * i + 1] = r.w[1];
    words[4 * i + 2] = r.w[2];
    words[4 * i + 3] = r.w[3];
  }
}

struct KeyRow {
  const float* max;
  const float* sum;
  double temperature;
  bool equal_noise;
  int32_t first;  // segment of the vocabulary that the arrays begin with
};

DSPARK_LOOP uint64_t chunk_best(const KeyRow& row, const uint32_t* words, int32_t s, int32_t n) {
  double key[kChunk];
#pragma omp simd
  for (int32_t i = 0; i < n; ++i) {
    const float sum = row.sum[s + i];
    const double mass = sum > 0.0f ? static_cast<double>(sum) : 1.0;
    const double g = row.equal_noise ? 0.0 : gumbel(words[i]);
    key[i] = static_cast<double>(row.max[s + i]) / row.temperature + log_f64(mass) + g;
  }
  uint64_t best = 0;
  for (int32_t i = 0; i < n; ++i) {
    const uint64_t packed =
        row.sum[s + i] > 0.0f ? pack_key(key[i], static_cast<uint32_t>(row.first + s + i)) : 0;
    best = packed > best ? packed : best;
  }
  return best;
}

// Best key of segments [s, s + n) if it may beat `best`. A weight sum is at most 128 (its log is
// below 4.86) and noise falls with its word, so the largest logit and the smallest word bound the
// chunk, and most chunks end there.
DSPARK_LOOP uint64_t chunk_key(const KeyRow& row, const DrawStream& noise, int32_t s, int32_t n,
                               uint64_t best) {
  float top = kNegInf;
#pragma omp simd reduction(max : top)
  for (int32_t i = 0; i < n; ++i) top = row.max[s + i] > top ? row.max[s + i] : top;
  if (top == kNegInf) return best;
  uint32_t drawn[kChunk + 4];
  const int32_t segment = row.first + s;
  const int32_t skipped = segment & 3;
  const uint32_t* words = drawn + skipped;
  if (skipped + n <= 4) {
    const Philox4 r = draw(noise, static_cast<uint32_t>(segment) >> 2);
    for (int i = 0; i < 4; ++i) drawn[i] = r.w[i];
  } else {
    noise_words(noise, segment - skipped, kChunk / 4 + (skipped > 0 ? 1 : 0), drawn);
  }
  uint32_t smallest = 0xffffffffu;
#pragma omp simd reduction(min : smallest)
  for (int32_t i = 0; i < n; ++i) smallest = words[i] < smallest ? words[i] : smallest;
  if (best != 0) {
    // -log(-log(1 - v)) <= -log(v), and v >= 2^-(leading zeros + 1): no logarithm at all.
    const int zeros = smallest == 0 ? 32 : __builtin_clz(smallest);
    const double g = row.equal_noise ? 0.0 : 0.69314719 * (zeros + 1);
    const double bound = static_cast<double>(top) / row.temperature + 4.86 + g;
    if (pack_key(bound, static_cast<uint32_t>(segment)) <= best) return best;
  }
  const uint64_t found = chunk_best(row, words, s, n);
  return found > best ? found : best;
}

// The chunk of the largest logit first: it usually wins, and then screens the others.
uint64_t best_key(const float* max, const float* sum, double temperature, const DrawStream& noise,
                  bool equal_noise, int32_t number, int32_t begin, int32_t end) {
  const KeyRow row{max, sum, temperature, equal_noise, number};
  float top = kNegInf;
  int32_t first = begin;
  for (int32_t s = begin; s < end; s += kChunk) {
    const int32_t n = end - s < kChunk ? end - s : kChunk;
    float m = kNegInf;
#pragma omp simd reduction(max : m)
    for (int32_t i = 0; i < n; ++i) m = max[s + i] > m ? max[s + i] : m;
    first = m > top ? s : first;
    top = m > top ? m : top;
  }
  uint64_t best = chunk_key(row, noise, first, end - first < kChunk ? end - first : kChunk, 0);
  for (int32_t s = begin; s < end; s += kChunk) {
    const int32_t n = end - s < kChunk ? end - s : kChunk;
    if (s != first) best = chunk_key(row, noise, s, n, best);
  }
  return best;
}

void histogram(const RowView& row, float top, float scale, int32_t begin, int32_t end) {
  const RowScratch& t = row.scratch;
  const float weight = weight_scale(row.law.temperature);
  const double grid = mass_grid(row.law.vocab);
  for (int32_t s = begin; s < end; ++s) {
    if (!((top - t.max[s]) * scale < static_cast<float>(kBuckets))) continue;
    const float* z = t.z + static_cast<int64_t>(s) * kSegment;
    int32_t bucket[kSegment];
    float w[kSegment];
    const float outside = static_cast<float>(kBuckets);
#pragma omp simd
    for (int i = 0; i < kSegment; ++i) {
      const float at = (top - z[i]) * scale;
      bucket[i] = static_cast<int32_t>(at < outside ? at : outside);
    }
    weigh(z, top, weight, w);
    for (int i = 0; i < kSegment; ++i) {
      if (bucket[i] == kBuckets) continue;
      t.histogram[bucket[i]] += static_cast<uint64_t>(static_cast<double>(w[i]) * grid);
    }
  }
}

}  // namespace

const RejectionLoops rejection_loops = {scan,     restrict_support, draft_nan, residual,
                                        segment,  raw_segment,      weights,   mass_sum,
                                        best_key, histogram};

}  // namespace dspark::cpu::DSPARK_SIMD
