// Loaded before the C library: counts a process's system calls on files below one folder, and has
// one of them fail. It is armed by `speq_arm`, and does nothing before.
//
// What goes by other ways than the C library's functions is not seen: pages of mapped files, and
// stdio's own calls.

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace {

// What happens to the call: it fails with an errno, moves half of its bytes, or never returns.
constexpr int HALF = -1, KILL = -2;
constexpr int MOST_FILES = 1 << 16;

struct Schedule {
  std::string folder;
  long at = 0;
  int fault = 0;
  std::atomic<long> passed{0};
  std::atomic<bool> armed{false};
  std::atomic<bool> struck{false};
  std::atomic<bool> ours[MOST_FILES] = {};
  std::mutex lock;
  std::vector<std::string> calls;
};

Schedule schedule;
thread_local bool inside = false;

template <class Function> Function next(const char *name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool ours(int file) {
  return schedule.armed && !inside && file >= 0 && file < MOST_FILES && schedule.ours[file];
}

bool below(const char *path) {
  const auto &folder = schedule.folder;
  return strncmp(path, folder.c_str(), folder.size()) == 0 &&
         (path[folder.size()] == '/' || path[folder.size()] == 0);
}

// Whether a path lies in the folder: a process whose paths are relative runs there.
bool ours(int folder, const char *path) {
  if (!schedule.armed || inside || path == nullptr)
    return false;
  if (path[0] == '/')
    return below(path);
  return folder == AT_FDCWD || ours(folder);
}

std::string name_of(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path);
  return length < 0 ? "?" : std::string(path, static_cast<size_t>(length));
}

// Counts a call. Returns the fault that strikes it, or 0.
int strike(const char *call, const std::string &what) {
  inside = true;
  const long number = ++schedule.passed;
  const bool struck = number == schedule.at;
  {
    std::lock_guard guard(schedule.lock);
    schedule.calls.push_back(std::string(call) + " " + what);
  }
  inside = false;
  if (!struck)
    return 0;
  schedule.struck = true;
  if (schedule.fault == KILL)
    kill(getpid(), SIGKILL);
  return schedule.fault;
}

int strike(const char *call, int file) {
  inside = true;
  const std::string name = name_of(file);
  inside = false;
  return strike(call, name);
}

// Half of the bytes. A file that is read past the page cache moves whole blocks.
size_t half(int file, size_t bytes) {
  const size_t block = (fcntl(file, F_GETFL) & O_DIRECT) != 0 ? 4096 : 1;
  return bytes / 2 / block * block;
}

void opened(int file) {
  if (file >= 0 && file < MOST_FILES)
    schedule.ours[file] = true;
}

// A call that moves `bytes` at `buffer`.
template <class Real, class... Rest>
ssize_t moved(const char *call, Real real, int file, void *buffer, size_t bytes, Rest... rest) {
  if (ours(file)) {
    const int fault = strike(call, file);
    if (fault > 0)
      return errno = fault, -1;
    if (fault == HALF) {
      const size_t fewer = half(file, bytes);
      if (fewer > 0)
        bytes = fewer;
    }
  }
  return real(file, buffer, bytes, rest...);
}

template <class Real, class... Rest>
ssize_t moved_parts(const char *call, Real real, int file, const iovec *parts, int count,
                    Rest... rest) {
  if (ours(file)) {
    const int fault = strike(call, file);
    if (fault > 0)
      return errno = fault, -1;
    if (fault == HALF) {
      const size_t fewer = half(file, parts[0].iov_len);
      const iovec first = {parts[0].iov_base, fewer > 0 ? fewer : parts[0].iov_len};
      return real(file, &first, 1, rest...);
    }
  }
  return real(file, parts, count, rest...);
}

} // namespace

#define FAILS_ON(condition, call, what, failed)                                                    \
  if (condition) {                                                                                 \
    const int fault = strike(call, what);                                                          \
    if (fault > 0)                                                                                 \
      return errno = fault, failed;                                                                \
  }

