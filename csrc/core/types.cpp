// SPDX-License-Identifier: Apache-2.0
#include "dspark/types.h"

#include "cpu/level.h"

namespace {

struct Bit {
  int32_t bit;
  const char* name;
  const char* text;
};

constexpr Bit kBits[] = {
    {DSPARK_NAN_TARGET, "NAN_TARGET", "a target logit that was needed is NaN (counts as -inf)"},
    {DSPARK_NAN_DRAFT, "NAN_DRAFT", "a draft logit, logit value or lse that was needed is NaN"},
    {DSPARK_NAN_CONFIDENCE, "NAN_CONFIDENCE",
     "a confidence input is NaN (counts as probability 0)"},
    {DSPARK_EMPTY_SUPPORT, "EMPTY_SUPPORT",
     "no id has positive mass: lowest allowed id emitted, else 0"},
    {DSPARK_BAD_DRAFT_ID, "BAD_DRAFT_ID", "a draft or anchor id is out of range or has q = 0"},
    {DSPARK_BAD_PARAM, "BAD_PARAM", "a per-request parameter is out of its range"},
    {DSPARK_ZERO_RESIDUAL, "ZERO_RESIDUAL",
     "the residual has no mass: the token comes from p itself"},
    {DSPARK_FORCED_REJECT, "FORCED_REJECT",
     "a draft was refused without a coin (p = 0 or no valid law)"},
    {DSPARK_STOPPED, "STOPPED", "the round ended at a stop id or at max_new_tokens"},
    {DSPARK_KV_OVERFLOW, "KV_OVERFLOW", "a position lies beyond the request's page table"},
    {DSPARK_BAD_PAGE, "BAD_PAGE", "a page id in use is negative or >= num_pages"},
    {DSPARK_SYNTHETIC, "SYNTHETIC", "acceptance was made up for a benchmark: not the target's law"},
};

const Bit* find(int32_t bit) {
  for (const Bit& b : kBits) {
    if (b.bit == bit) return &b;
  }
  return nullptr;
}

}  // namespace

extern "C" {

const char* dspark_status_name(int32_t bit) {
  const Bit* b = find(bit);
  return b == nullptr ? nullptr : b->name;
}

const char* dspark_status_describe(int32_t bit) {
  const Bit* b = find(bit);
  return b == nullptr ? nullptr : b->text;
}

const char* dspark_version(void) { return DSPARK_VERSION; }

const char* dspark_cpu_level(void) { return dspark::cpu::level_name(dspark::cpu::level()); }

}  // extern "C"
