// SPDX-License-Identifier: Apache-2.0
//
// What kernels and the emulated primitives ask of the runner. README.md tells how it works and what
// a new primitive needs.
#ifndef DSPARK_TESTS_SIMT_RUNTIME_H_
#define DSPARK_TESTS_SIMT_RUNTIME_H_

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <memory>
#include <source_location>

#include "simt/vector_types.h"

namespace dspark::simt {

/// Where in a kernel's source something was asked for. Taken as a default argument.
using Site = std::source_location;

/// One CUDA thread, as far as kernels see it.
struct Thread {
  uint3 thread_index, block_index;
  dim3 block_dim, grid_dim;
  unsigned linear;  ///< number in the block
  unsigned lane, warp;
  alignas(16) unsigned char in[192];   ///< what it brings to a warp collective
  alignas(16) unsigned char out[192];  ///< what it takes away
};

/// The thread that runs; null outside of kernels.
Thread* self();
/// Where the running thread last asked for something: for reports from a collective's finish.
Site last_site();

/// End the launch with a report: "<kernel>: block (..) thread (..): <text>". For what a GPU would
/// answer with a fault, a hang or garbage.
[[noreturn]] void fail(Site site, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- shared memory ------------------------------------------------------------------------------

/// The block's dynamic shared memory.
void* dynamic_shared();
/// Offset of a shared address in the block's window: dynamic memory from 0 (1024-byte aligned, like
/// the memory itself), static memory behind it. An error for other memory.
uint32_t shared_offset(const void* pointer);
/// The address with this offset.
void* shared_pointer(uint32_t offset);
/// The same shared variable in another block of this launch that is running. An error if it is not.
void* peer_shared(void* own, unsigned block, Site site = Site::current());

/// For mutation.py: whether the operation `name` at this place is to be left out, or made weaker.
bool left_out(const char* name, Site site);

// ---- barriers and warps -------------------------------------------------------------------------

enum class Vote { kNone, kOr, kAnd, kCount };
/// __syncthreads() and its voting forms.
int block_barrier(Vote vote, int predicate, Site site);
/// Barrier `id` of a part of the block; `wait`: stay until `threads` threads have arrived.
void named_barrier(int id, int threads, bool wait, Site site);

/// Meet the lanes of `mask`. The last one runs `finish(lanes, mask)`, lanes[i] being lane i, which
/// reads their `in` and fills their `out`. Lanes that meet in different operations are an error.
/// Only __syncwarp() orders memory: CUDA promises nothing of the kind for shuffles and votes.
using Finish = void (*)(Thread* const* lanes, unsigned mask);
void warp_collective(unsigned mask, Finish finish, const char* what, Site site,
                     bool orders_memory = false);

// ---- waiting ------------------------------------------------------------------------------------

/// Something has changed that another thread may be waiting for.
void progress();
/// Let others run until something has changed. `what` names the wait in a dead-lock's report.
void wait_for_progress(const char* what, Site site);
/// What a wait is for, put into words when a report wants them.
class Explanation {
 public:
  virtual std::string text() const = 0;

 protected:
  ~Explanation() = default;
};
/// Let others run until `word`, of which each change is followed by progress(), has changed.
void wait_for_change(const uint64_t& word, const Explanation& why, Site site);
/// Wait until `ready()` holds.
template <class Ready>
void wait_until(Ready ready, const char* what, Site site) {
  while (!ready()) wait_for_progress(what, site);
}

// ---- atomics ------------------------------------------------------------------------------------

enum class Order { kRelaxed, kAcquire, kRelease };
/// Read a word. A thread that reads the same value again and again is taken to be waiting.
void atomic_load(const void* address, void* value, size_t bytes, Order order, Site site);
void atomic_store(void* address, const void* value, size_t bytes, Order order, Site site);
/// `update(value, operand)` changes the value; `old` gets what was there before.
using Update = void (*)(void* value, const void* operand);
void atomic_update(void* address, void* old, size_t bytes, Update update, const void* operand,
                   Order order, Site site);
/// An acquire and release fence of the whole GPU.
void fence(Site site);

// ---- asynchronous work --------------------------------------------------------------------------

/// cp.async (async.cpp).
void copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes, Site site);
void commit_async_copies();
void wait_async_copies(int pending_groups);

/// Work that goes on beside the threads. `land()` runs once: at a moment that the seed chooses, at
/// the latest when no thread can go on without it. A block must not end with work of its own
/// outstanding: that is reported with `what` and `site`.
void start_async(std::function<void()> land, const char* what, Site site);

/// How much of what is allowed to be late is late: DSPARK_SIMT_ASYNC.
enum class Lateness { kEarly, kRandom, kLate };
Lateness lateness();
/// A random number of the block's own sequence, decided by the seed.
uint64_t random_number();
/// Overwrite memory whose content is undefined from now on (with bytes that make NaNs).
void poison(void* data, size_t bytes);

/// State of an emulated primitive, one object a block, made at first use and destroyed with the
/// block. `T` is the key.
std::shared_ptr<void>& block_slot(const void* key);
template <class T>
T& block_state() {
  static const char key = 0;
  std::shared_ptr<void>& slot = block_slot(&key);
  if (slot == nullptr) slot = std::make_shared<T>();
  return *static_cast<T*>(slot.get());
}
/// The number of the running block, how many threads it has, and LaunchConfig::cluster (or 1).
unsigned block_number();
unsigned block_threads();
unsigned cluster_blocks();

}  // namespace dspark::simt

// ---- the checker (race_*.cpp; empty functions in the fast build)
// ----------------------------------

namespace dspark::simt::check {

/// An access of the running thread, with a report if it races or is not allowed.
void access(const void* data, size_t bytes, bool write, Site site);

/// Order through an object (a barrier, a flag): what happened before its release is known to
/// whoever acquires it later. `forget` starts the object anew.
void release(const void* object);
void acquire(const void* object);
void forget(const void* object);

/// The running thread has waited for the launches before this one.
void await_launches();

/// Something that runs beside the threads and accesses memory: a copy engine, a tensor core. It
/// knows what the running thread knew when it started it; its accesses are ordered before others'
/// only through release() or join(). Null in the fast build; all functions take that.
struct Agent;
using AgentPtr = std::shared_ptr<Agent>;
AgentPtr start_agent();
void access(const AgentPtr& agent, const void* data, size_t bytes, bool write, Site site);
void release(const AgentPtr& agent, const void* object);
/// The running thread has waited for the agent.
void join(const AgentPtr& agent);
/// From now until the agent's write, the content of shared memory is undefined: reading is an
/// error.
void pending(const AgentPtr& agent, const void* shared, size_t bytes, Site site);

}  // namespace dspark::simt::check

#endif  // DSPARK_TESTS_SIMT_RUNTIME_H_
