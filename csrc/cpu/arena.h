// SPDX-License-Identifier: Apache-2.0
#ifndef DSPARK_CPU_ARENA_H_
#define DSPARK_CPU_ARENA_H_

#include <cstddef>
#include <cstdint>

namespace dspark::cpu {

/// Carves arrays out of a workspace. The same code with no memory behind it measures the size.
class Arena {
 public:
  explicit Arena(void* data) : data_(static_cast<char*>(data)) {}

  /// `count` elements on their own cache lines; NULL while measuring or when `count` is 0.
  template <class T>
  T* take(int64_t count) {
    if (count <= 0) return nullptr;
    T* place = data_ == nullptr ? nullptr : reinterpret_cast<T*>(data_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return place;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* data_;
  size_t bytes_ = 0;
};

}  // namespace dspark::cpu

#endif  // DSPARK_CPU_ARENA_H_
