// SPDX-License-Identifier: Apache-2.0
//
// The functions of runtime.h, for the block and the thread that run.
#include "simt/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <set>
#include <string>

#include "simt/block.h"
#include "simt/checker.h"
#include "simt/grid.h"
#include "simt/memory_map.h"

namespace dspark::simt {

Thread* self() { return context.fiber; }

Site last_site() { return context.fiber->site; }

namespace {

/// What dspark_simt_leave_out() named; nothing while `last` is 0.
struct Omission {
  std::string name, file;
  unsigned first = 0, last = 0;
} omission;

/// "name file line" of what was asked for, while that is recorded.
std::set<std::string> recorded;
bool recording = false;

}  // namespace

bool left_out(const char* name, Site site) {
  if (recording) recorded.insert(std::string(name) + " " + place(site));
  if (omission.last == 0) return false;
  return site.line() >= omission.first && site.line() <= omission.last && omission.name == name &&
         omission.file == tidy(site.file_name());
}

void fail(Site site, const char* format, ...) {
  char text[768];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Thread& t = *context.fiber;
  char where[192];
  snprintf(where, sizeof where, "block (%u,%u,%u) thread (%u,%u,%u) at %s: ", t.block_index.x,
           t.block_index.y, t.block_index.z, t.thread_index.x, t.thread_index.y, t.thread_index.z,
           place(site).c_str());
  context.block->grid().report(std::string(where) + text);
  context.block->leave();
}

// ---- shared memory
// --------------------------------------------------------------------------------

void* dynamic_shared() { return context.block->dynamic_low(); }

uint32_t shared_offset(const void* pointer) {
  const Block& block = *context.block;
  const char* p = static_cast<const char*>(pointer);
  if (p >= block.dynamic_low() && p < block.dynamic_high()) {
    return static_cast<uint32_t>(p - block.dynamic_low());
  }
  if (p < block.static_low() || p >= block.static_high()) {
    fail(Site::current(), "the address of something that is not in shared memory");
  }
  const ptrdiff_t dynamic_bytes = block.dynamic_high() - block.dynamic_low();
  return static_cast<uint32_t>((dynamic_bytes + 1023) / 1024 * 1024 + (p - block.static_low()));
}

void* shared_pointer(uint32_t offset) {
  const Block& block = *context.block;
  const ptrdiff_t dynamic_bytes = (block.dynamic_high() - block.dynamic_low() + 1023) / 1024 * 1024;
  if (offset < dynamic_bytes) return block.dynamic_low() + offset;
  return block.static_low() + (offset - dynamic_bytes);
}

void* peer_shared(void* own, unsigned number, Site site) {
  const Block& block = *context.block;
  const Block* peer = context.block->grid().block(number);
  if (peer == nullptr)
    fail(site, "block %u, whose shared memory is asked for, does not run", number);
  char* p = static_cast<char*>(own);
  if (p >= block.dynamic_low() && p < block.dynamic_high()) {
    return peer->dynamic_low() + (p - block.dynamic_low());
  }
  if (p < block.static_low() || p >= block.static_high()) {
    fail(site, "the address of something that is not in shared memory");
  }
  return peer->static_low() + (p - block.static_low());
}

void poison(void* data, size_t bytes) { memset(data, 0xff, bytes); }

// ---- barriers, warps, waiting
// ---------------------------------------------------------------------

int block_barrier(Vote vote, int predicate, Site site) {
  return context.block->block_barrier(vote, predicate, site);
}

void named_barrier(int id, int threads, bool wait, Site site) {
  context.block->named_barrier(id, threads, wait, site);
}

void warp_collective(unsigned mask, Finish finish, const char* what, Site site,
                     bool orders_memory) {
  context.block->warp_collective(mask, finish, what, site, orders_memory);
}

void progress() { context.block->grid().progress(); }

void wait_for_progress(const char* what, Site site) {
  context.block->wait_for_progress(what, site);
}

void wait_for_change(const uint64_t& word, const Explanation& why, Site site) {
  context.block->wait_for_change(word, why, site);
}

// ---- atomics
// --------------------------------------------------------------------------------------

namespace {

void require_aligned(const void* address, size_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
    fail(site, "misaligned atomic access of %zu bytes at %p", bytes, address);
  }
}

}  // namespace

