// SPDX-License-Identifier: Apache-2.0
#include "simt/race_clocks.h"

#include <algorithm>

#include "simt/race_shadow.h"

namespace dspark::simt::check {
namespace {

/// What the last release left at each object: an atomic word, a barrier.
std::unordered_map<const void*, Knowledge> objects;

void join(Epochs& a, const Epochs& b) {
  if (b == nullptr || a == b) return;
  if (a == nullptr) {
    a = b;
    return;
  }
  auto joined = std::make_shared<std::vector<uint32_t>>(*a);
  bool all_from_a = true;
  for (size_t i = 0; i < joined->size(); ++i) {
    if ((*b)[i] <= (*joined)[i]) continue;
    (*joined)[i] = (*b)[i];
    all_from_a = false;
  }
  if (!all_from_a) a = std::move(joined);
}

void join(Knowledge& a, const Knowledge& b) {
  for (const auto& [block, epochs] : b) join(a[block], epochs);
}

void join_others(std::shared_ptr<const Knowledge>& a, const std::shared_ptr<const Knowledge>& b) {
  if (b == nullptr || a == b) return;
  auto joined = std::make_shared<Knowledge>(a == nullptr ? Knowledge{} : *a);
  join(*joined, *b);
  a = std::move(joined);
}

size_t members(const Block& block) { return block.clocks->threads.size() + kAgentSlots; }

}  // namespace

Member& running_member() { return context.block->clocks->threads[context.fiber->linear]; }

void clear_objects() { objects.clear(); }

Knowledge publish(Member& member) {
  const size_t size =
      member.clock.own != nullptr ? member.clock.own->size() : members(*context.block);
  auto own = member.clock.own != nullptr
                 ? std::make_shared<std::vector<uint32_t>>(*member.clock.own)
                 : std::make_shared<std::vector<uint32_t>>(size, 0u);
  (*own)[member.slot] = member.epoch++;
  Knowledge knowledge = member.clock.others == nullptr ? Knowledge{} : *member.clock.others;
  knowledge[member.block] = std::move(own);
  return knowledge;
}

void learn(Member& member, const Knowledge& knowledge) {
  std::shared_ptr<Knowledge> others;
  for (const auto& [block, epochs] : knowledge) {
    if (block == member.block) {
      join(member.clock.own, epochs);
      continue;
    }
    if (others == nullptr) {
      const auto& known = member.clock.others;
      others = std::make_shared<Knowledge>(known == nullptr ? Knowledge{} : *known);
    }
    join((*others)[block], epochs);
  }
  if (others != nullptr) member.clock.others = std::move(others);
}

bool knows(const Member& member, unsigned block, uint32_t slot, uint32_t epoch) {
  if (block == member.block) {
    if (slot == member.slot && (!member.agent || epoch == member.epoch)) return true;
    return member.clock.own != nullptr && epoch <= (*member.clock.own)[slot];
  }
  if (member.clock.others == nullptr) return false;
  const auto found = member.clock.others->find(block);
  return found != member.clock.others->end() && epoch <= (*found->second)[slot];
}

// ---- blocks
// ---------------------------------------------------------------------------------------

void begin_block(Block& block) {
  auto clocks = std::make_shared<BlockClocks>();
  clocks->threads.resize(static_cast<size_t>(block.threads()));
  clocks->agent_epochs.assign(kAgentSlots, 0);
  clocks->generation = new_generation();
  for (uint32_t i = 0; i < clocks->threads.size(); ++i) {
    clocks->threads[i].block = block.number();
    clocks->threads[i].slot = i;
  }
  block.clocks = std::move(clocks);
}

void end_block(Block&) {}

void meet(Block& block, const std::vector<Fiber*>& fibers) {
  Clock joined;
  std::vector<Member*> all;
  for (const Fiber* fiber : fibers) all.push_back(&block.clocks->threads[fiber->linear]);
  for (const Member* member : all) {
    join(joined.own, member->clock.own);
    join_others(joined.others, member->clock.others);
  }
  auto own = joined.own != nullptr ? std::make_shared<std::vector<uint32_t>>(*joined.own)
                                   : std::make_shared<std::vector<uint32_t>>(members(block), 0u);
  for (Member* member : all) (*own)[member->slot] = member->epoch++;
  joined.own = std::move(own);
  for (Member* member : all) member->clock = joined;
}

void arrive(Block& block, Fiber* fiber, const void* object) {
  join(objects[object], publish(block.clocks->threads[fiber->linear]));
}

void learn(Block& block, Fiber* fiber, const void* object) {
  learn(block.clocks->threads[fiber->linear], objects[object]);
}

// ---- the hooks of runtime.h
// -----------------------------------------------------------------------

void release(const void* object) { join(objects[object], publish(running_member())); }

void acquire(const void* object) {
  const auto found = objects.find(object);
  if (found != objects.end()) learn(running_member(), found->second);
}

void forget(const void* object) { objects.erase(object); }

void await_launches() {
  static const Knowledge ended{
      {kLaunchBefore, std::make_shared<const std::vector<uint32_t>>(1, 1)}};
  learn(running_member(), ended);
}

AgentPtr start_agent() {
  Member& starter = running_member();
  BlockClocks& clocks = *context.block->clocks;
  auto agent = std::make_shared<Agent>();
  const uint32_t turn = clocks.next_agent++ % kAgentSlots;
  agent->member.agent = true;
  agent->member.block = starter.block;
  agent->member.slot = static_cast<uint32_t>(clocks.threads.size()) + turn;
  agent->member.epoch = ++clocks.agent_epochs[turn];
  learn(agent->member, publish(starter));
  return agent;
}

void release(const AgentPtr& agent, const void* object) {
  join(objects[object], publish(agent->member));
  agent->member.epoch--;  // an agent has one epoch: the next in its slot is another agent's
}

void join(const AgentPtr& agent) {
  learn(running_member(), publish(agent->member));
  agent->member.epoch--;
}

void fence() {
  Member& me = running_member();
  learn(me, me.unconfirmed);
  me.unconfirmed.clear();
  me.fenced = publish(me);
}

/// The order that an atomic access makes; access() looks at races.
void order_atomic(const void* address, Atomic kind, Order order) {
  Member& me = running_member();
  if (kind != Atomic::kStore) {
    const auto found = objects.find(address);
    if (found != objects.end() && order == Order::kAcquire) learn(me, found->second);
    if (found != objects.end() && order != Order::kAcquire) join(me.unconfirmed, found->second);
  }
  if (kind == Atomic::kLoad) return;
  // A store starts anew, an update goes on with what it found: its value depends on it.
  Knowledge& left = objects[address];
  if (kind == Atomic::kStore) left.clear();
  join(left, order == Order::kRelease ? publish(me) : me.fenced);
}

}  // namespace dspark::simt::check
