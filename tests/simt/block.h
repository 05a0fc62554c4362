// SPDX-License-Identifier: Apache-2.0
//
// One block of a launch: its threads, which of them may go on, its barriers and shared memory. All
// of it is used by the operating-system thread of the block alone, while that thread has the turn
// (grid.h).
#ifndef DSPARK_TESTS_SIMT_BLOCK_H_
#define DSPARK_TESTS_SIMT_BLOCK_H_

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/runtime.h"

namespace dspark::simt {

class Grid;
struct BlockClocks;  // the checker's

enum class State { kReady, kRunning, kBlockBarrier, kNamedBarrier, kWarp, kWaiting, kExited };

/// A CUDA thread with all that the runner knows of it.
struct Fiber : Thread {
  void* stack = nullptr;  // where to go on
  State state = State::kReady;
  const char* what = "";             // the operation it is in
  const Explanation* why = nullptr;  // more of it, for a report
  Site site;
  unsigned mask = 0;        // kWarp
  Finish finish = nullptr;  // kWarp
  int barrier = 0;          // kNamedBarrier
  int vote = 0;             // what block_barrier() returns
  bool arrived_only = false;

  /// Whether reading `value` at `address` again shows a thread that waits.
  bool polls(const void* address, uint64_t value, uint64_t events);

  struct Copy {
    void* shared;
    const void* global;
    unsigned bytes, source_bytes;
    bool landed;
    check::AgentPtr agent;
    Site site;
  };
  std::deque<std::vector<Copy>> copy_groups;  // cp.async, oldest first
  std::vector<Copy> open_copies;

 private:
  static constexpr int kRemembered = 4;
  struct Poll {
    const void* address = nullptr;
    uint64_t value = 0;
  };
  Poll polls_[kRemembered];
  int next_poll_ = 0;
  int repeated_ = 0;
  uint64_t events_ = 0;
};

class Block {
 public:
  Block(Grid& grid, unsigned number, Stacks& stacks);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// Run all threads to their end, or until the launch is given up.
  void run();

  // Called by the running thread.
  int block_barrier(Vote vote, int predicate, Site site);
  void named_barrier(int id, int threads, bool wait, Site site);
  void warp_collective(unsigned mask, Finish finish, const char* what, Site site,
                       bool orders_memory);
  void wait_for_progress(const char* what, Site site);
  void wait_for_change(const uint64_t& word, const Explanation& why, Site site);
  /// Stay able to go on, but let the seed decide who does.
  void yield();
  /// The seed may take the turn from this block or this thread here.
  void maybe_yield();
  [[noreturn]] void leave();

  // Asynchronous work.
  struct Job {
    std::function<void()> land;
    const char* what;
    Site site;
  };
  void start_async(Job job);

  // Shared memory.
  char* dynamic_low() const { return dynamic_; }
  char* dynamic_high() const { return dynamic_ + dynamic_bytes_; }
  char* static_low() const { return static_low_; }
  char* static_high() const { return static_high_; }
  bool owns_stack(const void* p) const;
  bool owns_fiber(const void* p) const;

  Grid& grid() { return grid_; }
  unsigned number() const { return number_; }
  int threads() const { return static_cast<int>(fibers_.size()); }
  Fiber* fiber(int i) { return &fibers_[static_cast<size_t>(i)]; }
  Stacks& stacks() { return stacks_; }
  uint64_t random();
  bool shuffled() const { return shuffled_; }
  /// One line for each group of threads that are in the same place.
  std::string describe() const;
  bool has_waiters() const { return !waiting_.empty(); }

  std::map<const void*, std::shared_ptr<void>> slots;
  std::shared_ptr<BlockClocks> clocks;

 private:
  struct NamedBarrier {
    int arrived = 0;
    int threads = 0;
    std::vector<Fiber*> members;
  };

  /// A thread that waits for any event, or for one that changes a word.
  struct Waiting {
    Fiber* fiber;
    const uint64_t* word;
    uint64_t before;
  };

  void prepare_memory();
  void block_on(State state, const char* what, Site site);
  Fiber* pick();
  void reschedule();
  void wake(Fiber* fiber);
  void wake_waiting();
  void land_one();
  void finish_block_barrier();
  void check_block_barrier();
  void finish_warp(Fiber* last, bool orders_memory);
  void exit_thread();
  void check_end();
  static void entry();

  Grid& grid_;
  unsigned number_;
  Stacks& stacks_;
  std::vector<Fiber> fibers_;
  void* main_stack_ = nullptr;
  std::vector<Fiber*> ready_;
  size_t ready_head_ = 0;
  std::vector<Waiting> waiting_;
  uint64_t woken_at_ = 0;  // the grid's events when waiting_ was last woken
  std::vector<Job> jobs_;
  int live_ = 0;
  int barrier_count_ = 0;
  Vote barrier_vote_ = Vote::kNone;
  int barrier_result_ = 0;
  NamedBarrier named_[16];
  std::vector<unsigned> warp_arrived_;
  char* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0;
  char* static_low_ = nullptr;
  char* static_high_ = nullptr;
  uint64_t random_state_ = 1;
  bool shuffled_ = false;
};

/// "csrc/cuda/x.cuh:12": a path from the root of the sources.
std::string tidy(const std::string& path);
std::string place(Site site);

/// The block and the thread that this operating-system thread runs. Plain data: it lives in the
/// thread-local storage that is filled with garbage before each block.
struct Context {
  Block* block;
  Fiber* fiber;
};
extern thread_local Context context;

}  // namespace dspark::simt

#endif  // DSPARK_TESTS_SIMT_BLOCK_H_
