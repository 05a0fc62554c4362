// SPDX-License-Identifier: Apache-2.0
#include "simt/block.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "simt/checker.h"
#include "simt/grid.h"
#include "simt/prim_launch.h"

namespace dspark::simt {

thread_local Context context;

namespace {

constexpr int kPolls = 4096;  // reads of any kind without an event that make a thread a waiting one

/// The thread-local storage of this library: the __shared__ variables of its kernels.
struct Storage {
  char* low = nullptr;
  char* high = nullptr;
};

Storage module_storage() {
  struct Query {
    const char* inside;
    Storage found;
  } query{reinterpret_cast<const char*>(&context), {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        Query& q = *static_cast<Query*>(data);
        if (info->dlpi_tls_data == nullptr) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
          char* low = static_cast<char*>(info->dlpi_tls_data);
          char* high = low + info->dlpi_phdr[i].p_memsz;
          if (q.inside >= low && q.inside < high) q.found = {low, high};
        }
        return q.found.low != nullptr ? 1 : 0;
      },
      &query);
  return query.found;
}

bool same(Site a, Site b) {
  return a.line() == b.line() && strcmp(a.file_name(), b.file_name()) == 0;
}

/// "0-31,40" for numbers in ascending order.
std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!text.empty()) text += ",";
    text += std::to_string(numbers[i]);
    if (j > i) text += "-" + std::to_string(numbers[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace

std::string tidy(const std::string& path) {
  size_t start = 0;
  for (const char* folder : {"csrc/", "tests/"}) {
    const size_t found = path.find(folder);
    if (found != std::string::npos) start = std::max(start, found);
  }
  return path.substr(start);
}

std::string place(Site site) {
  return tidy(std::string(site.file_name()) + ":" + std::to_string(site.line()));
}

bool Fiber::polls(const void* address, uint64_t value, uint64_t events) {
  if (events != events_) {
    events_ = events;
    repeated_ = 0;
    std::fill(std::begin(polls_), std::end(polls_), Poll{});
  }
  for (const Poll& poll : polls_) {
    if (poll.address == address && poll.value == value) return true;
  }
  polls_[next_poll_] = {address, value};
  next_poll_ = (next_poll_ + 1) % kRemembered;
  return ++repeated_ > kPolls;
}

Block::Block(Grid& grid, unsigned number, Stacks& stacks)
    : grid_(grid), number_(number), stacks_(stacks) {
  const dim3 size = grid.config().block, count = grid.config().grid;
  const uint64_t seed = grid.options().seed;
  shuffled_ = seed != 0;
  random_state_ = (seed + 1) * 0x9e3779b97f4a7c15ull + number * 0xd1b54a32d192ed03ull;
  fibers_ = std::vector<Fiber>(size_t{size.x} * size.y * size.z);
  live_ = threads();
  warp_arrived_.assign(fibers_.size() / 32 + 1, 0);
  for (int i = 0; i < threads(); ++i) {
    Fiber& fiber = fibers_[static_cast<size_t>(i)];
    const unsigned u = static_cast<unsigned>(i);
    fiber.thread_index = {u % size.x, u / size.x % size.y, u / size.x / size.y};
    fiber.block_index = {number % count.x, number / count.x % count.y, number / count.x / count.y};
    fiber.block_dim = size;
    fiber.grid_dim = count;
    fiber.linear = u;
    fiber.lane = u % 32;
    fiber.warp = u / 32;
    fiber.stack = stacks.prepare(i, &Block::entry);
    ready_.push_back(&fiber);
  }
  prepare_memory();
}

Block::~Block() { free(dynamic_); }

void Block::prepare_memory() {
  dynamic_bytes_ = grid_.config().shared_bytes;
  const size_t rounded = (dynamic_bytes_ + 1023) / 1024 * 1024;
  if (rounded != 0) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 1024, rounded) != 0) abort();
    dynamic_ = static_cast<char*>(memory);
    poison(dynamic_, rounded);
  }
  const Context kept = context;
  const Storage storage = module_storage();
  static_low_ = storage.low;
  static_high_ = storage.high;
  poison(static_low_, static_cast<size_t>(static_high_ - static_low_));
  context = kept;
}

