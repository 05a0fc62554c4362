// SPDX-License-Identifier: Apache-2.0
#include "simt/fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <mutex>
#include <vector>

#if !defined(__x86_64__)
#error "the runner's stack switch is written for x86-64"
#endif

asm(R"(.text
.globl dspark_simt_switch
.hidden dspark_simt_switch
.type dspark_simt_switch, @function
dspark_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size dspark_simt_switch, .-dspark_simt_switch
)");

namespace dspark::simt {
namespace {

constexpr uint64_t kCanary = 0x5eed5eed5eed5eedull;  // the lowest word of a stack

struct Arena {
  char* memory;
  size_t bytes;
  int count;
};
std::mutex pool_mutex;
std::vector<Arena>& pool() {
  static auto* arenas = new std::vector<Arena>;  // never destroyed: threads may outlive statics
  return *arenas;
}

size_t stack_bytes() {
  const char* text = getenv("DSPARK_SIMT_STACK_KB");
  const long kilobytes = text != nullptr && *text != '\0' ? strtol(text, nullptr, 10) : 128;
  // The odd 192 bytes: equal places of all stacks would fall into the same cache set.
  return static_cast<size_t>(kilobytes < 16 ? 16 : kilobytes) * 1024 + 192;
}

}  // namespace

Stacks::Stacks(int count) : memory_(nullptr), bytes_(stack_bytes() + kGap), count_(count) {
  {
    const std::lock_guard<std::mutex> lock(pool_mutex);
    std::vector<Arena>& arenas = pool();
    for (size_t i = 0; i < arenas.size(); ++i) {
      if (arenas[i].bytes != bytes_ || arenas[i].count < count) continue;
      memory_ = arenas[i].memory;
      count_ = arenas[i].count;
      arenas.erase(arenas.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
  }
  void* memory = mmap(nullptr, bytes_ * static_cast<size_t>(count), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  memory_ = static_cast<char*>(memory);
}

Stacks::~Stacks() {
  const std::lock_guard<std::mutex> lock(pool_mutex);
  pool().push_back({memory_, bytes_, count_});
}

void* Stacks::prepare(int i, void (*entry)()) const {
  *reinterpret_cast<uint64_t*>(low(i)) = kCanary;
  // The switch pops six registers and returns: `entry` then starts as if it had been called.
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(high(i)) & ~uintptr_t{15}) - 1;
  *--top = reinterpret_cast<void*>(entry);
  for (int k = 0; k < 6; ++k) *--top = nullptr;
  return top;
}

bool Stacks::intact(int i) const { return *reinterpret_cast<uint64_t*>(low(i)) == kCanary; }

}  // namespace dspark::simt
