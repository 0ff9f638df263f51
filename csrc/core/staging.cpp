#include "core/staging.h"

#include <utility>

namespace offload {

Staging::Buffer::~Buffer() {
  staging->free(*this);
}

Staging::BufferPtr Staging::add(void* data, std::size_t bytes) {
  auto buffer = std::make_shared<Buffer>(shared_from_this(), data, bytes);
  Token allocated = events_.record(home_);
  const std::lock_guard lock(mutex_);
  buffers_.push_back(buffer);
  bytes_ += bytes;
  uses_.add(std::move(allocated));
  return buffer;
}

Staging::BufferPtr Staging::take(std::size_t bytes) {
  std::vector<BufferPtr> alive; // the last owner of one must not go under the mutex
  BufferPtr best;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : buffers_) {
    BufferPtr buffer = weak.lock();
    if (!buffer) continue;
    if (!buffer->taken && buffer->isFor(bytes) && (!best || buffer->bytes < best->bytes)) best = buffer;
    alive.push_back(std::move(buffer));
  }
  if (best) best->taken = true;
  return best;
}

void Staging::giveBack(Buffer& buffer) {
  const std::lock_guard lock(mutex_);
  buffer.taken = false;
}

std::vector<Token> Staging::uses() const {
  const std::lock_guard lock(mutex_);
  return uses_.all();
}

void Staging::addUse(Token token) {
  const std::lock_guard lock(mutex_);
  uses_.add(std::move(token));
}

std::size_t Staging::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void Staging::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Staging::closed() const noexcept {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Staging::free(Buffer& buffer) noexcept {
  std::vector<Token> after;
  {
    const std::lock_guard lock(mutex_);
    bytes_ -= buffer.bytes;
    std::erase_if(buffers_, [](const auto& weak) { return weak.expired(); });
    if (closed_) return;
    after = uses_.all();
  }
  try {
    for (const Token& token : after) token.orderBefore(home_);
  } catch (...) {
    return; // kept: nobody may use it without that order
  }
  link_.free(buffer.data, home_);
}

} // namespace offload
