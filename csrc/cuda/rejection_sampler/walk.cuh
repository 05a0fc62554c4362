// SPDX-License-Identifier: Apache-2.0
//
// The rules of verification for one request: between two operations of the whole team thread 0 of
// every CTA decides what comes next. All of them see the same numbers and come to the same end; the
// first CTA writes. Every operation of the kernel stands once in its text, so the rules are a
// machine of stages instead of calls.
#ifndef DSPARK_CUDA_REJECTION_SAMPLER_WALK_CUH_
#define DSPARK_CUDA_REJECTION_SAMPLER_WALK_CUH_

#include "cuda/rejection_sampler/draw.cuh"

namespace dspark::cuda::verify {

/// What the team does next.
enum class Op : int32_t { kNone, kScan, kDraw, kList, kDone };

/// Where thread 0 goes on.
enum class Turn : int32_t {
  kStart,
  kRow,           // look at row `i`
  kTold,          // the engine knows lse and z of the draft
  kToldRejected,  // and the coin was against it: the row is there now
  kJudge,         // the row is there
  kDrawn,         // a token
  kRecord,        // write the token
  kEmit,          // count it
  kShared,        // block: the share that the residual keeps
  kReach,         // block: the draft's log-probability
  kReached,       // block: on to the next row?
  kDecide,        // block: how many are accepted
  kLast,          // block: the token behind them
  kPublish,       // kRows: what the row says
  kFinish
};

/// Why rule `block` looked at no more rows.
enum class End : int32_t {
  kBonus,    // all drafts seen, or no draft at this row: a token of p
  kRefused,  // the draft here has no valid law, or p has no mass: a token of p
  kNever     // P is 0 behind this row
};

struct Walk {
  int64_t r;
  Sampling s;
  int32_t status, accepted, emitted, finish;
  Op op;
  Turn turn;
  bool scan_target, scan_draft;  // of kScan
  int32_t i, draft;              // the row; its draft, or -1
  float draft_z;                 // processed logit of the draft before the cut
  float draft_raw;               // and as it came
  Told told;
  bool unread;    // the draft was accepted by what the engine told
  int32_t flag;   // of the draft, as in the results
  int32_t token;  // to be recorded, with its processed logit
  float z;
  double log_q;
  int32_t tokens[DSPARK_MAX_GAMMA + 1];
  // Rule block: rows 0..last were seen.
  bool deciding;
  int32_t last;
  End end;
  uint32_t stored;                         // bit i: the law of draft i is stored, not one-hot
  double log_reach[DSPARK_MAX_GAMMA + 1];  // log P_i
  double chance[DSPARK_MAX_GAMMA + 1];     // h_i
};

/// Thread 0's view.
struct Walker {
  const Params& p;
  Walk& w;
  Row& row;
  Draw& draw;
  bool writes;  // the first CTA of the team
  bool rows;    // Phase::kRows

  __device__ __forceinline__ void go(Turn turn) const { w.turn = turn; }
  __device__ __forceinline__ void run(Op op, Turn behind) const {
    w.op = op;
    w.turn = behind;
  }
  __device__ __forceinline__ void scan(bool target, bool law, Turn behind) const {
    w.scan_target = target;
    w.scan_draft = law;
    run(Op::kScan, behind);
  }
  __device__ __forceinline__ bool coin(int32_t i, double ratio, DrawKind kind) const {
    return throw_coin(p, w.r, i, ratio, kind);
  }
  __device__ __forceinline__ void set_flag(int32_t i, int32_t flag) const {
    if (writes) p.accepted[w.r * p.gamma + i] = static_cast<int8_t>(flag);
  }
  __device__ __forceinline__ void mark_unobserved(int32_t i) const {
    for (int32_t j = i; j < w.s.length; ++j) set_flag(j, -1);
  }

  __device__ __forceinline__ void draw_from(Source source, DrawKind kind, Turn behind) const {
    draw = Draw{};
    draw.source = source;
    draw.without = w.draft;
    draw.numbers = row_draw(p, w.r, w.i, kind);
    run(Op::kDraw, behind);
  }
  __device__ __forceinline__ void residual(bool stored, Turn behind) const {
    draw_from(stored ? Source::kResidual : Source::kWithout, kResidualSegment, behind);
  }
  /// What plain decoding would emit here: rules greedy and match.
  __device__ __forceinline__ void target_choice() const {
    const bool greedy = w.s.temperature == 0.0f && !row.empty;
    draw_from(greedy ? Source::kArgmax : Source::kTarget, kTargetSegment, Turn::kDrawn);
  }
  __device__ __forceinline__ void bonus() const {
    if (w.s.temperature == 0.0f || w.s.rule == DSPARK_RULE_MATCH) {
      target_choice();
    } else {
      draw_from(Source::kTarget, kBonusSegment, Turn::kDrawn);
    }
  }

