// SPDX-License-Identifier: Apache-2.0
#include "core/problems.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace dspark {
namespace {

// Append to the message of `status`; what does not fit is cut.
void append(dspark_status* status, const char* format, va_list args) {
  const size_t used = std::strlen(status->message);
  if (used + 1 >= sizeof status->message) return;
  std::vsnprintf(status->message + used, sizeof status->message - used, format, args);
}

void append_text(dspark_status* status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  append(status, format, args);
  va_end(args);
}

}  // namespace

dspark_status ok_status() { return dspark_status{}; }

dspark_status failed_status(int32_t code, const char* file, int32_t line, const char* format, ...) {
  dspark_status status{};
  status.code = code;
  status.file = file;
  status.line = line;
  va_list args;
  va_start(args, format);
  append(&status, format, args);
  va_end(args);
  return status;
}

void Problems::add(int32_t code, const char* file, int32_t line, const char* format, ...) {
  if (status_.code == DSPARK_OK) {
    status_.code = code;
    status_.file = file;
    status_.line = line;
    append_text(&status_, "%s:", function_);
  }
  // A wrong argument outranks a missing feature: it has to be mended first in any case.
  if (code == DSPARK_INVALID_ARGUMENT) status_.code = code;
  append_text(&status_, "\n  ");
  va_list args;
  va_start(args, format);
  append(&status_, format, args);
  va_end(args);
}

}  // namespace dspark
