#include "cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#include <unistd.h>

#include <torch/csrc/stable/ops.h>

namespace speq::cpu {
namespace {

using std::memory_order_relaxed;
using Clock = std::chrono::steady_clock;

// A thread that looks out for work takes a core from whoever has some; one that sleeps takes as
// long as this to wake. Regions of a layer follow one another within the first of these times.
constexpr std::chrono::microseconds kAwaitWork{50};
constexpr std::chrono::microseconds kAwaitEnd{20};
constexpr std::size_t kLine = 64;
constexpr int kMostSpans = 64;
// Waking a thread takes about as long as so many chunks.
constexpr std::int64_t kFewChunks = 4;

inline void relax() {
#ifdef SPEQ_X86
  __builtin_ia32_pause();
#endif
}

// Returns a value that is `wanted`. Looks for a while, then sleeps until told of a change.
template <typename Wanted>
std::uint32_t await(const std::atomic<std::uint32_t> &value, std::chrono::microseconds look,
                    const Wanted &wanted) {
  const auto until = Clock::now() + look;
  std::uint32_t found = value.load();
  while (!wanted(found) && Clock::now() < until) {
    for (int i = 0; i < 16 && !wanted(found); ++i) {
      relax();
      found = value.load();
    }
  }
  while (!wanted(found)) {
    value.wait(found);
    found = value.load();
  }
  return found;
}

struct Region {
  std::int64_t begin, end, grain;
  const void *body;
  CallBody call;
  std::fenv_t environment; // the caller's, or results would depend on who computes them

  std::int64_t chunks() const { return (end - begin + grain - 1) / grain; }
  void run(std::int64_t chunk) const {
    const std::int64_t first = begin + chunk * grain;
    call(body, first, std::min(first + grain, end));
  }
};

// Whether this thread is in a chunk.
thread_local bool within_region = false;

// Lives as long as the process, and its threads with it: they sleep when the process ends.
class Pool {
public:
  // Returns false, and does nothing, while another region runs.
  bool run(const Region &region, int threads) {
    const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
    if (!alone.owns_lock()) {
      return false;
    }
    grow(threads - 1);
    const std::int64_t chunks = region.chunks();
    const int spans = std::min(threads, kMostSpans);
    region_.store(&region, memory_order_relaxed);
    chunks_.store(chunks, memory_order_relaxed);
    helpers_.store(threads - 1, memory_order_relaxed);
    unfinished_.store(std::uint32_t(chunks), memory_order_relaxed);
    const std::uint32_t number = number_.load(memory_order_relaxed) + 1;
    const int before = spans_.exchange(spans, memory_order_relaxed);
    for (int span = 0; span < std::max(spans, before); ++span) {
      const std::int64_t own = first_of(span + 1, chunks, spans) - first_of(span, chunks, spans);
      tickets_[span].value.store(std::uint64_t(number) << 32 |
                                 std::uint64_t(span < spans ? own : 0));
    }
    number_.store(number);
    number_.notify_all();
    within_region = true;
    take_chunks(0);
    within_region = false;
    await(unfinished_, kAwaitEnd, [](std::uint32_t left) { return left == 0; });
    if (failed_.exchange(false, memory_order_relaxed)) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
    return true;
  }

private:
  // The caller can do with fewer threads than it wishes for.
  void grow(int threads) {
    try {
      for (; threads_ < threads; ++threads_) {
        std::thread([this, place = threads_] { help(place); }).detach();
      }
    } catch (const std::system_error &) {
    }
  }

  void help(int place) {
    within_region = true;
    for (std::uint32_t seen = 0;;) {
      seen = await(number_, kAwaitWork, [seen](std::uint32_t number) { return number != seen; });
      if (place < helpers_.load(memory_order_relaxed)) {
        take_chunks(place + 1);
      }
    }
  }

