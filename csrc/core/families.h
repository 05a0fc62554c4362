// SPDX-License-Identifier: Apache-2.0
//
// What a backend implements. core/<family>.cpp checks the arguments, then calls one of these; no
// backend checks again. A workspace size may depend on sizes only (and, with CUDA, on the current
// device). A CUDA backend can fail where the runtime refuses, so its functions return a status.
#ifndef DSPARK_CORE_FAMILIES_H_
#define DSPARK_CORE_FAMILIES_H_

#include "dspark/dspark.h"

namespace dspark::cpu {

size_t confidence_workspace(const dspark_confidence_params& p);
void confidence(const dspark_confidence_params& p, void* scratch);

size_t markov_loop_workspace(const dspark_markov_loop_params& p);
void markov_loop(const dspark_markov_loop_params& p, void* scratch);

size_t prefix_scheduler_workspace(const dspark_prefix_scheduler_params& p);
void prefix_scheduler(const dspark_prefix_scheduler_params& p, void* scratch);

size_t paged_kv_workspace(const dspark_paged_kv_params& p);
void paged_kv(const dspark_paged_kv_params& p, void* scratch);
void paged_kv_commit(const dspark_paged_kv_commit_params& p);

size_t verify_attention_workspace(const dspark_verify_attention_params& p);
void verify_attention(const dspark_verify_attention_params& p, void* scratch);

size_t rejection_sampler_workspace(const dspark_rejection_sampler_params& p);
void rejection_sampler(const dspark_rejection_sampler_params& p, void* scratch);

size_t vocab_parallel_workspace(const dspark_vocab_parallel_params& p);
void vocab_parallel_scan(const dspark_vocab_parallel_params& p, void* scratch);
void vocab_parallel_draw(const dspark_vocab_parallel_params& p, void* scratch);
void vocab_parallel_finish(const dspark_vocab_parallel_params& p, void* scratch);

}  // namespace dspark::cpu

// Defined in cuda/<family>/launch.cu, present only in a build with CUDA. The calls are asynchronous
// on `stream`, a cudaStream_t.
namespace dspark::cuda {

dspark_status confidence_workspace(const dspark_confidence_params& p, size_t* bytes);
dspark_status confidence(const dspark_confidence_params& p, void* scratch, void* stream);

dspark_status markov_loop_workspace(const dspark_markov_loop_params& p, size_t* bytes);
dspark_status markov_loop(const dspark_markov_loop_params& p, void* scratch, void* stream);

dspark_status prefix_scheduler_workspace(const dspark_prefix_scheduler_params& p, size_t* bytes);
dspark_status prefix_scheduler(const dspark_prefix_scheduler_params& p, void* scratch,
                               void* stream);

dspark_status rejection_sampler_workspace(const dspark_rejection_sampler_params& p, size_t* bytes);
dspark_status rejection_sampler(const dspark_rejection_sampler_params& p, void* scratch,
                                void* stream);

dspark_status paged_kv_workspace(const dspark_paged_kv_params& p, size_t* bytes);
dspark_status paged_kv(const dspark_paged_kv_params& p, void* scratch, void* stream);
dspark_status paged_kv_commit(const dspark_paged_kv_commit_params& p, void* stream);

dspark_status verify_attention_workspace(const dspark_verify_attention_params& p, size_t* bytes);
dspark_status verify_attention(const dspark_verify_attention_params& p, void* scratch,
                               void* stream);

dspark_status vocab_parallel_workspace(const dspark_vocab_parallel_params& p, size_t* bytes);
dspark_status vocab_parallel_scan(const dspark_vocab_parallel_params& p, void* scratch,
                                  void* stream);
dspark_status vocab_parallel_draw(const dspark_vocab_parallel_params& p, void* scratch,
                                  void* stream);
dspark_status vocab_parallel_finish(const dspark_vocab_parallel_params& p, void* scratch,
                                    void* stream);

}  // namespace dspark::cuda

#endif  // DSPARK_CORE_FAMILIES_H_
