// Random numbers of the offload device are the CPU's: a seed gives an offload model the initial weights of a CPU model.
#pragma once

#include <ATen/core/Generator.h>

namespace offload {

/// Draws from PyTorch's default CPU generator, for every index.
const at::Generator& defaultGenerator(c10::DeviceIndex index);
/// What torch.Generator(device="offload") makes.
at::Generator newGenerator(c10::DeviceIndex index);
/// The CPU generator behind one of ours; any other as it is.
at::Generator hostGenerator(const at::Generator& generator);

} // namespace offload
