#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace speq::cpu {

// Uninitialised elements on a cache line of their own.
template <typename T> class Buffer {
public:
  explicit Buffer(std::size_t count)
      : data_(static_cast<T *>(std::aligned_alloc(kLine, rounded(count * sizeof(T))))) {
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
  }
  T *data() { return data_.get(); }
  const T *data() const { return data_.get(); }
  T &operator[](std::size_t i) { return data_.get()[i]; }

private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t rounded(std::size_t bytes) { return (bytes / kLine + 1) * kLine; }
  struct Free {
    void operator()(T *data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> data_;
};

} // namespace speq::cpu
