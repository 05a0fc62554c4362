// SPDX-License-Identifier: Apache-2.0
#include <unordered_map>
#include <vector>

#include "simt/hopper.h"

namespace dspark::simt {
namespace {

constexpr unsigned kGranule = 4;  // bytes

/// The last ordinary store to a granule: by whom, and how many fences that thread had made.
struct Store {
  unsigned thread_plus_one = 0;
  unsigned fences = 0;
};

struct Stores {
  std::unordered_map<uintptr_t, Store> last;  // by granule
  std::vector<unsigned> fences = std::vector<unsigned>(block_threads());
};

}  // namespace

void proxy_ordinary_store(const void* data, size_t bytes) {
  Stores& stores = block_state<Stores>();
  const unsigned thread = self()->linear;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  for (uintptr_t g = begin / kGranule; g <= (begin + bytes - 1) / kGranule; ++g) {
    stores.last[g] = {thread + 1, stores.fences[thread]};
  }
}

void proxy_fence() { ++block_state<Stores>().fences[self()->linear]; }

void proxy_async_access(const void* data, size_t bytes, const char* what, Site site) {
  Stores& stores = block_state<Stores>();
  if (stores.last.empty()) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  for (uintptr_t g = begin / kGranule; g <= (begin + bytes - 1) / kGranule; ++g) {
    const auto found = stores.last.find(g);
    if (found == stores.last.end()) continue;
    const Store store = found->second;
    if (stores.fences[store.thread_plus_one - 1] == store.fences) {
      fail(site,
           "%s: shared offset 0x%x was stored by thread %u without fence_proxy_async() behind it",
           what, shared_offset(reinterpret_cast<const void*>(g * kGranule)),
           store.thread_plus_one - 1);
    }
    stores.last.erase(found);
  }
}

}  // namespace dspark::simt
