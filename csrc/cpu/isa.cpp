#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <utility>

#ifdef SPEQ_AARCH64
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef SPEQ_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace speq::cpu {
namespace {

#ifdef SPEQ_X86
// Whether the processor multiplies tiles of bfloat16, and the system lets this process. It keeps
// their registers from then on.
bool takes_tiles() {
  constexpr unsigned kTile = 1u << 24, kTilesOfBFloat16 = 1u << 22;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTile) == 0 ||
      (edx & kTilesOfBFloat16) == 0) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18; // asm/prctl.h of Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Isa detect() {
#ifdef SPEQ_AARCH64
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) == 0) {
    return Isa::neon;
  }
  return getauxval(AT_HWCAP2) & HWCAP2_BF16 ? Isa::neon_bf16 : Isa::neon_dot;
#endif
#ifdef SPEQ_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512) {
    if (!__builtin_cpu_supports("avx512vnni")) {
      return Isa::avx512;
    }
    if (!__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vbmi2")) {
      return Isa::avx512_vnni;
    }
    if (!__builtin_cpu_supports("avx512bf16")) {
      return Isa::avx512_vbmi2;
    }
    return takes_tiles() ? Isa::avx512_amx : Isa::avx512_bf16;
  }
  if (avx2) {
    return Isa::avx2;
  }
#endif
  return Isa::portable;
}

std::atomic<Isa> limit{Isa::avx512_amx};
thread_local bool in_order = false;

} // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa current_isa() { return std::max(best_isa(), limit.load(std::memory_order_relaxed)); }

bool sums_in_order() { return in_order; }

const MicroKernels &micro_kernels() {
  switch (current_isa()) {
#ifdef SPEQ_X86
  case Isa::avx512_amx:
    return avx512_amx_kernels;
  case Isa::avx512_bf16:
    return avx512_bf16_kernels;
  case Isa::avx512_vbmi2:
    return avx512_vbmi2_kernels;
  case Isa::avx512_vnni:
    return avx512_vnni_kernels;
  case Isa::avx512:
    return avx512_kernels;
  case Isa::avx2:
    return avx2_kernels;
#endif
#ifdef SPEQ_AARCH64
  case Isa::neon_bf16:
    return neon_bf16_kernels;
  case Isa::neon_dot:
    return neon_dot_kernels;
  case Isa::neon:
    return neon_kernels;
#endif
  default:
    return portable_kernels;
  }
}

DotInt4 dot_int4_for(const Int4Matrix &matrix) {
  const bool vectorised = takes_group(matrix.group_size, matrix.columns);
  return (vectorised ? micro_kernels() : portable_kernels).dot_int4;
}

} // namespace speq::cpu

// Called by speq/kernels/library.py through ctypes.
extern "C" {
// Whether this build and this processor can run it.
__attribute__((visibility("default"))) int speq_has_isa(int isa) {
  const auto best = speq::cpu::best_isa(), of = speq::cpu::Isa(isa);
  const bool arm = best >= speq::cpu::Isa::neon_bf16 && best <= speq::cpu::Isa::neon;
  return of == speq::cpu::Isa::portable || (of >= best && (arm || of <= speq::cpu::Isa::avx2));
}
// Sets it for this thread; says what it was.
__attribute__((visibility("default"))) int speq_order_sums(int wanted) {
  return std::exchange(speq::cpu::in_order, wanted != 0);
}
__attribute__((visibility("default"))) int speq_isa() { return int(speq::cpu::current_isa()); }
__attribute__((visibility("default"))) void speq_limit_isa(int isa) {
  speq::cpu::limit.store(speq::cpu::Isa(isa));
}
}
