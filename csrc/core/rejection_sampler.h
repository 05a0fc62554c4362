// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CORE_REJECTION_SAMPLER_H_
#define DSPARK_CORE_REJECTION_SAMPLER_H_

#include "core/problems.h"
#include "dspark/rejection_sampler.h"

namespace dspark {

/// Record what is wrong with a call whose header was checked. `vocab`: ids of the whole vocabulary,
/// of which p->vocab_size may be one rank's.
void check_rejection_sampler(Problems& problems, const dspark_rejection_sampler_params* p,
                             int32_t vocab);

}  // namespace dspark

#endif  // DSPARK_CORE_REJECTION_SAMPLER_H_
