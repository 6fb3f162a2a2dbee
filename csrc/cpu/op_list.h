// Lists of ops with their arguments: a pass is recorded once, and then run without the host's calls
// of each op. speq/kernels/op_list.py has the same in Python.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

namespace speq::cpu {

// Ops that are run one after another. Their tensors live as long as the list.
class OpList {
public:
  // The position of each sequence's first token.
  using Starts = std::span<const std::int64_t>;
  using Op = std::function<void(Starts)>;

  void add(Op op) { entries_.push_back({Kind::op, std::move(op)}); }

  // A place where the host has its part. Returns the index of what follows.
  std::int64_t stop() { return place({Kind::stop}); }

  // A stop that straight runs pass, unless the table has a negative entry for any of the ids: then
  // the ops up to the next end do the host's part. Without a table they always pass. Both must live
  // as long as the list. Returns the index of what follows.
  std::int64_t gate(std::span<const std::int64_t> ids, const std::int64_t *table) {
    return place({Kind::gate, {}, ids, table});
  }

  // Where the part of the last gate ends. Returns the index of what follows.
  std::int64_t end() { return place({Kind::end}); }

  // Runs from an index to the next stop. Returns the index of what follows it; 0 at the end.
  std::int64_t run(Starts starts, std::int64_t first, bool straight) {
    const double begun_s = now_s();
    const std::int64_t following = run_on(starts, first, straight);
    ran_s_ += now_s() - begun_s;
    return following;
  }

  // Seconds that ops have run, in all.
  double ran_s() const { return ran_s_; }

  // A gate that a run passed: the index of what follows it, and when its part ran.
  struct Passed {
    std::int64_t following;
    double start_s, end_s;
  };

  // Of the last run from the start.
  const std::vector<Passed> &passed() const { return passed_; }

private:
  std::int64_t run_on(Starts starts, std::int64_t first, bool straight) {
    if (first == 0) {
      passed_.clear();
    }
    bool timed = false;
    for (std::size_t at = std::size_t(first); at < entries_.size(); ++at) {
      const Entry &entry = entries_[at];
      switch (entry.kind) {
      case Kind::op:
        entry.op(starts);
        break;
      case Kind::stop:
        return std::int64_t(at) + 1;
      case Kind::gate:
        if (!straight || !entry.open()) {
          return std::int64_t(at) + 1;
        }
        passed_.push_back({std::int64_t(at) + 1, now_s(), 0.0});
        timed = true;
        break;
      case Kind::end:
        if (timed) {
          passed_.back().end_s = now_s();
          timed = false;
        }
        break;
      }
    }
    return 0;
  }

  enum class Kind { op, stop, gate, end };

  struct Entry {
    Kind kind;
    Op op{};
    std::span<const std::int64_t> ids{};
    const std::int64_t *table = nullptr;

    bool open() const {
      return table == nullptr ||
             std::all_of(ids.begin(), ids.end(), [this](auto id) { return table[id] >= 0; });
    }
  };

  std::int64_t place(Entry entry) {
    entries_.push_back(std::move(entry));
    return std::int64_t(entries_.size());
  }

  // The clock of Python's perf_counter.
  static double now_s() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
  }

  std::vector<Entry> entries_;
  std::vector<Passed> passed_;
  double ran_s_ = 0.0;
};

// The list that ops of this thread are added to, in place of being run; null: they are run.
inline thread_local OpList *recording = nullptr;

// An op that can be recorded. start_at: which argument is the position of the first token, if any.
// While it is recorded, that argument is the number of the token's sequence.
template <auto op, int start_at = -1, class Function = decltype(op)> struct Recordable;

template <auto op, int start_at, class... Arguments>
struct Recordable<op, start_at, void (*)(Arguments...)> {
  static void call(Arguments... arguments) {
    if (recording == nullptr) {
      op(std::move(arguments)...);
      return;
    }
    auto packed = std::make_tuple(std::move(arguments)...);
    if constexpr (start_at < 0) {
      recording->add([packed = std::move(packed)](OpList::Starts) { std::apply(op, packed); });
    } else {
      const auto sequence = std::size_t(std::get<start_at>(packed));
      recording->add([packed = std::move(packed), sequence](OpList::Starts starts) mutable {
        STD_TORCH_CHECK(sequence < starts.size(), "a list of ops has sequence ", sequence,
                        "; its run was given ", starts.size());
        std::get<start_at>(packed) = starts[sequence];
        std::apply(op, packed);
      });
    }
  }
};

} // namespace speq::cpu

// As TORCH_BOX, of an op that can be recorded.
#define SPEQ_BOX(op) TORCH_BOX((&speq::cpu::Recordable<&op>::call))
#define SPEQ_BOX_AT(op, start_at) TORCH_BOX((&speq::cpu::Recordable<&op, start_at>::call))
