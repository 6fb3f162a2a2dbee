#include "cpu/unpack_int4.h"

#include "int4.h"

namespace speq::cpu {

template <typename Out>
void unpack_int4(const std::uint8_t *qweight, const Float16 *scales, Out *out,
                 std::int64_t row_begin, std::int64_t row_end, std::int64_t columns,
                 std::int64_t group_size) {
  const std::int64_t groups = columns / group_size;
  for (std::int64_t group = row_begin * groups; group < row_end * groups; ++group) {
    const float scale = to_float(scales[group]);
    const std::uint8_t *codes = qweight + group * (group_size / 2);
    Out *values = out + group * group_size;
    for (std::int64_t i = 0; i < group_size / 2; ++i) {
      store(float(low_code(codes[i])) * scale, values[2 * i]);
      store(float(high_code(codes[i])) * scale, values[2 * i + 1]);
    }
  }
}

#define SPEQ_INSTANTIATE(Out)                                                                      \
  template void unpack_int4<Out>(const std::uint8_t *, const Float16 *, Out *, std::int64_t,       \
                                 std::int64_t, std::int64_t, std::int64_t);
SPEQ_INSTANTIATE(float)
SPEQ_INSTANTIATE(double)
SPEQ_INSTANTIATE(BFloat16)
SPEQ_INSTANTIATE(Float16)
#undef SPEQ_INSTANTIATE

} // namespace speq::cpu
