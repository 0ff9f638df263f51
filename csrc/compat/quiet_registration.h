// PyTorch warns of a kernel that takes another's place; while one of these lives, it does not.
#pragma once

#include <c10/util/Exception.h>

namespace offload::compat {

class QuietRegistration {
 private:
  class Silence final : public c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  };
  Silence silence_;
  c10::WarningUtils::WarningHandlerGuard guard_{&silence_};
};

} // namespace offload::compat
