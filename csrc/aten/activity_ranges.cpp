#include "aten/activity_ranges.h"

#include "aten/tensors.h"
#include "core/fork_mutex.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <map>
#include <mutex>
#include <optional>

namespace offload {
namespace {

/// Names of ranges of host memory. Ranges may overlap where tensors share a storage.
class Names {
 public:
  void set(std::uintptr_t begin, std::size_t bytes, const std::string& name, bool replace) {
    const std::lock_guard lock(mutex_);
    if (replace) {
      byBegin_.insert_or_assign(begin, Named{bytes, name});
    } else {
      byBegin_.try_emplace(begin, Named{bytes, name});
    }
    any_.store(true, std::memory_order_release);
  }

  void forget(std::uintptr_t begin, std::size_t bytes) {
    if (!any_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    byBegin_.erase(byBegin_.lower_bound(begin), byBegin_.lower_bound(begin + bytes));
  }

  // A fetch is of a tensor's bytes and what aligns them.
  std::string find(std::uintptr_t begin, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    auto named = byBegin_.upper_bound(begin);
    if (named != byBegin_.begin()) {
      const auto before = std::prev(named);
      if (before->first + before->second.bytes > begin) return before->second.name;
    }
    return named != byBegin_.end() && named->first < begin + bytes ? named->second.name : std::string();
  }

 private:
  struct Named {
    std::size_t bytes;
    std::string name;
  };
  mutable ForkMutex mutex_{ForkRank::Other};
  std::map<std::uintptr_t, Named> byBegin_;
  std::atomic<bool> any_{false};
};

Names& names() {
  static auto* instance = new Names(); // as long as the Context
  return *instance;
}

std::uintptr_t addressOf(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

const char* verbOf(Activity activity) {
  switch (activity) {
    case Activity::Hit:
      return "hit";
    case Activity::Fetch:
      return "fetch";
    case Activity::Prefetch:
      return "prefetch";
    case Activity::WriteBack:
      return "write_back";
    case Activity::Store:
      return "store";
    case Activity::Evict:
      return "evict";
    case Activity::Wait:
      return "wait";
    case Activity::HostWork:
      return "host_work";
  }
  return "";
}

class Range final : public Observer::Span {
 public:
  Range(at::StepCallbacks&& callbacks, std::string name) : name_(std::move(name)), range_(std::move(callbacks)) {
    range_.before(name_);
  }

 private:
  const std::string name_; // which the range refers to
  at::RecordFunction range_;
};

/// What makes a thread's operations seen: PyTorch's profiler, and what it keeps them in, are of the thread that has started it.
struct Looking {
  at::RecordFunctionTLS callbacks;
  std::shared_ptr<c10::ThreadLocalDebugInfo> info;
};

class LookedAt final : public Observer::Span {
 public:
  explicit LookedAt(const Looking& looking) : before_(at::get_record_function_tls_()), info_(looking.info) {
    at::set_record_function_tls_(looking.callbacks);
  }
  ~LookedAt() override {
    at::set_record_function_tls_(before_);
  }

 private:
  const at::RecordFunctionTLS before_;
  const c10::DebugInfoGuard info_;
};

class ActivityRanges final : public Observer {
 public:
  std::unique_ptr<Span> begin(const Observation& observation) noexcept override {
    try {
      auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
      if (!callbacks) return nullptr;
      std::string name = names().find(addressOf(observation.host), observation.bytes);
      if (name.empty() && observation.derivedFrom != nullptr) {
        const std::string of = names().find(addressOf(observation.derivedFrom), 1);
        if (!of.empty()) name = (observation.purpose == Purpose::Parameter ? "copy of " : "gradient of ") + of;
      }
      if (name.empty()) name = nameOf(observation.purpose);
      name = std::string("offload::") + verbOf(observation.activity) + " " + name + " [" + std::to_string(observation.bytes) +
          " B]";
      return std::make_unique<Range>(std::move(*callbacks), std::move(name));
    } catch (...) {
      return nullptr; // a range that is missing harms nobody
    }
  }

  std::unique_ptr<Span> enterHostWork() noexcept override {
    try {
      if (at::hasThreadLocalCallbacks()) return nullptr; // it is looked at already
      const std::lock_guard lock(mutex_);
      return looking_ ? std::make_unique<LookedAt>(*looking_) : nullptr;
    } catch (...) {
      return nullptr;
    }
  }

  void lookAtHostWork(bool look) {
    const std::lock_guard lock(mutex_);
    looking_.reset();
    if (look) looking_.emplace(at::get_record_function_tls_(), c10::ThreadLocalDebugInfo::current());
  }

 private:
  std::mutex mutex_;
  std::optional<Looking> looking_;
};

ActivityRanges& ranges() {
  static auto* instance = new ActivityRanges(); // as long as the Context
  return *instance;
}

} // namespace

Observer& activityRanges() {
  return ranges();
}

void lookAtHostWork(bool look) {
  ranges().lookAtHostWork(look);
}

void nameTensor(const at::Tensor& tensor, const std::string& name, bool replace) {
  if (!isOffload(tensor) || !tensor.has_storage() || tensor.storage().nbytes() == 0) return;
  if (tensor.storage().data() == nullptr) return; // a wrapper of other tensors
  const Extent extent = extentOf(tensor);
  if (extent.bytes() == 0) return;
  names().set(addressOf(blockOf(tensor.storage()).data) + extent.begin, extent.bytes(), name, replace);
}

void forgetNames(const Block& block) noexcept {
  names().forget(addressOf(block.data), block.bytes);
}

} // namespace offload
