// SPDX-License-Identifier: Apache-2.0
//
// The fast build checks no memory accesses.
#include "simt/checker.h"
#include "simt/memory_map.h"

namespace dspark::simt {

struct check::Agent {};

namespace check {

void begin_launch(Grid&) {}
void end_launch(std::string*) {}
void begin_block(Block&) {}
void end_block(Block&) {}
void meet(Block&, const std::vector<Fiber*>&) {}
void arrive(Block&, Fiber*, const void*) {}
void learn(Block&, Fiber*, const void*) {}
void atomic(const void*, size_t, Atomic, Order, Site) {}
void fence() {}

void access(const void*, size_t, bool, Site) {}
void release(const void*) {}
void acquire(const void*) {}
void forget(const void*) {}
void await_launches() {}
AgentPtr start_agent() { return nullptr; }
void access(const AgentPtr&, const void*, size_t, bool, Site) {}
void release(const AgentPtr&, const void*) {}
void join(const AgentPtr&) {}
void pending(const AgentPtr&, const void*, size_t, Site) {}

}  // namespace check
}  // namespace dspark::simt

extern "C" {

DSPARK_API int dspark_simt_checks(void) { return 0; }
DSPARK_API void dspark_simt_register(const void*, size_t, const char*) {}
DSPARK_API void dspark_simt_forget(void) {}

}  // extern "C"