  __device__ __forceinline__ DraftLaw judge() const {
    w.log_q = 0.0;
    if (!has_law(p, w.s)) return DraftLaw::kOneHot;
    return judge_law(row.draft, p.draft_logit[w.r * p.gamma + w.i], row.look, &w.log_q);
  }
  __device__ __forceinline__ void refuse(DraftLaw law) const {
    if (law == DraftLaw::kNone) w.status |= DSPARK_NAN_DRAFT;
    if (law == DraftLaw::kDisorder) w.status |= DSPARK_BAD_DRAFT_ID;
    w.status |= DSPARK_FORCED_REJECT;
  }
  __device__ __forceinline__ float draft_logit() const {
    if (row.empty) return kMinusInf;
    return row.cuts && !inside(row.cut, w.draft_z, w.draft) ? kMinusInf : w.draft_z;
  }
  __device__ __forceinline__ double log_p(float z) const {
    return log_prob_of(z, row.top, row.log_mass, row.law.temperature);
  }

  __device__ __forceinline__ void start() const {
    w.status = w.accepted = w.emitted = w.finish = 0;
    w.s = read_sampling(p, w.r, &w.status);
    w.deciding = false;
    w.stored = 0;
    w.log_reach[0] = 0.0;
    if (writes && !rows) {
      for (int32_t j = 0; j < p.gamma; ++j) set_flag(j, -2);
      p.next_anchor[w.r] = -1;
    }
    const bool takes = w.s.cap > 0 && w.s.length >= w.i;
    if (takes && w.s.rule == DSPARK_RULE_SYNTHETIC) w.status |= DSPARK_SYNTHETIC;
    go(takes ? Turn::kRow : Turn::kFinish);
  }

  __device__ __forceinline__ void look_at_row() const {
    w.draft = draft_of(p, w.r, w.s, w.i, p.vocab_size, &w.status);
    row.law = row_law(p, w.r, w.s, w.i);
    const bool asks = w.s.rule == DSPARK_RULE_TOKEN || w.s.rule == DSPARK_RULE_BLOCK;
    const bool law = w.draft >= 0 && asks && has_law(p, w.s);
    row.look = DraftLook{};
    row.draft.vocab = 0;
    w.draft_z = w.draft_raw = kMinusInf;
    w.unread = false;
    if (law) row.draft = stored_law(p, w.r, w.s, w.i);
    const bool known = w.draft >= 0 && told_of(p, w.s, row.law, w.i, &w.told);
    if (known && !law) {
      go(Turn::kTold);
    } else {
      scan(!known, law, rows ? Turn::kPublish : known ? Turn::kTold : Turn::kJudge);
    }
  }

  /// Rule `token` at a row that was not read.
  __device__ __forceinline__ void told() const {
    const DraftLaw law = judge();
    if (law != DraftLaw::kStored && law != DraftLaw::kOneHot) {
      scan(true, false, Turn::kJudge);
      return;
    }
    w.flag = coin(w.i, ratio_of(w.told.log_p - w.log_q), kAccept) ? 1 : 0;
    w.unread = w.flag == 1;
    if (w.unread) {
      go(Turn::kRecord);
    } else {
      scan(true, false, Turn::kToldRejected);
    }
  }

  __device__ __forceinline__ void verify_token() const {
    const DraftLaw law = judge();
    w.flag = 0;
    if (law == DraftLaw::kZero) {
      w.status |= DSPARK_BAD_DRAFT_ID;
      w.flag = -2;
      bonus();
    } else if (law == DraftLaw::kNone || law == DraftLaw::kDisorder) {
      refuse(law);
      draw_from(Source::kTarget, kResidualSegment, Turn::kDrawn);
    } else {
      const float z = draft_logit();
      if (z == kMinusInf) w.status |= DSPARK_FORCED_REJECT;
      if (z != kMinusInf && coin(w.i, ratio_of(log_p(z) - w.log_q), kAccept)) {
        accept(z);
      } else {
        residual(law == DraftLaw::kStored, Turn::kDrawn);
      }
    }
  }
  __device__ __forceinline__ void accept(float z) const {
    w.flag = 1;
    w.token = w.draft;
    w.z = z;
    go(Turn::kRecord);
  }