void Block::run() {
  context = {this, nullptr};
  check::begin_block(*this);
  if (Fiber* first = pick(); first != nullptr) {
    first->state = State::kRunning;
    context.fiber = first;
    dspark_simt_switch(&main_stack_, first->stack);
  }
  context.fiber = nullptr;
  if (!grid_.stopped()) check_end();
  check::end_block(*this);
  jobs_.clear();
  slots.clear();
  context.block = nullptr;
}

void Block::check_end() {
  for (const Job& job : jobs_) {
    grid_.report("block " + std::to_string(number_) + " ends before its " + job.what + " (" +
                 place(job.site) + ") has arrived");
  }
}

void Block::entry() {
  Block& block = *context.block;
  const Body& body = block.grid_.body();
  body.run(body.arguments);
  context.block->exit_thread();
}

void Block::exit_thread() {
  Fiber* me = context.fiber;
  for (auto& group : me->copy_groups) {
    for (Fiber::Copy& copy : group) me->open_copies.push_back(std::move(copy));
  }
  if (!me->open_copies.empty()) {
    fail(me->open_copies.front().site, "the thread exits without having waited for its cp.async");
  }
  me->state = State::kExited;
  me->what = "exited";
  for (int i = 0; i < 32; ++i) {
    const unsigned linear = me->warp * 32 + static_cast<unsigned>(i);
    if (linear >= fibers_.size()) break;
    const Fiber& other = fibers_[linear];
    if (other.state == State::kWarp && (other.mask >> me->lane & 1u) != 0) {
      fail(other.site, "%s with mask 0x%08x names lane %u, which has exited", other.what,
           other.mask, me->lane);
    }
  }
  grid_.progress();
  if (--live_ == 0) leave();
  check_block_barrier();
  reschedule();
  abort();  // nobody resumes a thread that has exited
}

void Block::leave() {
  if (context.fiber == nullptr) abort();
  void* dropped = nullptr;
  context.fiber = nullptr;
  dspark_simt_switch(&dropped, main_stack_);
  abort();
}

// ---- who runs
// -------------------------------------------------------------------------------------

uint64_t Block::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ >> 11;
}

void Block::wake(Fiber* fiber) {
  fiber->state = State::kReady;
  ready_.push_back(fiber);
}

void Block::wake_waiting() {
  const uint64_t now = grid_.events() + grid_.nudges();
  if (waiting_.empty() || now == woken_at_) return;
  woken_at_ = now;
  size_t kept = 0;
  for (const Waiting& waiting : waiting_) {
    if (waiting.word != nullptr && *waiting.word == waiting.before) {
      waiting_[kept++] = waiting;
    } else {
      wake(waiting.fiber);
    }
  }
  waiting_.resize(kept);
}

void Block::land_one() {
  const size_t i = shuffled_ ? random() % jobs_.size() : 0;
  Job job = std::move(jobs_[i]);
  jobs_.erase(jobs_.begin() + static_cast<ptrdiff_t>(i));
  job.land();
  grid_.progress();
}

/// The thread that goes on; null when the launch is given up.
Fiber* Block::pick() {
  for (;;) {
    if (grid_.stopped()) return nullptr;
    const bool may_land = !jobs_.empty() && lateness() == Lateness::kRandom;
    if (may_land && random() % 4 == 0) land_one();
    wake_waiting();
    if (ready_head_ < ready_.size()) {
      if (shuffled_) {
        const size_t i = ready_head_ + random() % (ready_.size() - ready_head_);
        std::swap(ready_[ready_head_], ready_[i]);
      }
      Fiber* next = ready_[ready_head_++];
      if (ready_head_ == ready_.size()) {
        ready_.clear();
        ready_head_ = 0;
      }
      return next;
    }
    if (!jobs_.empty()) {
      land_one();
    } else if (waiting_.empty()) {
      grid_.report("dead-lock in block " + std::to_string(number_) + ": no thread can go on" +
                   describe());
    } else {
      grid_.wait(*this);
    }
  }
}

