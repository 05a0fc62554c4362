// SPDX-License-Identifier: Apache-2.0
//
// mbarrier objects. The 8 bytes in shared memory hold a mark only; counts and phases are kept
// beside, so that a use before the init, behind the end or after an overwrite is seen.
#include <cstdio>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/hopper.h"
#include "simt/prim_mbarrier.h"

namespace dspark::simt {
namespace {

constexpr uint64_t kMark = 0x6d62617272696572u;
constexpr uint32_t kMaximumCount = (1u << 20) - 1;
constexpr int64_t kMaximumBytes = (1 << 20) - 1;

struct Barrier {
  uint32_t count;
  uint32_t missing;  ///< arrivals to come in this phase
  int64_t bytes;     ///< expected less landed; landed first is allowed while arrivals are missing
  uint64_t phase;    ///< phases completed
  unsigned maker;    ///< the thread that initialised it
  bool known_to_copies;  ///< mbarrier_init_fence() by the maker since
  bool ended;            ///< mbarrier_invalidate()
};

struct Barriers {
  std::unordered_map<const uint64_t*, Barrier> table;  // ended ones stay: somebody may wait
};

struct Wait final : Explanation {
  uint32_t offset;
  uint32_t parity;
  const Barrier& state;

  Wait(const uint64_t* barrier, uint32_t of, const Barrier& now)
      : offset(shared_offset(barrier)), parity(of), state(now) {}
  std::string text() const override {
    char line[160];
    snprintf(line, sizeof line,
             "mbarrier_wait(0x%x, parity %u): phase %llu lacks %u of %u arrivals and %lld bytes",
             offset, parity, static_cast<unsigned long long>(state.phase), state.missing,
             state.count, static_cast<long long>(state.bytes));
    return line;
  }
};

/// What happened before a phase's end is attached to the phase, not to the barrier: who waits for
/// phase n learns nothing of arrivals in phase n + 1.
const void* phase_key(const uint64_t* barrier, uint64_t phase) {
  return reinterpret_cast<const char*>(barrier) + (phase & 1u) * 4;
}

Barrier& find(uint64_t* barrier, const char* operation, Site site) {
  auto& table = block_state<Barriers>().table;
  const auto found = table.find(barrier);
  if (found == table.end() || found->second.ended) {
    fail(site, "%s: the mbarrier at shared offset 0x%x is not initialised", operation,
         shared_offset(barrier));
  }
  if (*barrier != (kMark ^ reinterpret_cast<uintptr_t>(barrier))) {
    fail(site, "%s: the mbarrier at shared offset 0x%x was overwritten", operation,
         shared_offset(barrier));
  }
  return found->second;
}

void finish_phase(uint64_t* barrier, Barrier& state, Site site) {
  if (state.missing != 0) return;
  if (state.bytes < 0) {
    fail(site,
         "mbarrier at shared offset 0x%x: copies brought %lld bytes more than phase %llu expects",
         shared_offset(barrier), static_cast<long long>(-state.bytes),
         static_cast<unsigned long long>(state.phase));
  }
  if (state.bytes != 0) return;
  ++state.phase;
  state.missing = state.count;
  check::forget(phase_key(barrier, state.phase));
  progress();
}

}  // namespace

void mbarrier_init(uint64_t* barrier, uint32_t count, Site site) {
  if ((reinterpret_cast<uintptr_t>(barrier) & 7) != 0) fail(site, "mbarrier: misaligned");
  if (count == 0 || count > kMaximumCount) fail(site, "mbarrier: a count of %u", count);
  shared_offset(barrier);
  check::access(barrier, sizeof *barrier, true, site);
  auto& table = block_state<Barriers>().table;
  const auto found = table.find(barrier);
  if (found != table.end() && *barrier == (kMark ^ reinterpret_cast<uintptr_t>(barrier))) {
    fail(site, "mbarrier at shared offset 0x%x: initialised twice", shared_offset(barrier));
  }
  *barrier = kMark ^ reinterpret_cast<uintptr_t>(barrier);
  table[barrier] = Barrier{count, count, 0, 0, self()->linear, false, false};
  check::forget(phase_key(barrier, 0));
  check::forget(phase_key(barrier, 1));
  progress();
}

void mbarrier_init_fence() {
  for (auto& [address, state] : block_state<Barriers>().table) {
    if (state.maker == self()->linear) state.known_to_copies = true;
  }
}

void mbarrier_invalidate(uint64_t* barrier, Site site) {
  Barrier& state = find(barrier, "mbarrier_invalidate", site);
  check::access(barrier, sizeof *barrier, true, site);
  state.ended = true;
  ++state.phase;  // who waits for it must notice
  poison(barrier, sizeof *barrier);
  progress();
}

void mbarrier_arrive(uint64_t* barrier, uint32_t bytes, Site site) {
  check::access(barrier, sizeof *barrier, false, site);
  Barrier& state = find(barrier, "arrival", site);
  if (state.missing == 0) {
    fail(site, "mbarrier at shared offset 0x%x: more than %u arrivals in phase %llu",
         shared_offset(barrier), state.count, static_cast<unsigned long long>(state.phase));
  }
  check::release(phase_key(barrier, state.phase));
  state.bytes += bytes;
  if (state.bytes > kMaximumBytes) {
    fail(site, "mbarrier: %lld bytes expected in one phase", static_cast<long long>(state.bytes));
  }
  --state.missing;
  finish_phase(barrier, state, site);
}

void mbarrier_wait(uint64_t* barrier, uint32_t parity, Site site) {
  check::access(barrier, sizeof *barrier, false, site);
  if (parity > 1) fail(site, "mbarrier_wait: a parity of %u", parity);
  for (;;) {
    const Barrier& state = find(barrier, "mbarrier_wait", site);
    if ((state.phase & 1u) != parity) break;
    wait_for_change(state.phase, Wait(barrier, parity, state), site);
  }
  check::acquire(phase_key(barrier, parity));
}

uint64_t mbarrier_copy_started(uint64_t* barrier, Site site) {
  check::access(barrier, sizeof *barrier, false, site);
  const Barrier& state = find(barrier, "copy", site);
  if (!state.known_to_copies) {
    fail(site,
         "copy: the mbarrier at shared offset 0x%x is not known to the copy engine, thread %u "
         "initialised it without mbarrier_init_fence()",
         shared_offset(barrier), state.maker);
  }
  return state.phase;
}

void mbarrier_copy_landed(uint64_t* barrier, uint64_t phase, uint32_t bytes,
                          const check::AgentPtr& agent, Site site) {
  Barrier& state = find(barrier, "copy", site);
  if (state.phase != phase) {
    fail(site,
         "mbarrier at shared offset 0x%x: phase %llu ended before its copies were complete, it "
         "expected too few bytes",
         shared_offset(barrier), static_cast<unsigned long long>(phase));
  }
  check::release(agent, phase_key(barrier, phase));
  state.bytes -= bytes;
  finish_phase(barrier, state, site);
}

}  // namespace dspark::simt
