// INT4 codes as the draft stores them: two codes per byte, low nibble first, zero point 8.
// Plain C++ without torch headers, so that every backend and every test can include it.
#pragma once

#include <cstdint>

namespace speq {

constexpr int kInt4ZeroPoint = 8;

inline int low_code(std::uint8_t byte) { return (byte & 0xF) - kInt4ZeroPoint; }
inline int high_code(std::uint8_t byte) { return (byte >> 4) - kInt4ZeroPoint; }

} // namespace speq
