// Cases of parallel regions, each run by its name, away from torch: what csrc/cpu/pool.cpp asks of
// it is here, so that the sanitizers see every thread. Ends with 0 where the case holds.
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/stable/ops.h>

#include "cpu/pool.h"

namespace {
std::atomic<std::uint32_t> wished_threads{2};
}

extern "C" {
AOTITorchError torch_get_num_threads(std::uint32_t *threads) {
  *threads = wished_threads;
  return 0;
}
AOTITorchError torch_parallel_for(std::int64_t begin, std::int64_t end, std::int64_t,
                                  ParallelFunc function, void *context) {
  function(begin, end, context);
  return 0;
}
}

namespace {

using speq::cpu::parallel_for;

// Whether every item was visited once, by chunks of `grain`.
bool visits_each_once(std::int64_t begin, std::int64_t end, std::int64_t grain) {
  std::vector<std::atomic<int>> visits(end > begin ? end - begin : 0);
  std::atomic<bool> sound{true};
  parallel_for(begin, end, grain, [&](std::int64_t first, std::int64_t last) {
    sound = sound && first >= begin && first < last && last <= end;
    for (std::int64_t i = first; i < last; ++i) {
      ++visits[i - begin];
    }
  });
  for (const auto &count : visits) {
    sound = sound && count == 1;
  }
  return sound;
}

// Meets others: true once so many are here, false where they do not come.
class Meeting {
public:
  explicit Meeting(int wanted) : wanted_(wanted) {}
  bool join() {
    std::unique_lock lock(mutex_);
    ++here_;
    changed_.notify_all();
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return here_ >= wanted_; });
  }

private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int wanted_, here_ = 0;
};

// Whether so many threads are in chunks at the same time.
bool work_at_once(int threads) {
  wished_threads = threads;
  Meeting meeting(threads);
  std::atomic<bool> met{true};
  // Of few chunks nobody else would be woken.
  parallel_for(0, 8 * threads, 1, [&](std::int64_t, std::int64_t) { met = meeting.join() && met; });
  return met;
}

bool sizes() {
  for (const int threads : {1, 2, 3, 8, 2}) {
    wished_threads = threads;
    for (const std::int64_t size : {-3, 0, 1, 2, 7, 64, 1001}) {
      for (const std::int64_t grain : {1, 2, 5, 64, 2000}) {
        if (!visits_each_once(-2, size - 2, grain)) {
          return false;
        }
      }
    }
  }
  return true;
}

// Region upon region: threads that come late to one find the next.
bool many() {
  wished_threads = 3;
  for (int round = 0; round < 3000; ++round) {
    std::int64_t parts[17] = {};
    parallel_for(0, 17, 1, [&](std::int64_t first, std::int64_t) { parts[first] = round + first; });
    for (int i = 0; i < 17; ++i) {
      if (parts[i] != round + i) {
        return false;
      }
    }
  }
  return true;
}

bool threads() { return work_at_once(2) && work_at_once(5) && work_at_once(3); }

bool exceptions() {
  for (const int at : {0, 50, 99}) {
    bool caught = false;
    try {
      parallel_for(0, 100, 1, [&](std::int64_t first, std::int64_t) {
        if (first >= at) {
          throw std::runtime_error("thrown by a chunk");
        }
      });
    } catch (const std::runtime_error &error) {
      caught = std::strcmp(error.what(), "thrown by a chunk") == 0;
    }
    if (!caught || !visits_each_once(0, 100, 3)) {
      return false;
    }
  }
  return true;
}

bool nested() {
  std::atomic<bool> sound{true};
  parallel_for(0, 8, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    int chunks = 0;
    parallel_for(0, 100, 1, [&](std::int64_t first, std::int64_t last) {
      sound = sound && self == std::this_thread::get_id() && first == 0 && last == 100;
      ++chunks;
    });
    sound = sound && chunks == 1;
  });
  return sound;
}

bool callers() {
  std::atomic<bool> sound{true};
  std::vector<std::thread> all;
  for (int caller = 0; caller < 4; ++caller) {
    all.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        sound = visits_each_once(0, 40, 3) && sound;
      }
    });
  }
  for (std::thread &caller : all) {
    caller.join();
  }
  return sound;
}

// Threads compute under the rules of the caller, whichever it has when it calls.
bool environment() {
  for (const int rounding : {FE_UPWARD, FE_DOWNWARD, FE_TONEAREST}) {
    std::fesetround(rounding);
    Meeting meeting(2);
    std::atomic<bool> alike{true};
    parallel_for(0, 16, 1, [&](std::int64_t, std::int64_t) {
      alike = meeting.join() && std::fegetround() == rounding && alike;
    });
    if (!alike) {
      return false;
    }
  }
  return true;
}

// A child of a fork has none of its parent's threads, even where one had the pool.
bool forked() {
  if (!work_at_once(2)) {
    return false;
  }
  bool sound = true;
  parallel_for(0, 16, 1, [&](std::int64_t first, std::int64_t) {
    if (first == 0) {
      std::thread([&] {
        const pid_t child = fork();
        if (child == 0) {
          _exit(work_at_once(2) ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        sound = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      }).join();
    }
  });
  return sound && work_at_once(2);
}

const std::map<std::string, bool (*)()> kCases = {
    {"sizes", sizes},
    {"many", many},
    {"threads", threads},
    {"exceptions", exceptions},
    {"nested", nested},
    {"callers", callers},
    {"environment", environment},
    {"forked", forked},
};

} // namespace

int main(int count, char **arguments) {
  for (int i = 1; i < count; ++i) {
    const auto found = kCases.find(arguments[i]);
    if (found == kCases.end() || !found->second()) {
      std::fprintf(stderr, "%s does not hold\n", arguments[i]);
      return 1;
    }
  }
  return count > 1 ? 0 : 2;
}
