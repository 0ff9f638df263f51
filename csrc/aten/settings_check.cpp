#include "aten/settings_check.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include <unistd.h>

namespace offload {
namespace {

struct Known {
  std::string_view name;
  bool ofCache; // does nothing where there is none
};

constexpr std::string_view kPrefix = "TORCH_OFFLOAD_";
// Of the test suite itself.
constexpr std::string_view kTestPrefix = "TORCH_OFFLOAD_TEST_";
constexpr std::array<Known, 12> kKnown{{
    {"TORCH_OFFLOAD_ACCELERATOR", false},
    {"TORCH_OFFLOAD_BUDGET", true},
    {"TORCH_OFFLOAD_COPY_DELAY_US", true},
    {"TORCH_OFFLOAD_EVICT", true},
    {"TORCH_OFFLOAD_FAULT", true},
    {"TORCH_OFFLOAD_LINK", false},
    {"TORCH_OFFLOAD_PINNED_LIMIT", true},
    {"TORCH_OFFLOAD_POISON", false},
    {"TORCH_OFFLOAD_PREFETCH", true},
    {"TORCH_OFFLOAD_RING_BYTES", true},
    {"TORCH_OFFLOAD_SEED", false},
    {"TORCH_OFFLOAD_VALIDATE", false},
}};

void append(std::string& list, std::string_view name) {
  if (!list.empty()) list += ", ";
  list += name;
}

} // namespace

void checkEnvironment(Backend backend) {
  std::string unknown;
  std::string idle;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with(kPrefix) || name.starts_with(kTestPrefix)) continue;
    const auto* const known = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.name == name; });
    if (known == kKnown.end()) {
      append(unknown, name);
    } else if (known->ofCache && backend == Backend::Host && text.size() > name.size() + 1) {
      append(idle, name);
    }
  }
  if (!unknown.empty()) {
    std::string all;
    for (const Known& one : kKnown) append(all, one.name.substr(kPrefix.size()));
    TORCH_WARN(
        "offload: the environment has ", unknown, ", which is no setting of torch_offload and does nothing; behind ", kPrefix,
        " one of these may follow: ", all, ".");
  }
  if (!idle.empty()) {
    TORCH_WARN(
        "offload: ", idle,
        " in the environment does nothing here, since the CPU computes on the host bytes and there is no cache; "
        "use a machine with a GPU, or TORCH_OFFLOAD_LINK=sim to simulate one.");
  }
}

std::string problemOf(const char* what, std::size_t bytes, Backend backend, std::size_t deviceBytes) {
  const std::string begin = std::string("offload: a ") + what + " of " + std::to_string(bytes) + " bytes ";
  if (backend == Backend::Host) {
    return begin + "does nothing here, since the CPU computes on the host bytes and there is no cache.";
  }
  if (bytes <= deviceBytes) return {};
  return begin + "is more than the " + std::to_string(deviceBytes) +
      " bytes of the device: the cache would take all of it, and PyTorch would have to ask for each byte back; choose less.";
}

} // namespace offload
