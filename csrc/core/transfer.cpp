#include "core/transfer.h"

#include <thread>

namespace offload {

Transfer::Transfer(Link& link, EventPool& events, int device, std::chrono::microseconds delay)
    : link_(link), events_(events), delay_(delay), toDevice_(link.createStream(device)), toHost_(link.createStream(device)) {}

Transfer::~Transfer() {
  link_.destroyStream(toDevice_);
  link_.destroyStream(toHost_);
}

void Transfer::sleep(Stream stream) {
  if (delay_.count() > 0) link_.launchHost([delay = delay_] { std::this_thread::sleep_for(delay); }, stream);
}

Token Transfer::toDevice(void* device, const void* host, std::size_t bytes, std::span<const Token> after) {
  for (const Token& token : after) token.orderBefore(toDevice_);
  sleep(toDevice_);
  link_.copyToDevice(device, host, bytes, toDevice_);
  bytesToDevice_ += bytes;
  ++copiesToDevice_;
  return events_.record(toDevice_);
}

Token Transfer::toHost(void* host, const void* device, std::size_t bytes, std::span<const Token> after) {
  for (const Token& token : after) token.orderBefore(toHost_);
  sleep(toHost_);
  link_.copyToHost(host, device, bytes, toHost_);
  bytesToHost_ += bytes;
  ++copiesToHost_;
  return events_.record(toHost_);
}

TransferStats Transfer::stats() const {
  return {bytesToDevice_, bytesToHost_, copiesToDevice_, copiesToHost_};
}

} // namespace offload
