// SPDX-License-Identifier: Apache-2.0
//
// A launch. Each resident block has an operating-system thread of its own, since its __shared__
// variables are thread-local; but only one of them has the turn at a time, and the seed decides who
// gets it next. So a launch is a function of its arguments and the seed, and nothing in the runner
// needs a lock besides the turn.
#ifndef DSPARK_TESTS_SIMT_GRID_H_
#define DSPARK_TESTS_SIMT_GRID_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/prim/launch.h"
#include "simt/block.h"
#include "simt/prim_launch.h"

namespace dspark::simt {

/// What the environment asks for (README.md lists the variables).
struct Options {
  uint64_t seed;
  Lateness lateness;
  uint64_t stop;  ///< 0, or the change of an atomic at which the launch dies
  int64_t last;   ///< -1, or the block that runs only when no other one can go on
  static Options read();
};

class Grid {
 public:
  Grid(const char* name, const prim::LaunchConfig& config, const Body& body);

  /// Run every block; the report of what went wrong, empty if nothing did.
  std::string run();

  // Called by the block that has the turn.

  /// Something changed that may let a waiting thread go on.
  void progress() { ++events_; }
  uint64_t events() const { return events_; }
  /// Whether the launch is to die here: what a test wants of it.
  bool interrupted() const { return options_.stop != 0 && events_ >= options_.stop; }
  /// All threads of `block` wait for something outside. Returns when it is worth looking again.
  void wait(Block& block);
  /// Perhaps let another block go first.
  void maybe_yield(Block& block);
  /// Record what went wrong (the first report counts); everybody stops.
  void report(const std::string& text);
  bool stopped() const { return stopped_; }
  /// The block with this number, if it is running.
  Block* block(unsigned number);
  /// How often everybody was woken because nothing moved.
  uint64_t nudges() const { return nudges_; }

  const char* name() const { return name_; }
  const prim::LaunchConfig& config() const { return config_; }
  const Body& body() const { return body_; }
  const Options& options() const { return options_; }
  unsigned blocks() const { return blocks_; }
  const std::vector<Block*>& running_blocks() const { return running_; }

 private:
  struct Worker {
    std::thread thread;
    std::condition_variable turn;
    bool finished = false;
    bool stuck = false;
    uint64_t stuck_at = 0;
  };

  void work(size_t index);
  unsigned next_block();
  bool choose_next(size_t from, size_t* next) const;
  void pass_turn(size_t from, size_t to, std::unique_lock<std::mutex>& lock);
  size_t index_of(const Block& block) const;
  void report_dead_lock();
  uint64_t random();

  const char* name_;
  const prim::LaunchConfig& config_;
  const Body& body_;
  Options options_;
  unsigned blocks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Block*> running_;  // by worker
  std::vector<unsigned> order_;  // of the blocks
  size_t started_ = 0;
  std::mutex mutex_;
  std::condition_variable done_;
  size_t turn_ = 0;
  size_t finished_ = 0;
  uint64_t events_ = 1;
  uint64_t nudges_ = 0;
  uint64_t nudged_at_ = 0;
  int idle_rounds_ = 0;
  bool stopped_ = false;
  std::string report_;
  uint64_t random_state_;
};

}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_GRID_H_
