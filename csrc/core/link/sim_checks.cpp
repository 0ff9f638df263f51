#include "core/link/sim_checks.h"

#include <utility>

#include "core/error.h"

namespace offload {

namespace {

const char* verb(Access access) {
  return access == Access::Read ? " reads " : " writes ";
}

} // namespace

bool SimChecks::admit(const ActionPtr& action, const std::vector<SimAccess>& accesses) {
  bool valid = true;
  for (const SimAccess& access : accesses) {
    if (access.range.bytes == 0) {
      continue;
    }
    std::optional<std::string> complaint;
    if (access.onDevice) {
      complaint = memory_.complaint(access.range);
    } else if (memory_.find(access.range.data) != nullptr) {
      complaint = "device memory where host memory belongs";
    }
    if (complaint) {
      valid = false;
      report(describe(*action) + " uses " + *complaint + ": " + memory_.describe(access.range));
    }
  }
  if (!valid) {
    return false;
  }
  for (const SimAccess& access : accesses) {
    if (const auto race = races_.find(*action, access.range, access.access)) {
      report(describe(*action, access.range, access.access, *race));
    }
  }
  for (const SimAccess& access : accesses) {
    races_.remember(action, access.range, access.access);
  }
  return true;
}

void SimChecks::report(const std::string& text) {
  reports_.push_back(text);
  if (failFast_) {
    throw Error(text);
  }
}

void SimChecks::reportLater(const std::string& text) {
  reports_.push_back(text);
  keep(text);
}

void SimChecks::keep(const std::string& text) {
  if (failFast_) {
    kept_.push_back(text);
  }
}

void SimChecks::refuse(const std::string& text) {
  reports_.push_back(text);
  throw Error(text);
}

void SimChecks::throwKept() {
  if (!kept_.empty()) {
    const std::string first = kept_.front();
    kept_.clear();
    throw Error(first);
  }
}

std::string SimChecks::describe(const Action& action) {
  const std::string who = action.actor == hostActor ? " by the host" : " on stream " + std::to_string(action.actor);
  return std::string(action.kind) + " #" + std::to_string(action.sequence) + who;
}

std::string SimChecks::describe(const Action& action, MemoryRange range, Access access, const Race& race) {
  return "race: " + describe(action) + verb(access) + memory_.describe(range) + ", and nothing orders it after " +
      describe(*race.action) + ", which" + verb(race.access) + memory_.describe(race.range);
}

} // namespace offload
