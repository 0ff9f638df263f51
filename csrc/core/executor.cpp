#include "core/executor.h"

namespace offload {

Token Executor::submit(HostTask task, std::span<const Token> after) {
  for (const Token& token : after) token.orderBefore(stream());
  link_.launchHost(std::move(task), stream());
  return events_.record(stream());
}

} // namespace offload
