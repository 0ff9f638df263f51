// What the simulation says about each access: whether the memory is there, whether it is ordered, and where the reports go.
//
// Note [Reports of the simulation]
// With failFast a report is thrown by the call that discovers it, before that call takes effect. What is discovered where
// nothing can be thrown (noexcept calls, host tasks, operations that another call runs) is kept, and thrown by the next call
// that can. A call that names a stream, event or allocation that does not exist can't go on and throws with or without
// failFast. All reports are collected in any case.
#pragma once

#include <string>
#include <vector>

#include "core/link/sim_memory.h"
#include "core/link/sim_races.h"

namespace offload {

struct SimAccess {
  MemoryRange range;
  Access access;
  bool onDevice;
};

class SimChecks {
 public:
  SimChecks(bool failFast, SimMemory& memory, RaceDetector& races) : failFast_(failFast), memory_(memory), races_(races) {}

  /// Whether the memory is what the accesses take it for. Reports that, and races, and remembers the accesses.
  bool admit(const ActionPtr& action, const std::vector<SimAccess>& accesses);

  void report(const std::string& text);
  /// The same where nothing can be thrown.
  void reportLater(const std::string& text);
  /// For a call that can't go on.
  [[noreturn]] void refuse(const std::string& text);
  /// What a noexcept call caught: it is among the reports, and is thrown by a later call.
  void keep(const std::string& text);
  void throwKept();

  static std::string describe(const Action& action);

  const std::vector<std::string>& reports() const {
    return reports_;
  }

 private:
  std::string describe(const Action& action, MemoryRange range, Access access, const Race& race);

  bool failFast_;
  SimMemory& memory_;
  RaceDetector& races_;
  std::vector<std::string> reports_;
  std::vector<std::string> kept_;
};

} // namespace offload
