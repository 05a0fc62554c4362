// SPDX-License-Identifier: Apache-2.0
//
// dspark: the operators of DSpark speculative decoding (arXiv 2607.05147), torch-free.
// One header a family; this one includes them all.
#ifndef DSPARK_DSPARK_H_
#define DSPARK_DSPARK_H_

#include "dspark/confidence.h"
#include "dspark/device.h"
#include "dspark/markov_loop.h"
#include "dspark/paged_kv.h"
#include "dspark/prefix_scheduler.h"
#include "dspark/rejection_sampler.h"
#include "dspark/types.h"
#include "dspark/verify_attention.h"
#include "dspark/vocab_parallel.h"

#endif  // DSPARK_DSPARK_H_