void Block::reschedule() {
  Fiber* me = context.fiber;
  if (!stacks_.intact(static_cast<int>(me->linear))) {
    fail(me->site, "the thread's stack has overflowed (DSPARK_SIMT_STACK_KB makes it larger)");
  }
  Fiber* next = pick();
  if (next == nullptr) leave();
  next->state = State::kRunning;
  if (next == me) return;
  context.fiber = next;
  dspark_simt_switch(&me->stack, next->stack);
}

void Block::block_on(State state, const char* what, Site site) {
  Fiber* me = context.fiber;
  me->state = state;
  me->what = what;
  me->site = site;
  reschedule();
}

void Block::wait_for_progress(const char* what, Site site) {
  waiting_.push_back({context.fiber, nullptr, 0});
  block_on(State::kWaiting, what, site);
}

void Block::wait_for_change(const uint64_t& word, const Explanation& why, Site site) {
  Fiber* me = context.fiber;
  waiting_.push_back({me, &word, word});
  me->why = &why;
  block_on(State::kWaiting, "", site);
  me->why = nullptr;
}

void Block::yield() {
  wake(context.fiber);
  reschedule();
}

void Block::maybe_yield() {
  if (!shuffled_) return;
  const uint64_t draw = random() % 32;
  if (draw == 0) grid_.maybe_yield(*this);
  if (grid_.stopped()) leave();
  if (draw < 4) yield();
}

void Block::start_async(Job job) {
  jobs_.push_back(std::move(job));
  const bool now = lateness() == Lateness::kEarly;
  if (now) {
    Job landing = std::move(jobs_.back());
    jobs_.pop_back();
    landing.land();
    grid_.progress();
  }
}

// ---- barriers and warps
// ---------------------------------------------------------------------------

int Block::block_barrier(Vote vote, int predicate, Site site) {
  Fiber* me = context.fiber;
  if (barrier_count_++ == 0) {
    barrier_vote_ = vote;
    barrier_result_ = vote == Vote::kAnd ? 1 : 0;
  }
  if (vote != barrier_vote_) fail(site, "the block's threads wait at barriers of different kinds");
  const int truth = predicate != 0 ? 1 : 0;
  if (vote == Vote::kOr) barrier_result_ |= truth;
  if (vote == Vote::kAnd) barrier_result_ &= truth;
  if (vote == Vote::kCount) barrier_result_ += truth;
  me->state = State::kBlockBarrier;
  me->what = "__syncthreads";
  me->site = site;
  check_block_barrier();
  reschedule();
  return me->vote;
}

void Block::check_block_barrier() {
  if (barrier_count_ == 0 || barrier_count_ < live_) return;
  const Fiber* first = nullptr;
  for (const Fiber& fiber : fibers_) {
    if (fiber.state != State::kBlockBarrier) continue;
    if (first == nullptr) first = &fiber;
    if (!same(first->site, fiber.site)) {
      fail(fiber.site, "divergent barrier: the threads are at different __syncthreads%s",
           describe().c_str());
    }
  }
  finish_block_barrier();
}

void Block::finish_block_barrier() {
  std::vector<Fiber*> members;
  for (Fiber& fiber : fibers_) {
    if (fiber.state != State::kBlockBarrier) continue;
    fiber.vote = barrier_result_;
    members.push_back(&fiber);
    wake(&fiber);
  }
  barrier_count_ = 0;
  check::meet(*this, members);
  grid_.progress();
  if (shuffled_ && random() % 16 == 0) grid_.maybe_yield(*this);
}

void Block::named_barrier(int id, int threads, bool wait, Site site) {
  Fiber* me = context.fiber;
  if (id < 1 || id > 15 || threads <= 0 || threads % 32 != 0) {
    fail(site, "named barrier %d of %d threads: the id is 1..15, the count a multiple of 32", id,
         threads);
  }
  NamedBarrier& barrier = named_[id];
  if (barrier.arrived == 0) barrier.threads = threads;
  if (barrier.threads != threads) {
    fail(site, "named barrier %d is used with %d and with %d threads at once", id, barrier.threads,
         threads);
  }
  check::arrive(*this, me, &barrier);
  if (wait) barrier.members.push_back(me);
  me->state = State::kNamedBarrier;
  me->what = "named barrier";
  me->site = site;
  me->barrier = id;
  if (++barrier.arrived == threads) {
    for (Fiber* fiber : barrier.members) {
      check::learn(*this, fiber, &barrier);
      if (fiber != me) wake(fiber);
    }
    check::forget(&barrier);
    barrier.arrived = 0;
    barrier.members.clear();
    grid_.progress();
    if (shuffled_) wake(me);
    if (!shuffled_) me->state = State::kRunning;
    if (shuffled_) reschedule();
  } else if (wait) {
    reschedule();
  } else {
    me->state = State::kRunning;
  }
}

