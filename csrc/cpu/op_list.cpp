// Functions of op_list.h for Python's ctypes.

#include "cpu/op_list.h"

#include <algorithm>
#include <cstring>
#include <exception>

using speq::cpu::OpList;

#define SPEQ_EXPORT extern "C" __attribute__((visibility("default")))

SPEQ_EXPORT OpList *speq_op_list_new() { return new OpList; }

SPEQ_EXPORT void speq_op_list_free(OpList *list) { delete list; }

// Adds this thread's ops to a list from now on; null: they are run again.
SPEQ_EXPORT void speq_op_list_record(OpList *list) { speq::cpu::recording = list; }

SPEQ_EXPORT std::int64_t speq_op_list_stop(OpList *list) { return list->stop(); }

// Of `count` ids; table: of as many entries as there are ids, or null.
SPEQ_EXPORT std::int64_t speq_op_list_gate(OpList *list, const std::int64_t *ids,
                                           std::int64_t count, const std::int64_t *table) {
  return list->gate({ids, std::size_t(count)}, table);
}

SPEQ_EXPORT std::int64_t speq_op_list_end(OpList *list) { return list->end(); }

// As OpList::run, of `count` sequences; -1 if an op failed, whose message is then in `error`, cut
// to its size.
SPEQ_EXPORT std::int64_t speq_op_list_run(OpList *list, const std::int64_t *starts,
                                          std::int64_t count, std::int64_t first, int straight,
                                          char *error, std::int64_t size) {
  try {
    return list->run({starts, std::size_t(count)}, first, straight != 0);
  } catch (const std::exception &failure) {
    const std::size_t length = std::min(std::strlen(failure.what()), std::size_t(size) - 1);
    std::memcpy(error, failure.what(), length);
    error[length] = '\0';
    return -1;
  }
}

SPEQ_EXPORT const OpList::Passed *speq_op_list_passed(const OpList *list, std::int64_t *count) {
  *count = std::int64_t(list->passed().size());
  return list->passed().data();
}

SPEQ_EXPORT double speq_op_list_ran_s(const OpList *list) { return list->ran_s(); }
