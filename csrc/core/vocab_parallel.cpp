// SPDX-License-Identifier: Apache-2.0
#include "dspark/vocab_parallel.h"

#include <initializer_list>

#include "core/dispatch.h"
#include "core/families.h"
#include "core/rejection_sampler.h"

namespace {

using Params = dspark_vocab_parallel_params;

bool check_headers(dspark::Problems& problems, const Params* p) {
  DSPARK_REQUIRE(problems, p != nullptr, "params: got NULL, expected a struct");
  if (p == nullptr) return false;
  DSPARK_REQUIRE(problems, p->struct_size == sizeof(Params),
                 "struct_size: got %u, expected %zu (header and library differ)", p->struct_size,
                 sizeof(Params));
  return p->struct_size == sizeof(Params) && dspark::check_header(problems, &p->call);
}

// The ids of all ranks; 0 when the shards are no partition.
int32_t check_shards(dspark::Problems& problems, const Params* p) {
  dspark::check_positive(problems, "num_ranks", p->num_ranks);
  DSPARK_REQUIRE(problems, p->rank >= 0 && p->rank < p->num_ranks, "rank: got %d, expected 0..%d",
                 p->rank, p->num_ranks - 1);
  dspark::check_pointer(problems, "shard_sizes", p->shard_sizes);
  if (!problems.none()) return 0;
  int64_t segments = 0;
  int64_t vocab = 0;
  for (int32_t k = 0; k < p->num_ranks; ++k) {
    DSPARK_REQUIRE(problems, p->shard_sizes[k] >= 1, "shard_sizes[%d]: got %d, expected >= 1", k,
                   p->shard_sizes[k]);
    vocab += p->shard_sizes[k];
    segments += (int64_t{p->shard_sizes[k]} + DSPARK_SEGMENT - 1) / DSPARK_SEGMENT;
  }
  DSPARK_REQUIRE(problems, segments <= 1 << 19,
                 "shard_sizes: got %lld segments of 128 ids, expected at most 2^19",
                 static_cast<long long>(segments));
  DSPARK_REQUIRE(problems, p->call.vocab_size == p->shard_sizes[p->rank],
                 "call.vocab_size: got %d, expected shard_sizes[%d] = %d", p->call.vocab_size,
                 p->rank, p->shard_sizes[p->rank]);
  return problems.none() ? static_cast<int32_t>(vocab) : 0;
}

void check_served(dspark::Problems& problems, const dspark_rejection_sampler_params& c) {
  const struct {
    const char* name;
    const void* array;
  } others[] = {{"top_k", c.top_k},
                {"top_p", c.top_p},
                {"min_p", c.min_p},
                {"repetition_penalty", c.repetition_penalty},
                {"presence_penalty", c.presence_penalty},
                {"frequency_penalty", c.frequency_penalty},
                {"min_tokens_left", c.min_tokens_left},
                {"target_lse", c.target_lse}};
  for (const auto& other : others) {
    DSPARK_SUPPORTED(problems, other.array == nullptr,
                     "call.%s: got an array; a split vocabulary serves token_mask, logit_bias and "
                     "temperature",
                     other.name);
  }
  DSPARK_SUPPORTED(problems, c.top_logprobs == 0,
                   "call.top_logprobs: got %d; a split vocabulary lists none", c.top_logprobs);
}

void check(dspark::Problems& problems, const Params* p) {
  const int32_t vocab = check_shards(problems, p);
  check_served(problems, p->call);
  if (vocab > 0) dspark::check_rejection_sampler(problems, &p->call, vocab);
}

using Backends = dspark::Backends<Params>;

#ifdef DSPARK_WITH_CUDA
#define DSPARK_PHASE(phase)                                                          \
  Backends {                                                                         \
    dspark::cpu::vocab_parallel_workspace, dspark::cpu::vocab_parallel_##phase,      \
        dspark::cuda::vocab_parallel_workspace, dspark::cuda::vocab_parallel_##phase \
  }
#else
#define DSPARK_PHASE(phase)                                                                      \
  Backends {                                                                                     \
    dspark::cpu::vocab_parallel_workspace, dspark::cpu::vocab_parallel_##phase, nullptr, nullptr \
  }
#endif

// What one of the calls reads or writes beside the others.
struct Array {
  const char* name;
  const void* (*of)(const Params&);
};
constexpr Array kScan = {"scan", [](const Params& p) -> const void* { return p.scan; }};
constexpr Array kScans = {"scans", [](const Params& p) -> const void* { return p.scans; }};
constexpr Array kDraw = {"draw", [](const Params& p) -> const void* { return p.draw; }};
constexpr Array kDraws = {"draws", [](const Params& p) -> const void* { return p.draws; }};

dspark_status run(const char* name, const Backends& backends, std::initializer_list<Array> arrays,
                  dspark_device device, const Params* params, const dspark_workspace& workspace,
                  void* stream) {
  dspark::Problems problems(name);
  if (!check_headers(problems, params)) return problems.status();
  check(problems, params);
  for (const Array& array : arrays) {
    if (params->call.num_requests == 0) break;
    dspark::check_pointer(problems, array.name, array.of(*params));
  }
  return dspark::finish_call(problems, backends, device, *params, workspace, stream);
}

}  // namespace

extern "C" {

dspark_status dspark_vocab_parallel_workspace(dspark_device device, const Params* params,
                                              size_t* bytes) {
  dspark::Problems problems("dspark_vocab_parallel_workspace");
  if (!check_headers(problems, params)) return problems.status();
  dspark::check_gamma(problems, params->call.gamma);
  check_shards(problems, params);
  return dspark::finish_workspace(problems, DSPARK_PHASE(scan), device, *params, bytes);
}

dspark_status dspark_vocab_parallel_scan(dspark_device device, const Params* params,
                                         dspark_workspace workspace, void* stream) {
  return run("dspark_vocab_parallel_scan", DSPARK_PHASE(scan), {kScan}, device, params, workspace,
             stream);
}

dspark_status dspark_vocab_parallel_draw(dspark_device device, const Params* params,
                                         dspark_workspace workspace, void* stream) {
  return run("dspark_vocab_parallel_draw", DSPARK_PHASE(draw), {kScans, kDraw}, device, params,
             workspace, stream);
}

dspark_status dspark_vocab_parallel_finish(dspark_device device, const Params* params,
                                           dspark_workspace workspace, void* stream) {
  return run("dspark_vocab_parallel_finish", DSPARK_PHASE(finish), {kScans, kDraws}, device, params,
             workspace, stream);
}

}  // extern "C"