void Block::warp_collective(unsigned mask, Finish finish, const char* what, Site site,
                            bool orders_memory) {
  Fiber* me = context.fiber;
  const unsigned first = me->warp * 32;
  const unsigned count = std::min<unsigned>(32, static_cast<unsigned>(fibers_.size()) - first);
  if (count < 32) mask &= (1u << count) - 1;
  me->mask = mask;
  me->finish = finish;
  me->what = what;
  me->site = site;
  if ((mask >> me->lane & 1u) == 0) {
    fail(site, "%s: the calling lane %u is not in its mask 0x%08x", what, me->lane, mask);
  }
  me->state = State::kWarp;
  for (unsigned i = 0; i < count; ++i) {
    const Fiber& other = fibers_[first + i];
    if ((mask >> i & 1u) == 0) continue;
    if (other.state == State::kExited) {
      fail(site, "%s with mask 0x%08x names lane %u, which has exited", what, mask, i);
    }
    if (other.state != State::kWarp || other.mask != mask) {
      reschedule();
      return;
    }
    if (other.finish != finish || strcmp(other.what, what) != 0) {
      fail(site, "lanes of mask 0x%08x meet in different operations: %s, and %s of lane %u at %s",
           mask, what, other.what, other.lane, place(other.site).c_str());
    }
  }
  finish_warp(me, orders_memory);
}

void Block::finish_warp(Fiber* last, bool orders_memory) {
  Thread* lanes[32] = {};
  std::vector<Fiber*> members;
  const unsigned first = last->warp * 32;
  for (unsigned i = 0; i < 32 && first + i < fibers_.size(); ++i) {
    lanes[i] = &fibers_[first + i];
    if ((last->mask >> i & 1u) != 0) members.push_back(&fibers_[first + i]);
  }
  last->finish(lanes, last->mask);
  if (orders_memory) check::meet(*this, members);
  grid_.progress();
  for (Fiber* fiber : members) {
    if (fiber != last || shuffled_) wake(fiber);
  }
  if (shuffled_) {
    reschedule();
  } else {
    last->state = State::kRunning;
  }
}

// ---- reports
// --------------------------------------------------------------------------------------

std::string Block::describe() const {
  std::map<std::string, std::vector<int>> groups;
  for (const Fiber& fiber : fibers_) {
    std::string text = fiber.why == nullptr ? fiber.what : fiber.why->text();
    if (fiber.state == State::kReady || fiber.state == State::kRunning) text = "able to go on";
    if (fiber.state == State::kNamedBarrier) text += " " + std::to_string(fiber.barrier);
    if (fiber.state == State::kWarp) {
      char mask[32];
      snprintf(mask, sizeof mask, " with mask 0x%08x", fiber.mask);
      text += mask;
    }
    const bool waits = fiber.state != State::kReady && fiber.state != State::kRunning &&
                       fiber.state != State::kExited;
    if (waits) text += " at " + place(fiber.site);
    groups[text].push_back(static_cast<int>(fiber.linear));
  }
  std::string text;
  for (const auto& [key, members] : groups) {
    text += "\n    block " + std::to_string(number_) + ", threads " + ranges(members) + ": " + key;
  }
  return text;
}

bool Block::owns_stack(const void* p) const {
  return p >= stacks_.low(0) && p < stacks_.high(threads() - 1);
}

bool Block::owns_fiber(const void* p) const {
  return p >= fibers_.data() && p < fibers_.data() + fibers_.size();
}

}  // namespace dspark::simt
