// CRC-32 as zlib has it, by carry-less products (Gopal et al., Intel 2009): four lanes of 128 bits,
// or of 512 where the processor has them. zlib's own takes a core's whole time for 1 to 4 GB/s, as
// much as a disk gives.
#include "cpu/isa.h"

#include <cstddef>
#include <cstdint>

#ifdef SPEQ_X86
#include <immintrin.h>
#endif

namespace speq::cpu {
namespace {

constexpr std::uint32_t kPolynomial = 0xedb88320; // its bits reversed, as bytes are

std::uint32_t by_bits(std::uint32_t state, const std::uint8_t *data, std::size_t nbytes) {
  for (std::size_t at = 0; at < nbytes; ++at) {
    state ^= data[at];
    for (int bit = 0; bit < 8; ++bit) {
      state = (state >> 1) ^ (state & 1 ? kPolynomial : 0);
    }
  }
  return state;
}

#ifdef SPEQ_X86
#define SPEQ_PCLMUL __attribute__((target("pclmul,sse4.1")))

constexpr std::size_t kLane = 16, kLanes = 4;

SPEQ_PCLMUL inline __m128i load(const std::uint8_t *data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(data));
}

// What a lane comes to so many bits later, with the bytes that are there.
SPEQ_PCLMUL inline __m128i folded(__m128i lane, __m128i powers, __m128i there) {
  const __m128i low = _mm_clmulepi64_si128(lane, powers, 0x00);
  const __m128i high = _mm_clmulepi64_si128(lane, powers, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

// From 128 bits to 64, and by Barrett's reduction to 32.
SPEQ_PCLMUL inline std::uint32_t reduced(__m128i sum, __m128i by_128) {
  const __m128i words = _mm_setr_epi32(~0, 0, ~0, 0);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_128, 0x10));
  const __m128i upper = _mm_srli_si128(sum, 4);
  sum = _mm_clmulepi64_si128(_mm_and_si128(sum, words), _mm_set_epi64x(0, 0x163cd6124), 0x00);
  sum = _mm_xor_si128(sum, upper);
  const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, words), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, words), barrett, 0x00);
  return std::uint32_t(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
}

#define SPEQ_VPCLMUL __attribute__((target("pclmul,sse4.1,avx512f,avx512bw,avx512vl,vpclmulqdq")))

constexpr std::size_t kWide = 64;

// As `by_products`, of whole lanes of 512 bits, at least four.
SPEQ_VPCLMUL std::uint32_t by_wide_products(std::uint32_t state, const std::uint8_t *data,
                                            std::size_t nbytes) {
  const __m512i by_2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
  const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m512i lanes[kLanes];
  for (std::size_t at = 0; at < kLanes; ++at) {
    lanes[at] = _mm512_loadu_si512(data + at * kWide);
  }
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(state))));
  const std::uint8_t *const end = data + nbytes;
  data += kLanes * kWide;
  for (; end - data >= std::ptrdiff_t(kLanes * kWide); data += kLanes * kWide) {
    for (std::size_t at = 0; at < kLanes; ++at) {
      const __m512i low = _mm512_clmulepi64_epi128(lanes[at], by_2048, 0x00);
      const __m512i high = _mm512_clmulepi64_epi128(lanes[at], by_2048, 0x11);
      const __m512i there = _mm512_loadu_si512(data + at * kWide);
      lanes[at] = _mm512_ternarylogic_epi64(low, high, there, 0x96); // the sum of all three
    }
  }
  alignas(kWide) std::uint8_t parts[kLanes * kWide];
  for (std::size_t at = 0; at < kLanes; ++at) {
    _mm512_store_si512(parts + at * kWide, lanes[at]);
  }
  __m128i sum = load(parts);
  for (std::size_t at = kLane; at < kLanes * kWide; at += kLane) {
    sum = folded(sum, by_128, load(parts + at));
  }
  for (; data < end; data += kLane) {
    sum = folded(sum, by_128, load(data));
  }
  return reduced(sum, by_128);
}

// Of whole lanes, at least four.
SPEQ_PCLMUL std::uint32_t by_products(std::uint32_t state, const std::uint8_t *data,
                                      std::size_t nbytes) {
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
  const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i lanes[kLanes];
  for (std::size_t at = 0; at < kLanes; ++at) {
    lanes[at] = load(data + at * kLane);
  }
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(int(state)));
  const std::uint8_t *const end = data + nbytes;
  data += kLanes * kLane;
  for (; end - data >= std::ptrdiff_t(kLanes * kLane); data += kLanes * kLane) {
    for (std::size_t at = 0; at < kLanes; ++at) {
      lanes[at] = folded(lanes[at], by_512, load(data + at * kLane));
    }
  }
  __m128i sum = lanes[0];
  for (std::size_t at = 1; at < kLanes; ++at) {
    sum = folded(sum, by_128, lanes[at]);
  }
  for (; data < end; data += kLane) {
    sum = folded(sum, by_128, load(data));
  }
  return reduced(sum, by_128);
}

bool can_multiply_wide() {
  static const bool can = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw");
  }();
  return can && current_isa() <= Isa::avx512;
}

bool can_multiply() {
  static const bool can = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  }();
  return can;
}
#else
bool can_multiply() { return false; }
#endif

} // namespace
} // namespace speq::cpu

// Called by speq/kernels/library.py through ctypes.
extern "C" {
// Whether speq_crc32 is faster here than zlib's.
__attribute__((visibility("default"))) int speq_has_crc32() { return speq::cpu::can_multiply(); }

__attribute__((visibility("default"))) std::uint32_t
speq_crc32(const std::uint8_t *data, std::size_t nbytes, std::uint32_t before) {
  std::uint32_t state = ~before;
#ifdef SPEQ_X86
  using namespace speq::cpu;
  if (can_multiply() && nbytes >= kLanes * kLane) {
    const std::size_t whole = nbytes / kLane * kLane;
    const bool wide = can_multiply_wide() && whole >= kLanes * kWide;
    state = wide ? by_wide_products(state, data, whole) : by_products(state, data, whole);
    data += whole;
    nbytes -= whole;
  }
#endif
  return ~speq::cpu::by_bits(state, data, nbytes);
}
}
