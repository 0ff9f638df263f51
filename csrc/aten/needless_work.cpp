#include "aten/needless_work.h"

#include "core/fork_mutex.h"

#include <c10/util/Exception.h>

#include <set>

namespace offload {
namespace {

thread_local const c10::OperatorHandle* current = nullptr;

class Counts {
 public:
  /// Whether it is the first time that much was at stake for this name.
  bool add(const std::string& name, std::uint64_t count, bool much) {
    const std::lock_guard lock(mutex_);
    counts_[name] += count;
    return much && told_.insert(name).second;
  }
  std::map<std::string, std::uint64_t> all() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  ForkMutex mutex_{ForkRank::Other};
  std::map<std::string, std::uint64_t> counts_;
  std::set<std::string> told_;
};

Counts& fallbacks() {
  static auto* const instance = new Counts();
  return *instance;
}

Counts& excess() {
  static auto* const instance = new Counts();
  return *instance;
}

} // namespace

FetchingFor::FetchingFor(const c10::OperatorHandle& op) : before_(current) {
  current = &op;
}

FetchingFor::~FetchingFor() {
  current = before_;
}

void countHostFallback(const c10::OperatorHandle& op, std::size_t bytes) {
  if (!fallbacks().add(op.schema().name(), 1, bytes >= kLargeBytes)) return;
  TORCH_WARN(
      "offload: ", op.schema().name(), " has no CUDA kernel for its operands of ", bytes,
      " bytes and computes on the CPU, on offload tensors alone; torch_offload.stats()[\"host_fallbacks\"] counts the calls.");
}

std::map<std::string, std::uint64_t> hostFallbacks() {
  return fallbacks().all();
}

void countExcess(const at::Tensor& tensor, std::size_t bytes) {
  const auto used = static_cast<std::size_t>(tensor.numel()) * static_cast<std::size_t>(tensor.element_size());
  if (bytes < kLargeBytes || bytes / 2 < used) return;
  const std::string name = current == nullptr ? "offload::fetch" : current->schema().name();
  if (!excess().add(name, bytes - used, true)) return;
  TORCH_WARN(
      "offload: ", name, " fetches a tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(), ", whose ", used,
      " bytes lie apart: all ", bytes,
      " bytes between the first and the last travel. Where it is used often, keep a copy, tensor.contiguous(). (Said once for "
      "each "
      "operation; torch_offload.stats()[\"excess_bytes\"] counts them.)");
}

std::map<std::string, std::uint64_t> excessBytes() {
  return excess().all();
}

} // namespace offload
