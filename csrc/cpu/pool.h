// Parallel regions whose threads take chunks of work as they come free. A thread that the machine
// holds back takes fewer chunks, and one that never began delays nobody: on a machine that others
// use as well, equal shares would all wait for the slowest.
//
// Each thread begins with chunks that follow one another, and then takes those of others.
//
// The caller works too, beside as many threads as make up torch's number. A region runs in its
// caller alone where it is one chunk, inside a chunk, or while another caller's region has the
// threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace speq::cpu {

// Bytes of weights that a thread takes at a time, in some ten microseconds: worth waking it for,
// and soon done where others wait for the last of them.
constexpr std::int64_t kGrainBytes = 128 << 10;

inline std::int64_t grain(std::int64_t bytes_per_item) {
  return 1 + kGrainBytes / std::max<std::int64_t>(bytes_per_item, 1);
}

// Calls a body, behind a pointer, for the items [begin, end) of a chunk.
using CallBody = void (*)(const void *body, std::int64_t begin, std::int64_t end);

void run_chunks(std::int64_t begin, std::int64_t end, std::int64_t grain, const void *body,
                CallBody call);

// Calls body(first, last) for the chunks of [begin, end), each of `grain` items but the last, and
// returns when all have ended. The first exception that a body throws reaches the caller; chunks
// that have not begun by then are left out.
template <typename Body>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body &body) {
  run_chunks(begin, end, grain, &body,
             [](const void *pointer, std::int64_t first, std::int64_t last) {
               (*static_cast<const Body *>(pointer))(first, last);
             });
}

} // namespace speq::cpu
