// SPDX-License-Identifier: Apache-2.0
#include "simt/grid.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>

#include "simt/checker.h"
#include "simt/limits.h"
#include "simt/prim_launch.h"

namespace dspark::simt {
namespace {

// Blocks of a grid that is not cooperative run a few at a time, so that they interleave.
constexpr unsigned kResident = 3;
// Rounds in which every waiting thread looks again although nothing has changed, before a launch
// counts as stuck.
constexpr int kIdleRounds = 400;

}  // namespace

Options Options::read() {
  const char* seed = getenv("DSPARK_SIMT_SEED");
  const char* async = getenv("DSPARK_SIMT_ASYNC");
  const char* stop = getenv("DSPARK_SIMT_STOP");
  const char* last = getenv("DSPARK_SIMT_LAST");
  Options options{seed != nullptr ? strtoull(seed, nullptr, 0) : 0, Lateness::kLate,
                  stop != nullptr ? strtoull(stop, nullptr, 0) : 0,
                  last != nullptr ? strtoll(last, nullptr, 0) : -1};
  if (async != nullptr && strcmp(async, "early") == 0) options.lateness = Lateness::kEarly;
  if (async != nullptr && strcmp(async, "random") == 0) options.lateness = Lateness::kRandom;
  return options;
}

Grid::Grid(const char* name, const prim::LaunchConfig& config, const Body& body)
    : name_(name),
      config_(config),
      body_(body),
      options_(Options::read()),
      blocks_(config.grid.x * config.grid.y * config.grid.z),
      random_state_(options_.seed * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull) {
  const unsigned cluster = std::max(1u, config.cluster);
  for (unsigned first = 0; first < blocks_; first += cluster) {
    // A random order of the clusters, whose blocks start one after another: they need each other.
    const size_t at =
        options_.seed == 0 ? order_.size() / cluster : random() % (order_.size() / cluster + 1);
    std::vector<unsigned> members;
    for (unsigned i = 0; i < cluster; ++i) members.push_back(first + i);
    order_.insert(order_.begin() + static_cast<ptrdiff_t>(at * cluster), members.begin(),
                  members.end());
  }
  const auto late = std::find(order_.begin(), order_.end(), options_.last);
  if (late != order_.end()) std::rotate(late, late + 1, order_.end());  // the last worker's
}

uint64_t Grid::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_ >> 11;
}

std::string Grid::run() {
  const unsigned cluster = std::max(1u, config_.cluster);
  const unsigned wanted = config_.cooperative ? blocks_ : kResident + cluster - 1;
  const size_t count = std::min(blocks_, wanted);
  running_.assign(count, nullptr);
  for (size_t i = 0; i < count; ++i) workers_.push_back(std::make_unique<Worker>());
  std::unique_lock<std::mutex> lock(mutex_);
  turn_ = 0;
  for (size_t i = 0; i < count; ++i) workers_[i]->thread = std::thread([this, i] { work(i); });
  done_.wait(lock, [&] { return finished_ == count; });
  lock.unlock();
  for (auto& worker : workers_) worker->thread.join();
  return report_;
}

void Grid::work(size_t index) {
  const dim3 size = config_.block;
  Stacks stacks(static_cast<int>(size.x * size.y * size.z));
  Worker& me = *workers_[index];
  {
    std::unique_lock<std::mutex> lock(mutex_);
    me.turn.wait(lock, [&] { return turn_ == index; });
  }
  while (!stopped_ && started_ < order_.size()) {
    Block block(*this, order_[started_++], stacks);
    running_[index] = &block;
    block.run();
    running_[index] = nullptr;
    progress();
    if (config_.cooperative)
      break;  // its successor would have to be resident too: each has its own
  }
  std::unique_lock<std::mutex> lock(mutex_);
  me.finished = true;
  ++finished_;
  size_t next = 0;
  if (choose_next(index, &next)) {
    turn_ = next;
    workers_[next]->turn.notify_one();
  }
  if (finished_ == workers_.size()) done_.notify_one();
}

/// A worker other than `from` that has something to do, or everybody's when the launch is stopped.
bool Grid::choose_next(size_t from, size_t* next) const {
  std::vector<size_t> candidates;
  for (size_t i = 1; i <= workers_.size(); ++i) {
    const size_t at = (from + i) % workers_.size();
    const Worker& worker = *workers_[at];
    if (at == from || worker.finished) continue;
    const bool looks = !worker.stuck || worker.stuck_at != events_ + nudges_;
    if (looks || stopped_ || workers_[from]->finished) candidates.push_back(at);
  }
  if (candidates.empty()) return false;
  if (options_.last >= 0 && candidates.size() > 1) {
    const auto late = std::find(candidates.begin(), candidates.end(), workers_.size() - 1);
    if (late != candidates.end()) candidates.erase(late);
  }
  const uint64_t draw = options_.seed == 0 ? 0 : const_cast<Grid*>(this)->random();
  *next = candidates[draw % candidates.size()];
  return true;
}

void Grid::pass_turn(size_t from, size_t to, std::unique_lock<std::mutex>& lock) {
  turn_ = to;
  workers_[to]->turn.notify_one();
  workers_[from]->turn.wait(lock, [&] { return turn_ == from; });
}

size_t Grid::index_of(const Block& block) const {
  for (size_t i = 0; i < running_.size(); ++i) {
    if (running_[i] == &block) return i;
  }
  abort();
}

void Grid::wait(Block& block) {
  const size_t me = index_of(block);
  std::unique_lock<std::mutex> lock(mutex_);
  Worker& worker = *workers_[me];
  worker.stuck = true;
  worker.stuck_at = events_ + nudges_;
  size_t next = 0;
  if (choose_next(me, &next)) {
    pass_turn(me, next, lock);
  } else {
    if (nudged_at_ != events_) idle_rounds_ = 0;
    nudged_at_ = events_;
    if (++idle_rounds_ > kIdleRounds) report_dead_lock();
    ++nudges_;
  }
  worker.stuck = false;
}

void Grid::report_dead_lock() {
  std::string text = "dead-lock: every thread waits";
  for (const Block* running : running_) {
    if (running != nullptr) text += running->describe();
  }
  report(text);
}

void Grid::maybe_yield(Block& block) {
  const size_t me = index_of(block);
  std::unique_lock<std::mutex> lock(mutex_);
  size_t next = 0;
  if (choose_next(me, &next)) pass_turn(me, next, lock);
}

void Grid::report(const std::string& text) {
  if (report_.empty()) report_ = text;
  stopped_ = true;
}

Block* Grid::block(unsigned number) {
  for (Block* running : running_) {
    if (running != nullptr && running->number() == number) return running;
  }
  return nullptr;
}

dspark_status launch(const char* name, const prim::LaunchConfig& config, const Body& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const std::string refusal = refuse_launch(config);
  if (!refusal.empty()) {
    return failed_status(too_crowded(config) ? DSPARK_UNSUPPORTED : DSPARK_CUDA_ERROR, __FILE__,
                         __LINE__, "%s: %s", name, refusal.c_str());
  }
  Grid grid(name, config, body);
  check::begin_launch(grid);
  std::string report = grid.run();
  check::end_launch(&report);
  if (report.empty()) return ok_status();
  return failed_status(DSPARK_CUDA_ERROR, __FILE__, __LINE__, "%s: %s", name, report.c_str());
}

}  // namespace dspark::simt
