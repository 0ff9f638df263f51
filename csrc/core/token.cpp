#include "core/token.h"

#include "core/host_wait.h"

#include <cstdint>
#include <unordered_map>

namespace offload {

struct EventPool::Shared {
  explicit Shared(Link& l) : link(l) {}
  Link& link;
  std::mutex mutex;
  bool closed = false;
  std::unordered_map<int, std::vector<Event>> idle;
  std::atomic<std::uint64_t> clock{0};
};

struct Token::Record {
  Record(std::shared_ptr<EventPool::Shared> p, Stream s, Event e) : pool(std::move(p)), stream(s), event(e) {}
  ~Record() {
    // A recycled event may be recorded anew at once: waits enqueued before keep the old place (link.h, Note [Order]).
    std::lock_guard lock(pool->mutex);
    if (!pool->closed) pool->idle[stream.device].push_back(event);
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  std::shared_ptr<EventPool::Shared> pool;
  Stream stream;
  Event event;
  std::atomic<bool> done{false};
  /// A clock's readings before and after the event was recorded: threads that record on one stream at once can't tell their order.
  std::uint64_t recording = 0;
  std::uint64_t recorded = 0;
};

bool Token::done() const {
  if (knownDone()) return true;
  if (!record_->pool->link.query(record_->event)) return false;
  record_->done.store(true, std::memory_order_release);
  return true;
}

bool Token::knownDone() const noexcept {
  return !record_ || record_->done.load(std::memory_order_acquire);
}

void Token::wait() const {
  if (knownDone()) return;
  if (!record_->pool->link.query(record_->event)) hostWait([this] { record_->pool->link.synchronize(record_->event); });
  record_->done.store(true, std::memory_order_release);
}

void Token::orderBefore(Stream stream) const {
  if (knownDone() || record_->stream == stream) return;
  record_->pool->link.wait(stream, record_->event);
}

bool Token::impliedBy(const Token& later) const noexcept {
  return record_->stream == later.record_->stream && record_->recorded < later.record_->recording;
}

EventPool::EventPool(Link& link) : shared_(std::make_shared<Shared>(link)) {}

EventPool::~EventPool() {
  std::unordered_map<int, std::vector<Event>> idle;
  {
    std::lock_guard lock(shared_->mutex);
    shared_->closed = true;
    idle.swap(shared_->idle);
  }
  for (auto& [device, events] : idle) {
    for (Event event : events) shared_->link.destroyEvent(event);
  }
}

Token EventPool::record(Stream stream) {
  Event event = nullptr;
  {
    std::lock_guard lock(shared_->mutex);
    auto& idle = shared_->idle[stream.device];
    if (!idle.empty()) {
      event = idle.back();
      idle.pop_back();
    }
  }
  if (event == nullptr) event = shared_->link.createEvent(stream.device);
  auto record = std::make_shared<Token::Record>(shared_, stream, event);
  record->recording = shared_->clock++;
  shared_->link.record(event, stream);
  record->recorded = shared_->clock++;
  return Token(std::move(record));
}

void TokenSet::add(Token token) {
  if (token.knownDone()) return;
  std::erase_if(tokens_, [&token](const Token& earlier) { return earlier.impliedBy(token); });
  tokens_.push_back(std::move(token));
}

void TokenSet::prune() {
  std::erase_if(tokens_, [](const Token& token) { return token.knownDone(); });
}

void TokenSet::appendTo(std::vector<Token>& out) const {
  out.insert(out.end(), tokens_.begin(), tokens_.end());
}

std::vector<Token> TokenSet::take() noexcept {
  return std::exchange(tokens_, {});
}

} // namespace offload