  /// The row is there.
  __device__ __forceinline__ void judge_row() const {
    if (row.nan) w.status |= DSPARK_NAN_TARGET;
    if (w.s.rule == DSPARK_RULE_BLOCK) {
      w.deciding ? go(Turn::kLast) : visit();
    } else if (w.draft < 0) {
      w.flag = -2;
      bonus();
    } else if (w.s.rule == DSPARK_RULE_TOKEN) {
      verify_token();
    } else if (w.s.rule == DSPARK_RULE_SYNTHETIC) {
      w.flag = 0;
      if (coin(w.i, synthetic_rate(w.s, w.i), kSynthetic)) {
        accept(draft_logit());
      } else {
        bonus();
      }
    } else {
      target_choice();
    }
  }

  __device__ __forceinline__ void drawn() const {
    if (draw.had_none) w.status |= DSPARK_ZERO_RESIDUAL;
    if (draw.no_mass) w.status |= DSPARK_EMPTY_SUPPORT;
    w.token = draw.token;
    w.z = draw.z;
    const bool compares = w.s.rule == DSPARK_RULE_GREEDY || w.s.rule == DSPARK_RULE_MATCH;
    if (compares && w.draft >= 0) w.flag = w.token == w.draft && !row.empty ? 1 : 0;
    go(Turn::kRecord);
  }

  /// The logit of a token as it came. What the row said of the draft is there, and z itself came so
  /// unless a processor or a cut has been at it: memory is not asked again, which thread 0 would
  /// wait for.
  __device__ __forceinline__ float as_it_came(int32_t token, float z) const {
    if (token == w.draft) return w.draft_raw;
    const bool changed = z == kMinusInf || processed(row.law);
    return changed ? load_f32(row.law.logits, row.law.dtype, token) : z;
  }

  /// Write a token of row i; whether there are lists to be written too.
  __device__ __forceinline__ bool write(int32_t i, int32_t token, float z) const {
    w.tokens[i] = token;
    const int64_t at = w.r * (p.gamma + 1) + i;
    const double raw =
        raw_log_prob_of(as_it_came(token, z), row.law.dtype, row.raw_top, row.raw_log_mass);
    if (writes) {
      p.tokens[at] = token;
      p.logprob[at] = z == kMinusInf ? z : static_cast<float>(log_p(z));
      p.logprob_raw[at] = static_cast<float>(raw);
    }
    return p.top_logprobs > 0;
  }

  __device__ __forceinline__ void record() const {
    const bool block = w.s.rule == DSPARK_RULE_BLOCK;
    if (!block && w.draft >= 0) {
      set_flag(w.i, w.flag);
      w.accepted += w.flag == 1 ? 1 : 0;
      if (w.flag == 0) mark_unobserved(w.i + 1);
    }
    go(Turn::kEmit);
    if (w.unread) {
      const int64_t at = w.r * (p.gamma + 1) + w.i;
      w.tokens[w.i] = w.draft;
      if (!writes) return;
      p.tokens[at] = w.draft;
      p.logprob[at] = static_cast<float>(w.told.log_p);
      p.logprob_raw[at] = w.told.log_p_raw;
    } else if (write(w.i, w.token, w.z)) {
      run(Op::kList, Turn::kEmit);
    }
  }

  /// Count the next token as emitted; true when the round ends behind it.
  __device__ __forceinline__ bool emit() const {
    const int32_t token = w.tokens[w.emitted];
    if (writes) p.next_anchor[w.r] = token;
    w.emitted += 1;
    w.finish = finish_of(p, w.r, w.s, token, w.emitted, &w.status);
    return w.finish != DSPARK_FINISH_NONE;
  }
  __device__ __forceinline__ void emit_row() const {
    const bool stop = emit();
    const bool on = !stop && w.s.rule != DSPARK_RULE_BLOCK && w.flag == 1;
    w.i += on ? 1 : 0;
    go(on ? Turn::kRow : Turn::kFinish);
  }