void atomic_load(const void* address, void* value, size_t bytes, Order order, Site site) {
  Block& block = *context.block;
  require_aligned(address, bytes, site);
  context.fiber->site = site;
  block.maybe_yield();
  uint64_t seen = 0;
  memcpy(&seen, address, bytes);
  if (context.fiber->polls(address, seen, block.grid().events())) {
    block.wait_for_progress("spin-wait", site);
  }
  check::atomic(address, bytes, check::Atomic::kLoad, order, site);
  memcpy(value, address, bytes);
}

void atomic_store(void* address, const void* value, size_t bytes, Order order, Site site) {
  Block& block = *context.block;
  require_aligned(address, bytes, site);
  context.fiber->site = site;
  check::atomic(address, bytes, check::Atomic::kStore, order, site);
  if (memcmp(address, value, bytes) != 0) block.grid().progress();
  memcpy(address, value, bytes);
  if (block.grid().interrupted()) fail(site, "killed here, as DSPARK_SIMT_STOP says");
  block.maybe_yield();
}

void atomic_update(void* address, void* old, size_t bytes, Update update, const void* operand,
                   Order order, Site site) {
  Block& block = *context.block;
  require_aligned(address, bytes, site);
  context.fiber->site = site;
  check::atomic(address, bytes, check::Atomic::kUpdate, order, site);
  alignas(8) unsigned char value[8];
  memcpy(old, address, bytes);
  memcpy(value, address, bytes);
  update(value, operand);
  if (memcmp(address, value, bytes) != 0) block.grid().progress();
  memcpy(address, value, bytes);
  if (block.grid().interrupted()) fail(site, "killed here, as DSPARK_SIMT_STOP says");
  block.maybe_yield();
}

void fence(Site site) {
  if (!left_out("fence_gpu", site)) check::fence();
}

// ---- asynchronous work
// ----------------------------------------------------------------------------

namespace {

void land(Fiber::Copy* copy) {
  if (copy->landed) return;
  copy->landed = true;
  check::access(copy->agent, copy->global, copy->source_bytes, false, copy->site);
  check::access(copy->agent, copy->shared, copy->bytes, true, copy->site);
  memcpy(copy->shared, copy->global, copy->source_bytes);
  memset(static_cast<char*>(copy->shared) + copy->source_bytes, 0,
         copy->bytes - copy->source_bytes);
}

}  // namespace

void copy_async(void* shared, const void* global, unsigned bytes, unsigned source_bytes,
                Site site) {
  const uintptr_t both = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (both % bytes != 0) fail(site, "misaligned cp.async of %u bytes", bytes);
  if (source_bytes > bytes) fail(site, "cp.async of %u bytes from %u", bytes, source_bytes);
  shared_offset(shared);
  Fiber::Copy copy{shared, global, bytes, source_bytes, false, check::start_agent(), site};
  check::pending(copy.agent, shared, bytes, site);
  poison(shared, bytes);
  const bool soon = lateness() == Lateness::kRandom && (random_number() & 1) != 0;
  if (soon || lateness() == Lateness::kEarly) land(&copy);
  context.fiber->open_copies.push_back(std::move(copy));
}

void commit_async_copies() {
  Fiber& fiber = *context.fiber;
  fiber.copy_groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

void wait_async_copies(int pending_groups) {
  Fiber& fiber = *context.fiber;
  while (fiber.copy_groups.size() > static_cast<size_t>(pending_groups)) {
    for (Fiber::Copy& copy : fiber.copy_groups.front()) {
      land(&copy);
      check::join(copy.agent);
    }
    fiber.copy_groups.pop_front();
  }
}

void start_async(std::function<void()> land, const char* what, Site site) {
  context.block->start_async({std::move(land), what, site});
}

Lateness lateness() { return context.block->grid().options().lateness; }

uint64_t random_number() { return context.block->random(); }

std::shared_ptr<void>& block_slot(const void* key) { return context.block->slots[key]; }

unsigned block_number() { return context.block->number(); }

unsigned block_threads() { return static_cast<unsigned>(context.block->threads()); }

unsigned cluster_blocks() {
  const unsigned cluster = context.block->grid().config().cluster;
  return cluster == 0 ? 1 : cluster;
}

}  // namespace dspark::simt

DSPARK_API void dspark_simt_leave_out(const char* name, const char* file, unsigned first,
                                      unsigned last) {
  auto& omission = dspark::simt::omission;
  omission.name = name;
  omission.file = file;
  omission.first = first;
  omission.last = last;
}

DSPARK_API const char* dspark_simt_record(int on) {
  using namespace dspark::simt;
  static std::string text;
  text.clear();
  for (const std::string& entry : recorded) text += entry + "\n";
  recorded.clear();
  recording = on != 0;
  return text.c_str();
}
