#include "cuda_host/shim.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_host {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
// NaN as a float, out of range as an index.
constexpr int kPoison = 0xFF;

enum class State { ready, waiting, done };

struct Fiber {
  ucontext_t context; // where it begins
  void *place[5];     // where it goes on: a jump buffer of the compiler
  bool begun = false;
  std::unique_ptr<unsigned char[]> stack;
  State state = State::done;
  const char *operation = "nothing"; // what it waits at
  Index index{};
  int exchanges = 0;
  void *fake_stack = nullptr; // AddressSanitizer's
};

struct Warp {
  const char *operation = nullptr;
  int arrived = 0;
  // Of this exchange and of the last, which slower lanes may be reading yet.
  std::uint64_t words[2][kLanes];
};

std::mutex launches;
std::vector<std::unique_ptr<Fiber>> fibers; // kept for their stacks
std::vector<Warp> warps;
Fiber host;
Fiber *current = &host;
int threads = 0, at_barrier = 0;
unsigned launch_number = 0;
std::vector<int> order, places;        // threads as they take turns, and each thread's turn
std::vector<std::uint64_t> ready_bits; // of each turn: whether its thread is ready
Index block{}, grid{};
unsigned char *shared = nullptr;
const std::function<void()> *kernel = nullptr;

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "CUDA on the host: block (%u, %u), thread %u: %s\n", block.x, block.y,
               current->index.x, what);
  const auto whereabouts = [](int thread) {
    const Fiber &fiber = *fibers[thread];
    return fiber.state == State::waiting ? fiber.operation
           : fiber.state == State::done  ? "the end"
                                         : "nothing that waits";
  };
  for (int first = 0, end = 0; first < threads; first = end) {
    while (end < threads && std::strcmp(whereabouts(end), whereabouts(first)) == 0) {
      ++end;
    }
    std::fprintf(stderr, "  threads %d to %d are at %s\n", first, end - 1, whereabouts(first));
  }
  std::abort();
}

#ifdef __SANITIZE_ADDRESS__
const Fiber *came_from = nullptr;
const void *host_stack = nullptr;
std::size_t host_stack_bytes = 0;

void leave(Fiber &from, const Fiber &to) {
  came_from = &from;
  const bool to_host = &to == &host;
  __sanitizer_start_switch_fiber(&from.fake_stack, to_host ? host_stack : to.stack.get(),
                                 to_host ? host_stack_bytes : kStackBytes);
}

void arrive() {
  const void *stack;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(current->fake_stack, &stack, &bytes);
  if (came_from == &host) {
    host_stack = stack;
    host_stack_bytes = bytes;
  }
}
#else
void leave(Fiber &, const Fiber &) {}
void arrive() {}
#endif

// The compiler's jumps, not the library's: contexts ask the system for the signal mask at each
// switch, and the sanitizer clears what it knows of a stack when the library switches to it.
[[noreturn, gnu::noinline, gnu::no_sanitize_address]] void go_on(Fiber &fiber) {
  __builtin_longjmp(fiber.place, 1);
}

[[gnu::noinline, gnu::no_sanitize_address]] void switch_to(Fiber &next) {
  Fiber &previous = *current;
  current = &next;
  leave(previous, next);
  if (__builtin_setjmp(previous.place) == 0) {
    if (next.begun) {
      go_on(next);
    }
    next.begun = true;
    setcontext(&next.context);
  }
  arrive();
}

// Numbers below count, forwards, backwards, or shuffled: launches take turns. What lacks a barrier
// may work in any one order.
std::vector<int> in_some_order(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (launch_number % 3 == 1) {
    std::reverse(order.begin(), order.end());
  } else if (launch_number % 3 == 2) {
    std::shuffle(order.begin(), order.end(), std::mt19937(launch_number));
  }
  return order;
}

void become_ready(int thread) {
  const int turn = places[thread];
  fibers[thread]->state = State::ready;
  ready_bits[turn / 64] |= std::uint64_t(1) << turn % 64;
}

void leave_off(State state) {
  const int turn = places[current->index.x];
  current->state = state;
  ready_bits[turn / 64] &= ~(std::uint64_t(1) << turn % 64);
}

