// SPDX-License-Identifier: Apache-2.0
//
// Collects everything that is wrong with the arguments of one call, and turns it into a status.
// No allocation: the text grows inside the status itself and is cut at its end.
#ifndef DSPARK_CORE_PROBLEMS_H_
#define DSPARK_CORE_PROBLEMS_H_

#include "dspark/types.h"

namespace dspark {

/// A successful status.
dspark_status ok_status();

/// A failed status with one formatted text.
dspark_status failed_status(int32_t code, const char* file, int32_t line, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

class Problems {
 public:
  explicit Problems(const char* function) : function_(function) {}

  /// Add one problem: "argument: got ..., expected ...". `code` is the worst one that stays.
  void add(int32_t code, const char* file, int32_t line, const char* format, ...)
      __attribute__((format(printf, 5, 6)));

  bool none() const { return status_.code == DSPARK_OK; }
  dspark_status status() const { return status_; }

 private:
  const char* function_;
  dspark_status status_{};
};

}  // namespace dspark

/// Record a problem unless `condition` holds. The text says what was got and what was expected.
#define DSPARK_REQUIRE(problems, condition, ...)                                                \
  do {                                                                                          \
    if (!(condition)) (problems).add(DSPARK_INVALID_ARGUMENT, __FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

/// Record that a legal request is not served by this build, unless `condition` holds.
#define DSPARK_SUPPORTED(problems, condition, ...)                                         \
  do {                                                                                     \
    if (!(condition)) (problems).add(DSPARK_UNSUPPORTED, __FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

#endif  // DSPARK_CORE_PROBLEMS_H_