  // Rule block (docs/rejection_sampler.md). Row i when drafts 1..i have P_i > 0.
  __device__ __forceinline__ void visit() const {
    const double reach = w.log_reach[w.i];
    w.last = w.i;
    w.end = End::kBonus;
    w.chance[w.i] = exp_f64(reach);
    go(Turn::kDecide);
    if (w.draft < 0) return;
    const DraftLaw law = judge();
    if (law == DraftLaw::kZero) {
      w.status |= DSPARK_BAD_DRAFT_ID;
      return;
    }
    if (law == DraftLaw::kNone || law == DraftLaw::kDisorder || row.empty) {
      refuse(law);
      w.end = End::kRefused;
      return;
    }
    const bool stored = law == DraftLaw::kStored;
    if (stored) w.stored |= 1u << w.i;
    row.draft.lse += reach;  // max(0, P p - q) = P max(0, p - q / P)
    go(Turn::kReach);
    if (w.i == 0) return;
    residual(stored, Turn::kShared);
    draw.shares = true;
  }
  __device__ __forceinline__ void reach() const {
    go(Turn::kReached);
    if (write(w.i, w.draft, draft_logit())) run(Op::kList, Turn::kReached);
  }
  __device__ __forceinline__ void reached() const {
    const float z = draft_logit();
    w.end = End::kNever;
    go(Turn::kDecide);
    if (z == kMinusInf) {
      w.status |= DSPARK_FORCED_REJECT;
      return;
    }
    const double next = w.log_reach[w.i] + log_p(z) - w.log_q;
    w.log_reach[w.i + 1] = next < 0.0 ? next : 0.0;
    if (!(exp_f64(w.log_reach[w.i + 1]) > 0.0)) return;
    w.i += 1;
    go(Turn::kRow);
  }
  __device__ __forceinline__ void decide() const {
    int32_t accepted = w.last;
    while (accepted > 0 && !coin(accepted - 1, w.chance[accepted], kAccept)) --accepted;
    go(Turn::kFinish);
    for (int32_t i = 0; i < accepted; ++i) {
      set_flag(i, 1);
      w.accepted += 1;
      if (emit()) return;
    }
    if (accepted < w.last || w.end != End::kBonus) {
      set_flag(accepted, 0);
      mark_unobserved(accepted + 1);
    }
    w.deciding = true;
    w.i = accepted;
    go(accepted == w.last ? Turn::kLast : Turn::kRow);  // the last row is still there
  }
  /// The token behind the accepted drafts; row i is there.
  __device__ __forceinline__ void last() const {
    const bool stored = (w.stored >> w.i & 1u) != 0;
    if (w.i == w.last && w.end == End::kBonus) {
      draw_from(Source::kTarget, kBonusSegment, Turn::kDrawn);
    } else if (w.i == w.last && w.end == End::kRefused) {
      draw_from(Source::kTarget, kResidualSegment, Turn::kDrawn);
    } else {
      if (w.i < w.last) row.draft.lse += w.log_reach[w.i];
      residual(stored, Turn::kDrawn);
    }
  }

  __device__ __forceinline__ void finish() const {
    if (writes && !rows) {
      p.num_accepted[w.r] = w.accepted;
      p.num_emitted[w.r] = w.emitted;
      p.finish[w.r] = w.finish;
      p.status[w.r] = w.status;
    }
    w.op = Op::kDone;
  }

  /// Go on until the team has something to do.
  __device__ __forceinline__ void advance() const {
    w.op = Op::kNone;
#pragma unroll 1
    while (w.op == Op::kNone) {
      switch (w.turn) {
        case Turn::kStart:
          start();
          break;
        case Turn::kRow:
          look_at_row();
          break;
        case Turn::kTold:
          told();
          break;
        case Turn::kToldRejected:
          if (row.nan) w.status |= DSPARK_NAN_TARGET;
          residual(has_law(p, w.s), Turn::kDrawn);
          break;
        case Turn::kJudge:
          judge_row();
          break;
        case Turn::kDrawn:
          drawn();
          break;
        case Turn::kRecord:
          record();
          break;
        case Turn::kEmit:
          emit_row();
          break;
        case Turn::kShared:
          w.chance[w.i] = chance_of(w.log_reach[w.i], draw.share);
          go(Turn::kReach);
          break;
        case Turn::kReach:
          reach();
          break;
        case Turn::kReached:
          reached();
          break;
        case Turn::kDecide:
          decide();
          break;
        case Turn::kLast:
          last();
          break;
        case Turn::kPublish:
        case Turn::kFinish:
          finish();
          break;
      }
    }
  }
};

}  // namespace dspark::cuda::verify

#endif  // DSPARK_CUDA_REJECTION_SAMPLER_WALK_CUH_