// The next thread that can go on; null for none. In turn, or, in every other launch, the first of
// all: warps then run as far ahead of others as barriers let them.
Fiber *next_ready() {
  const int first = launch_number % 2 == 0 ? 0 : (places[current->index.x] + 1) % threads;
  const int words = int(ready_bits.size());
  // The word that is begun within comes again, whole, as the last.
  for (int step = 0; step <= words; ++step) {
    const int word = (first / 64 + step) % words;
    const std::uint64_t bits =
        step == 0 ? ready_bits[word] & ~std::uint64_t(0) << first % 64 : ready_bits[word];
    if (bits != 0) {
      return fibers[order[64 * word + std::countr_zero(bits)]].get();
    }
  }
  return nullptr;
}

void wait(const char *operation) {
  leave_off(State::waiting);
  current->operation = operation;
  Fiber *next = next_ready();
  if (next == nullptr) {
    fail("nothing can go on");
  }
  switch_to(*next);
}

void wake(int first, int count) {
  for (int thread = first; thread < first + count; ++thread) {
    become_ready(thread);
  }
}

// A thread of every block that is run on this fiber: making a context asks the system too.
void thread_main() {
  arrive();
  while (true) {
    (*kernel)();
    leave_off(State::done);
    Fiber *next = next_ready();
    if (next == nullptr) {
      for (int thread = 0; thread < threads; ++thread) {
        if (fibers[thread]->state != State::done) {
          fail("ended, which others wait for");
        }
      }
      next = &host;
    }
    switch_to(*next);
  }
}

void add_fiber() {
  auto fiber = std::make_unique<Fiber>();
  fiber->stack = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
  fiber->index = {unsigned(fibers.size()), 0, 0};
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, thread_main, 0);
  fibers.push_back(std::move(fiber));
}

void run_block() {
  at_barrier = 0;
  warps.assign(threads / kLanes, Warp());
  for (int thread = 0; thread < threads; ++thread) {
    fibers[thread]->exchanges = 0;
    become_ready(thread);
  }
  switch_to(*fibers[order[0]]);
}

} // namespace

const Index &thread_index() { return current->index; }
const Index &block_index() { return block; }
const Index &grid_size() { return grid; }
unsigned char *shared_memory() { return shared; }

void barrier() {
  if (++at_barrier < threads) {
    wait("__syncthreads");
    return;
  }
  at_barrier = 0;
  wake(0, threads);
}

const std::uint64_t *exchange(const char *operation, unsigned mask, std::uint64_t word) {
  if (mask != 0xFFFFFFFFu) {
    fail("an operation of part of a warp, which this shim cannot do");
  }
  const int thread = int(current->index.x), number = current->exchanges++;
  Warp &warp = warps[thread / kLanes];
  if (warp.arrived > 0 && warp.operation != operation &&
      std::strcmp(warp.operation, operation) != 0) {
    fail("lanes of a warp are at different operations");
  }
  warp.operation = operation;
  std::uint64_t *words = warp.words[number % 2];
  words[thread % kLanes] = word;
  if (++warp.arrived < kLanes) {
    wait(operation);
  } else {
    warp.arrived = 0;
    wake(thread / kLanes * kLanes, kLanes);
  }
  return words;
}

void run(const std::function<void()> &of_thread, Index grid_size, int num_threads,
         std::size_t shared_bytes) {
  const std::lock_guard lock(launches);
  kernel = &of_thread;
  host.begun = true;
  grid = grid_size;
  threads = num_threads;
  while (int(fibers.size()) < threads) {
    add_fiber();
  }
  const auto memory = std::make_unique_for_overwrite<unsigned char[]>(shared_bytes);
  shared = memory.get();
  order = in_some_order(threads);
  places.resize(threads);
  for (int turn = 0; turn < threads; ++turn) {
    places[order[turn]] = turn;
  }
  ready_bits.assign((threads + 63) / 64, 0);
  for (const int number : in_some_order(int(grid.x * grid.y))) {
    block = {number % grid.x, number / grid.x, 0};
    std::memset(shared, kPoison, shared_bytes);
    run_block();
  }
  ++launch_number;
}

} // namespace cuda_host
