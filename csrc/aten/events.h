// Events of the offload device. See Note [A device without streams] in device.cpp.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace offload::events {

/// Makes `event` the present point of the work of the device that `offload:index` is paired with: an event on its current stream,
/// or the time on the clock where the host computes. Only an event that measures time holds anything; autograd's do not.
void record(void*& event, c10::DeviceIndex index, c10::EventFlag flag);
/// Lets the paired device's current stream wait.
void block(void* event);
bool query(void* event);
void synchronize(void* event);
/// Milliseconds.
double elapsed(void* from, void* to);
void destroy(void* event) noexcept;

} // namespace offload::events