  // The first chunk of a span: each thread begins in one of its own, whose chunks follow one
  // another. What a kernel fetches ahead of one chunk is then of use to the thread that fetched it.
  static std::int64_t first_of(int span, std::int64_t chunks, int spans) {
    return chunks * std::min(span, spans) / spans;
  }

  // Takes chunks while there are some, of the thread's own span first. A ticket has a region's
  // number and how many chunks of a span nobody has taken. The region of a chunk that was taken
  // stays until the chunk is run: a thread that is slow finds its ticket changed, and gets none.
  void take_chunks(int place) {
    std::uint64_t entered = ~std::uint64_t(0);
    const int spans = spans_.load(memory_order_relaxed);
    for (int turn = 0; turn < spans; ++turn) {
      const int span = (place + turn) % spans;
      std::atomic<std::uint64_t> &tickets = tickets_[span].value;
      std::uint64_t ticket = tickets.load();
      while (const auto left = std::int64_t(ticket & 0xFFFFFFFF)) {
        if (!tickets.compare_exchange_weak(ticket, ticket - 1)) {
          continue;
        }
        const Region *region = region_.load(memory_order_relaxed);
        if (ticket >> 32 != entered) {
          std::fesetenv(&region->environment);
          entered = ticket >> 32;
        }
        const std::int64_t end = first_of(span + 1, chunks_.load(memory_order_relaxed),
                                          spans_.load(memory_order_relaxed));
        run(*region, end - left);
        ticket = tickets.load();
      }
    }
  }

  void run(const Region &region, std::int64_t chunk) {
    if (!failed_.load(memory_order_relaxed)) {
      try {
        region.run(chunk);
      } catch (...) {
        if (!failed_.exchange(true, memory_order_relaxed)) {
          error_ = std::current_exception();
        }
      }
    }
    if (unfinished_.fetch_sub(1) == 1) {
      unfinished_.notify_one();
    }
  }

  std::mutex running_;
  int threads_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  std::atomic<const Region *> region_{nullptr};
  std::atomic<std::int64_t> chunks_{0};
  std::atomic<int> helpers_{0}; // threads that may take part
  std::atomic<int> spans_{1};
  struct alignas(kLine) Ticket {
    std::atomic<std::uint64_t> value{0};
  };
  Ticket tickets_[kMostSpans];
  alignas(kLine) std::atomic<std::uint32_t> unfinished_{0};
  alignas(kLine) std::atomic<std::uint32_t> number_{0}; // of the region
};

// Behind each region of torch's own, such as attention, libgomp's threads spin for milliseconds,
// on the cores that ours want. They sleep almost at once where the process has more of them than
// the machine has cores: so one more thread has a team of them, which never has work again.
void let_openmp_sleep() {
  try {
    std::thread([] {
      torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1,
                                  [](std::int64_t, std::int64_t) {});
      for (;;) {
        pause();
      }
    }).detach();
  } catch (const std::system_error &) {
  }
}

std::atomic<Pool *> only_pool{nullptr};
std::once_flag prepared;

Pool &pool() {
  Pool *found = only_pool.load();
  if (found != nullptr) {
    return *found;
  }
  std::call_once(prepared, [] {
    // A child has none of the threads, and perhaps a lock that nobody will give back.
    pthread_atfork(nullptr, nullptr, [] { only_pool = nullptr; });
    let_openmp_sleep();
  });
  auto *made = new Pool;
  if (only_pool.compare_exchange_strong(found, made)) {
    return *made;
  }
  delete made;
  return *found;
}

} // namespace

void run_chunks(std::int64_t begin, std::int64_t end, std::int64_t grain, const void *body,
                CallBody call) {
  if (begin >= end) {
    return;
  }
  if (end - begin > kFewChunks * grain && !within_region) {
    const int threads = int(torch::stable::get_num_threads());
    if (threads > 1) {
      Region region{begin, end, grain, body, call, {}};
      std::fegetenv(&region.environment);
      if (pool().run(region, threads)) {
        return;
      }
    }
  }
  call(body, begin, end);
}

} // namespace speq::cpu
