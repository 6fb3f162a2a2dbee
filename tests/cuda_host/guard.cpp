// Lets torch without CUDA make tensors that say they are on cuda:0. Tests hold their words.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct HostGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(CUDA, HostGuard)

} // namespace
