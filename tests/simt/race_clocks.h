// SPDX-License-Identifier: Apache-2.0
//
// Who knows what: vector clocks of the checked build.
//
// A member is a thread of a block, or an agent that works beside the threads. It counts epochs;
// each time it tells others what it did, a new epoch begins. A clock says, for each member, up to
// which epoch its accesses are known. An access happened before another one if the other's member
// knows its epoch. Everybody who meets at a barrier shares one clock, so clocks are never changed
// in place.
#ifndef DSPARK_TESTS_SIMT_RACE_CLOCKS_H_
#define DSPARK_TESTS_SIMT_RACE_CLOCKS_H_

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "simt/checker.h"

namespace dspark::simt {

/// Number of the block that stands for all launches which may not have ended when this one starts.
constexpr unsigned kLaunchBefore = ~0u;

/// Known epochs of the members of one block; empty: nothing is known.
using Epochs = std::shared_ptr<const std::vector<uint32_t>>;

/// By block. Blocks of which nothing is known are absent.
using Knowledge = std::map<unsigned, Epochs>;

struct Clock {
  Epochs own;                               // of the member's own block
  std::shared_ptr<const Knowledge> others;  // of the other blocks; null: nothing
};

struct Member {
  unsigned block = 0;
  uint32_t slot = 0;   // number among the block's members
  uint32_t epoch = 1;  // of what it does now
  bool agent = false;
  Clock clock;

  // A fence and relaxed accesses together act as release and acquire.
  Knowledge fenced;       // what a relaxed store publishes: all before the last fence
  Knowledge unconfirmed;  // what relaxed loads have seen: known from the next fence on
};

struct BlockClocks {
  std::vector<Member> threads;
  std::vector<uint32_t> agent_epochs;  // of the slots that agents take in turn
  uint32_t next_agent = 0;
  uint32_t generation = 0;  // of the block's shared memory in the shadow
};

struct check::Agent {
  Member member;
};

namespace check {

/// Agents share this many slots. Who takes a slot again hides what its predecessor left unjoined.
constexpr uint32_t kAgentSlots = 64;

Member& running_member();
/// What the member knows, with its own accesses up to now; a new epoch begins.
Knowledge publish(Member& member);
void learn(Member& member, const Knowledge& knowledge);
/// Whether an access of `slot` of `block` in `epoch` is known to the member.
bool knows(const Member& member, unsigned block, uint32_t slot, uint32_t epoch);
void clear_objects();

}  // namespace check
}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_RACE_CLOCKS_H_
