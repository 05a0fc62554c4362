// SPDX-License-Identifier: Apache-2.0
//
// Findings of the checked build, with the source lines of instructions (by addr2line).
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <string>
#include <vector>

#include "simt/grid.h"
#include "simt/race_shadow.h"

namespace dspark::simt::check {
namespace {

constexpr size_t kMostFindings = 16;
std::vector<std::string> findings;

/// The source lines of an instruction, innermost inlined function first.
std::vector<std::string> lines_of(const void* instruction) {
  Dl_info info{};
  std::vector<std::string> lines;
  if (dladdr(instruction, &info) == 0 || info.dli_fname == nullptr) return lines;
  const uintptr_t offset =
      reinterpret_cast<uintptr_t>(instruction) - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
  char command[640];
  snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname,
           static_cast<size_t>(offset));
  FILE* pipe = popen(command, "r");
  if (pipe == nullptr) return lines;
  char line[512];
  while (fgets(line, sizeof line, pipe) != nullptr) {
    line[strcspn(line, "\n ")] = '\0';
    lines.push_back(tidy(line));
  }
  pclose(pipe);
  return lines;
}

bool starts_with(const std::string& text, const char* start) {
  return text.compare(0, strlen(start), start) == 0;
}

/// The kernel's own line, and the helper in csrc/core that it called.
std::string choose_line(const std::vector<std::string>& lines) {
  std::string helper;
  for (const std::string& line : lines) {
    const bool runner = starts_with(line, "tests/simt/") && line.find(".cu:") == std::string::npos;
    if (runner || starts_with(line, "/") || starts_with(line, "?")) continue;
    if (!starts_with(line, "csrc/core/")) return helper.empty() ? line : line + " (" + helper + ")";
    if (helper.empty()) helper = line;
  }
  return helper.empty() ? "an unknown line" : helper;
}

}  // namespace

std::string describe(const Location& location) {
  if (location.instruction == nullptr) return place(location.site);
  static std::map<const void*, std::string> known;
  std::string& text = known[location.instruction];
  if (text.empty()) text = choose_line(lines_of(location.instruction));
  return text;
}

void note(const std::string& text) {
  if (findings.size() < kMostFindings) findings.push_back(text);
}

void stop(const Location& location, const std::string& text) {
  const Thread& t = *context.fiber;
  context.block->grid().report("block " + std::to_string(context.block->number()) + " thread " +
                               std::to_string(t.linear) + " at " + describe(location) + ": " +
                               text);
  context.block->leave();
}

void end_launch(std::string* report) {
  std::string all;
  for (const std::string& finding : findings) all += (all.empty() ? "" : "\n  ") + finding;
  findings.clear();
  // What ended the launch may be a consequence of the race that was found before.
  if (!report->empty()) all += (all.empty() ? "" : "\n  ") + *report;
  *report = all;
}

}  // namespace dspark::simt::check
