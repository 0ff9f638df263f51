#include "core/staging.h"

#include "core/forked.h"
#include "core/host_wait.h"

#include <utility>

namespace offload {

Staging::Buffer::~Buffer() {
  if (!isForked()) staging->free(*this);
}

Staging::BufferPtr Staging::add(void* data, std::size_t bytes, bool held) {
  freeRefused();
  auto buffer = std::make_shared<Buffer>(shared_from_this(), data, bytes, held);
  Token allocated = events_.record(home_);
  const std::lock_guard lock(mutex_);
  if (!held) bytes_ += bytes;
  uses_.add(std::move(allocated));
  return buffer;
}

Staging::BufferPtr Staging::take(std::size_t bytes) {
  BufferPtr best; // the last owner of one must not go under the mutex
  const std::lock_guard lock(mutex_);
  auto at = idle_.lower_bound({bytes, nullptr});
  while (at != idle_.end() && !(best = at->second.lock())) ++at; // one that is just going
  if (!best || !best->isFor(bytes)) return nullptr;
  idle_.erase(at);
  return best;
}

void Staging::giveBack(Buffer& buffer) {
  const std::lock_guard lock(mutex_);
  idle_[{buffer.bytes, buffer.data}] = buffer.weak_from_this();
}

// A set has a token for each stream, and streams come and go.
std::vector<Token> Staging::uses() {
  std::vector<Token> open;
  {
    const std::lock_guard lock(mutex_);
    open = uses_.all();
  }
  std::erase_if(open, [](const Token& token) {
    try {
      return token.done();
    } catch (...) {
      return false; // whoever waits for it learns why
    }
  });
  const std::lock_guard lock(mutex_);
  uses_.prune();
  return open;
}

void Staging::addUse(Token token) {
  const std::lock_guard lock(mutex_);
  uses_.add(std::move(token));
}

std::size_t Staging::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void Staging::beginTurn() {
  hostWait([this] {
    std::unique_lock lock(mutex_);
    turn_.wait(lock, [this] { return !launching_; });
    launching_ = true;
  });
}

void Staging::endTurn() {
  {
    const std::lock_guard lock(mutex_);
    launching_ = false;
  }
  turn_.notify_one();
}

void Staging::close() noexcept {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Staging::closed() const noexcept {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Staging::free(const Buffer& buffer) noexcept {
  {
    const std::lock_guard lock(mutex_);
    idle_.erase({buffer.bytes, buffer.data});
    refused_.push_back({buffer.data, buffer.held ? 0 : buffer.bytes});
  }
  freeRefused();
}

// What a use that is not known to be done was on may be being captured: then no event may be recorded there, and it is for later.
void Staging::freeRefused() noexcept {
  std::vector<Memory> memory;
  std::vector<Token> after;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    memory.swap(refused_);
    after = uses_.all();
  }
  if (memory.empty()) return;
  std::size_t freed = 0;
  try {
    for (const Token& token : after) token.orderBefore(home_);
    for (const auto& [data, bytes] : memory) {
      link_.free(data, home_);
      freed += bytes;
    }
    memory.clear();
  } catch (...) {
    // It waits.
  }
  const std::lock_guard lock(mutex_);
  bytes_ -= freed;
  refused_.insert(refused_.end(), memory.begin(), memory.end());
}

} // namespace offload
