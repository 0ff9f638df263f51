#include "aten/settings_check.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include <unistd.h>

namespace offload {
namespace {

// Without which a setting does nothing.
enum class Needs { Nothing, Cache, Simulation };

struct Known {
  std::string_view name;
  Needs needs;
};

constexpr std::string_view kPrefix = "TORCH_OFFLOAD_";
// Of the test suite itself.
constexpr std::string_view kTestPrefix = "TORCH_OFFLOAD_TEST_";
constexpr std::array<Known, 14> kKnown{{
    {"TORCH_OFFLOAD_ACCELERATOR", Needs::Nothing},
    {"TORCH_OFFLOAD_BUDGET", Needs::Cache},
    {"TORCH_OFFLOAD_COPY_DELAY_US", Needs::Cache},
    {"TORCH_OFFLOAD_EVICT", Needs::Cache},
    {"TORCH_OFFLOAD_FAULT", Needs::Cache},
    {"TORCH_OFFLOAD_HOST_JOBS", Needs::Cache},
    {"TORCH_OFFLOAD_LINK", Needs::Nothing},
    {"TORCH_OFFLOAD_PINNED_LIMIT", Needs::Cache},
    {"TORCH_OFFLOAD_POISON", Needs::Nothing},
    {"TORCH_OFFLOAD_PREFETCH", Needs::Cache},
    {"TORCH_OFFLOAD_RING_BYTES", Needs::Cache},
    {"TORCH_OFFLOAD_SEED", Needs::Simulation},
    {"TORCH_OFFLOAD_SIM_DEVICES", Needs::Simulation},
    {"TORCH_OFFLOAD_VALIDATE", Needs::Nothing},
}};

void append(std::string& list, std::string_view name) {
  if (!list.empty()) list += ", ";
  list += name;
}

// The number that the whole of a text is; none where it is not one.
template <typename Number>
std::optional<Number> numberOf(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

} // namespace

void checkEnvironment(Backend backend) {
  std::string unknown;
  std::string ofCache;
  std::string ofSimulation;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (!name.starts_with(kPrefix) || name.starts_with(kTestPrefix)) continue;
    const auto* const known = std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& one) { return one.name == name; });
    if (known == kKnown.end()) {
      append(unknown, name);
    } else if (text.size() <= name.size() + 1) {
      continue; // empty is as if it were not set
    } else if (known->needs == Needs::Cache && backend == Backend::Host) {
      append(ofCache, name);
    } else if (known->needs == Needs::Simulation && backend != Backend::Sim) {
      append(ofSimulation, name);
    }
  }
  if (!unknown.empty()) {
    std::string all;
    for (const Known& one : kKnown) append(all, one.name.substr(kPrefix.size()));
    TORCH_WARN(
        "offload: the environment has ", unknown, ", which is no setting of torch_offload and does nothing; behind ", kPrefix,
        " one of these may follow: ", all, ".");
  }
  if (!ofCache.empty()) {
    TORCH_WARN(
        "offload: ", ofCache,
        " in the environment does nothing here, since the CPU computes on the host bytes and there is no cache; "
        "use a machine with a GPU, or TORCH_OFFLOAD_LINK=sim to simulate one.");
  }
  if (!ofSimulation.empty()) {
    TORCH_WARN(
        "offload: ", ofSimulation,
        " in the environment does nothing here, since it is about the simulated link; set TORCH_OFFLOAD_LINK=sim with it.");
  }
}

std::optional<std::size_t> budgetOf(const std::string& text, std::size_t deviceBytes) {
  if (text == "auto") return std::nullopt;
  constexpr std::uint64_t most = INT64_MAX;
  if (const auto bytes = numberOf<std::uint64_t>(text); bytes && *bytes <= most) return *bytes;
  if (text.ends_with('%')) {
    std::string_view number(text.data(), text.size() - 1);
    if (number.ends_with(' ')) number.remove_suffix(1);
    const auto share = numberOf<double>(number);
    if (share && *share >= 0 && *share <= 100) {
      return static_cast<std::size_t>(*share / 100 * static_cast<double>(deviceBytes));
    }
  }
  throw std::invalid_argument("a budget is a number of bytes, a share like \"40%\", or \"auto\"; got \"" + text + "\".");
}

std::string problemOf(const char* what, const std::string& said, std::size_t bytes, Backend backend, std::size_t deviceBytes) {
  const std::string begin = std::string("offload: a ") + what + " of " + said + " ";
  if (backend == Backend::Host) {
    return begin + "does nothing here, since the CPU computes on the host bytes and there is no cache.";
  }
  if (bytes <= deviceBytes) return {};
  return begin + "is more than the " + std::to_string(deviceBytes) +
      " bytes of the device: the cache would take all of it, and PyTorch would have to ask for each byte back; choose less.";
}

} // namespace offload