extern "C" {

// From now on calls on what lies in `folder` are counted, and call number `at` is struck.
void speq_arm(const char *folder, long at, int fault) {
  schedule.folder = folder;
  schedule.at = at;
  schedule.fault = fault;
  schedule.armed = true;
}

// Whether the call was struck. No call is from now on.
int speq_disarm() {
  schedule.armed = false;
  return schedule.struck;
}

// Writes the calls so far to a file, a line each.
void speq_write_calls(const char *path) {
  FILE *file = fopen(path, "w");
  if (file == nullptr)
    return;
  for (const auto &call : schedule.calls)
    fprintf(file, "%s\n", call.c_str());
  fclose(file);
}

#define OPENS(name)                                                                                \
  int name(const char *path, int flags, ...) {                                                     \
    va_list rest;                                                                                  \
    va_start(rest, flags);                                                                         \
    const mode_t mode = va_arg(rest, mode_t);                                                      \
    va_end(rest);                                                                                  \
    static auto real = next<int (*)(const char *, int, mode_t)>(#name);                            \
    const bool counts = ours(AT_FDCWD, path);                                                      \
    FAILS_ON(counts, flags & O_CREAT ? "create" : "open", path, -1)                                \
    const int file = real(path, flags, mode);                                                      \
    if (counts)                                                                                    \
      opened(file);                                                                                \
    return file;                                                                                   \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                             \
  int name(int folder, const char *path, int flags, ...) {                                         \
    va_list rest;                                                                                  \
    va_start(rest, flags);                                                                         \
    const mode_t mode = va_arg(rest, mode_t);                                                      \
    va_end(rest);                                                                                  \
    static auto real = next<int (*)(int, const char *, int, mode_t)>(#name);                       \
    const bool counts = ours(folder, path);                                                        \
    FAILS_ON(counts, flags & O_CREAT ? "create" : "open", path, -1)                                \
    const int file = real(folder, path, flags, mode);                                              \
    if (counts)                                                                                    \
      opened(file);                                                                                \
    return file;                                                                                   \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int file) {
  static auto real = next<int (*)(int)>("close");
  if (file >= 0 && file < MOST_FILES)
    schedule.ours[file] = false;
  return real(file);
}

ssize_t read(int file, void *buffer, size_t bytes) {
  static auto real = next<ssize_t (*)(int, void *, size_t)>("read");
  return moved("read", real, file, buffer, bytes);
}
#define READS_AT(name)                                                                             \
  ssize_t name(int file, void *buffer, size_t bytes, off_t offset) {                               \
    static auto real = next<ssize_t (*)(int, void *, size_t, off_t)>(#name);                       \
    return moved("read", real, file, buffer, bytes, offset);                                       \
  }
READS_AT(pread)
READS_AT(pread64)

ssize_t write(int file, const void *buffer, size_t bytes) {
  static auto real = next<ssize_t (*)(int, void *, size_t)>("write");
  return moved("write", real, file, const_cast<void *>(buffer), bytes);
}
#define WRITES_AT(name)                                                                            \
  ssize_t name(int file, const void *buffer, size_t bytes, off_t offset) {                         \
    static auto real = next<ssize_t (*)(int, void *, size_t, off_t)>(#name);                       \
    return moved("write", real, file, const_cast<void *>(buffer), bytes, offset);                  \
  }
WRITES_AT(pwrite)
WRITES_AT(pwrite64)

#define MOVES_PARTS(name, call)                                                                    \
  ssize_t name(int file, const iovec *parts, int count) {                                          \
    static auto real = next<ssize_t (*)(int, const iovec *, int)>(#name);                          \
    return moved_parts(call, real, file, parts, count);                                            \
  }
MOVES_PARTS(readv, "read")
MOVES_PARTS(writev, "write")

#define MOVES_PARTS_AT(name, call)                                                                 \
  ssize_t name(int file, const iovec *parts, int count, off_t offset) {                            \
    static auto real = next<ssize_t (*)(int, const iovec *, int, off_t)>(#name);                   \
    return moved_parts(call, real, file, parts, count, offset);                                    \
  }
MOVES_PARTS_AT(preadv, "read")
MOVES_PARTS_AT(preadv64, "read")
MOVES_PARTS_AT(pwritev, "write")
MOVES_PARTS_AT(pwritev64, "write")

#define MOVES_PARTS_WITH(name, call)                                                               \
  ssize_t name(int file, const iovec *parts, int count, off_t offset, int flags) {                 \
    static auto real = next<ssize_t (*)(int, const iovec *, int, off_t, int)>(#name);              \
    return moved_parts(call, real, file, parts, count, offset, flags);                             \
  }
MOVES_PARTS_WITH(preadv2, "read")
MOVES_PARTS_WITH(preadv64v2, "read")
MOVES_PARTS_WITH(pwritev2, "write")
MOVES_PARTS_WITH(pwritev64v2, "write")

ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *place, size_t bytes,
                        unsigned flags) {
  static auto real =
      next<ssize_t (*)(int, off64_t *, int, off64_t *, size_t, unsigned)>("copy_file_range");
  FAILS_ON(ours(to), "copy", to, -1)
  return real(from, at, to, place, bytes, flags);
}
#define SENDS(name)                                                                                \
  ssize_t name(int to, int from, off_t *at, size_t bytes) {                                        \
    static auto real = next<ssize_t (*)(int, int, off_t *, size_t)>(#name);                        \
    FAILS_ON(ours(to), "copy", to, -1)                                                             \
    return real(to, from, at, bytes);                                                              \
  }
SENDS(sendfile)
SENDS(sendfile64)

#define ON_A_FILE(name, call)                                                                      \
  int name(int file) {                                                                             \
    static auto real = next<int (*)(int)>(#name);                                                  \
    FAILS_ON(ours(file), call, file, -1)                                                           \
    return real(file);                                                                             \
  }
ON_A_FILE(fsync, "sync")
ON_A_FILE(fdatasync, "sync")

#define CUTS(name)                                                                                 \
  int name(int file, off_t bytes) {                                                                \
    static auto real = next<int (*)(int, off_t)>(#name);                                           \
    FAILS_ON(ours(file), "truncate", file, -1)                                                     \
    return real(file, bytes);                                                                      \
  }
CUTS(ftruncate)
CUTS(ftruncate64)

#define ALLOCATES(name)                                                                            \
  int name(int file, off_t first, off_t bytes) {                                                   \
    static auto real = next<int (*)(int, off_t, off_t)>(#name);                                    \
    if (ours(file)) {                                                                              \
      const int fault = strike("allocate", file);                                                  \
      if (fault > 0)                                                                               \
        return fault;                                                                              \
    }                                                                                              \
    return real(file, first, bytes);                                                               \
  }
ALLOCATES(posix_fallocate)
ALLOCATES(posix_fallocate64)

int flock(int file, int operation) {
  static auto real = next<int (*)(int, int)>("flock");
  FAILS_ON(ours(file), "lock", file, -1)
  return real(file, operation);
}

#define NAMES_ONE(name, call)                                                                      \
  int name(const char *path) {                                                                     \
    static auto real = next<int (*)(const char *)>(#name);                                         \
    FAILS_ON(ours(AT_FDCWD, path), call, path, -1)                                                 \
    return real(path);                                                                             \
  }
NAMES_ONE(unlink, "remove")
NAMES_ONE(rmdir, "remove")

int unlinkat(int folder, const char *path, int flags) {
  static auto real = next<int (*)(int, const char *, int)>("unlinkat");
  FAILS_ON(ours(folder, path), "remove", path, -1)
  return real(folder, path, flags);
}
int mkdir(const char *path, mode_t mode) {
  static auto real = next<int (*)(const char *, mode_t)>("mkdir");
  FAILS_ON(ours(AT_FDCWD, path), "make", path, -1)
  return real(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
  static auto real = next<int (*)(int, const char *, mode_t)>("mkdirat");
  FAILS_ON(ours(folder, path), "make", path, -1)
  return real(folder, path, mode);
}

#define NAMES_TWO(name, call)                                                                      \
  int name(const char *from, const char *to) {                                                     \
    static auto real = next<int (*)(const char *, const char *)>(#name);                           \
    FAILS_ON(ours(AT_FDCWD, to), call, to, -1)                                                     \
    return real(from, to);                                                                         \
  }
NAMES_TWO(rename, "rename")
NAMES_TWO(link, "link")

int renameat(int from, const char *old, int to, const char *path) {
  static auto real = next<int (*)(int, const char *, int, const char *)>("renameat");
  FAILS_ON(ours(to, path), "rename", path, -1)
  return real(from, old, to, path);
}

DIR *opendir(const char *path) {
  static auto real = next<DIR *(*)(const char *)>("opendir");
  FAILS_ON(ours(AT_FDCWD, path), "list", path, nullptr)
  return real(path);
}

#define LOOKS(name, Found)                                                                         \
  int name(const char *path, struct Found *found) {                                                \
    static auto real = next<int (*)(const char *, struct Found *)>(#name);                         \
    FAILS_ON(ours(AT_FDCWD, path), "look", path, -1)                                               \
    return real(path, found);                                                                      \
  }
LOOKS(stat, stat)
LOOKS(lstat, stat)
LOOKS(stat64, stat64)
LOOKS(lstat64, stat64)

#define MAPS(name)                                                                                 \
  void *name(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {     \
    static auto real = next<void *(*)(void *, size_t, int, int, int, off_t)>(#name);               \
    FAILS_ON(ours(file), "map", file, MAP_FAILED)                                                  \
    return real(address, bytes, protection, flags, file, offset);                                  \
  }
MAPS(mmap)
MAPS(mmap64)
}
