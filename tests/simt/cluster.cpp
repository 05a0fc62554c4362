// SPDX-License-Identifier: Apache-2.0
//
// Clusters: blocks cluster * i .. cluster * (i + 1) - 1 of a launch, all running at once.
#include <memory>
#include <vector>

#include "simt/grid.h"
#include "simt/prim_cluster.h"

namespace dspark::simt {
namespace {

/// The barrier of a cluster, shared by its blocks.
struct ClusterBarrier {
  uint64_t phase = 0;
  unsigned arrived = 0;
  char keys[2] = {};  // what was known to those who arrived in an even, in an odd phase
};

struct Membership {
  std::shared_ptr<ClusterBarrier> barrier;
  std::vector<uint64_t> phases = std::vector<uint64_t>(block_threads());  // arrivals of a thread
  std::vector<bool> inside = std::vector<bool>(block_threads());          // arrived, not waited
};

unsigned first_block() { return block_number() / cluster_size() * cluster_size(); }

/// This block's membership; the barrier is the one that a block of the cluster already has.
Membership& membership() {
  Membership& mine = block_state<Membership>();
  if (mine.barrier != nullptr) return mine;
  static const char* const key = "cluster barrier";
  for (unsigned i = 0; i < cluster_size(); ++i) {
    Block* peer = context.block->grid().block(first_block() + i);
    if (peer == nullptr || peer->slots[key] == nullptr) continue;
    mine.barrier = std::static_pointer_cast<ClusterBarrier>(peer->slots[key]);
  }
  if (mine.barrier == nullptr) mine.barrier = std::make_shared<ClusterBarrier>();
  context.block->slots[key] = mine.barrier;
  return mine;
}

}  // namespace

uint32_t cluster_size() { return cluster_blocks(); }

void cluster_arrive(Site site) {
  Membership& mine = membership();
  const unsigned thread = self()->linear;
  if (mine.inside[thread]) fail(site, "cluster_arrive: twice without cluster_wait()");
  ClusterBarrier& barrier = *mine.barrier;
  mine.inside[thread] = true;
  mine.phases[thread] = barrier.phase;
  check::release(&barrier.keys[barrier.phase % 2]);
  if (++barrier.arrived < cluster_size() * block_threads()) return;
  barrier.arrived = 0;
  ++barrier.phase;
  check::forget(&barrier.keys[barrier.phase % 2]);
  progress();
}

void cluster_wait(Site site) {
  Membership& mine = membership();
  const unsigned thread = self()->linear;
  if (!mine.inside[thread]) fail(site, "cluster_wait: without cluster_arrive()");
  const std::shared_ptr<ClusterBarrier> barrier = mine.barrier;
  const uint64_t phase = mine.phases[thread];
  wait_until([&] { return barrier->phase > phase; }, "cluster_wait", site);
  mine.inside[thread] = false;
  check::acquire(&barrier->keys[phase % 2]);
}

void* map_shared(void* own, uint32_t rank, Site site) {
  if (rank >= cluster_size()) {
    fail(site, "map_shared: rank %u in a cluster of %u", rank, cluster_size());
  }
  return peer_shared(own, first_block() + rank, site);
}

}  // namespace dspark::simt
