#include "core/token.h"

#include "core/error.h"
#include "core/forked.h"
#include "core/host_wait.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>

namespace offload {

namespace {
constexpr std::size_t kMostDeferred = 64; // streams; some come and go
constexpr std::size_t kMostWaits = 64; // pairs of them
} // namespace

struct EventPool::Shared {
  explicit Shared(Link& l) : link(l) {
    waits.reserve(kMostWaits);
  }

  Event take(int device) {
    {
      std::lock_guard lock(mutex);
      if (closed) throw Error("offload: a copy can't be waited for any more, since its stream has been destroyed.");
      auto& events = idle[device];
      if (!events.empty()) {
        Event event = events.back();
        events.pop_back();
        return event;
      }
    }
    return link.createEvent(device);
  }
  // It may be recorded anew at once: waits enqueued before keep the old place (link.h, Note [Order]).
  void giveBack(int device, Event event) noexcept {
    {
      std::lock_guard lock(mutex);
      if (!closed) return idle[device].push_back(event);
    }
    link.destroyEvent(event); // of a token that outlives the pool
  }

  /// The newest place of a stream that another one waits for, by the clock before it was recorded.
  struct Wait {
    Stream of;
    Stream by;
    std::uint64_t recording;
  };

  bool waitsFor(const Token::Record& record, Stream stream) noexcept;
  void noteWait(const Token::Record& record, Stream stream) noexcept;

  Link& link;
  std::mutex mutex;
  bool closed = false;
  std::unordered_map<int, std::vector<Event>> idle;
  std::vector<Wait> waits; // one for each pair of streams
  std::atomic<std::uint64_t> clock{0};
};

struct Token::Record {
  Record(std::shared_ptr<EventPool::Shared> p, Stream s, bool later)
      : pool(std::move(p)), stream(s), deferred(later), recording(pool->clock++) {}
  ~Record() {
    if (Event own = event.load(); own && !isForked()) pool->giveBack(stream.device, own);
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // Recorded when first asked for where the Link refused earlier: a later place on the stream tells no less.
  Event recordedEvent() {
    if (Event known = event.load()) return known;
    const bool later = deferred || begun; // than when the work was enqueued, which was in no capture
    if (later) refuseCapture();
    Event fresh = pool->take(stream.device);
    Event known = nullptr;
    begun.store(true);
    try {
      pool->link.record(fresh, stream);
      if (later) refuseCapture(); // which another thread may have begun between the two
    } catch (...) {
      pool->giveBack(stream.device, fresh);
      throw;
    }
    const std::uint64_t now = pool->clock++;
    if (event.compare_exchange_strong(known, fresh)) {
      recorded = now;
      return fresh;
    }
    pool->giveBack(stream.device, fresh);
    return known;
  }

  // An event of a capture is none of ours, and whoever waited for it would become part of the graph.
  void refuseCapture() const {
    if (pool->link.capturing(stream)) throw Error("offload: no event may be recorded during capture.");
  }

  const std::shared_ptr<EventPool::Shared> pool;
  const Stream stream;
  const bool deferred;
  std::atomic<Event> event{nullptr};
  std::atomic<bool> done{false};
  /// Whether its place on the stream is, or may be, behind us.
  std::atomic<bool> begun{false};
  /// A clock's readings before and after the event was recorded: threads that record on one stream at once can't tell their order.
  const std::uint64_t recording;
  std::atomic<std::uint64_t> recorded{UINT64_MAX};
};

// Work of one stream is in order, so whoever waits for a place waits for what was recorded before it.
bool EventPool::Shared::waitsFor(const Token::Record& record, Stream stream) noexcept {
  const std::lock_guard lock(mutex);
  return std::ranges::any_of(waits, [&](const Wait& wait) {
    return wait.of == record.stream && wait.by == stream &&
        (record.recorded < wait.recording || record.recording == wait.recording);
  });
}

void EventPool::Shared::noteWait(const Token::Record& record, Stream stream) noexcept {
  const std::lock_guard lock(mutex);
  const auto known =
      std::ranges::find_if(waits, [&](const Wait& wait) { return wait.of == record.stream && wait.by == stream; });
  if (known != waits.end()) {
    known->recording = std::max(known->recording, record.recording);
    return;
  }
  if (waits.size() >= kMostWaits) waits.erase(waits.begin());
  waits.push_back({record.stream, stream, record.recording});
}

bool Token::done() const {
  if (knownDone()) return true;
  if (!record_->pool->link.query(record_->recordedEvent())) return false;
  record_->done.store(true, std::memory_order_release);
  return true;
}

bool Token::knownDone() const noexcept {
  return !record_ || record_->done.load(std::memory_order_acquire);
}

void Token::wait() const {
  if (done()) return;
  hostWait([this] { record_->pool->link.synchronize(record_->recordedEvent()); });
  record_->done.store(true, std::memory_order_release);
}

bool Token::isOn(Stream stream) const noexcept {
  return record_ && record_->stream == stream;
}

bool Token::isBefore(Stream stream) const noexcept {
  return knownDone() || isOn(stream) || record_->pool->waitsFor(*record_, stream);
}

void Token::orderBefore(Stream stream) const {
  if (isBefore(stream)) return;
  record_->pool->link.wait(stream, record_->recordedEvent());
  record_->pool->noteWait(*record_, stream);
}

bool Token::impliedBy(const Token& later) const noexcept {
  if (record_->stream != later.record_->stream) return false;
  // What is recorded in the future has its place behind all that anybody means now.
  return !later.record_->begun || record_->recorded < later.record_->recording;
}

EventPool::EventPool(Link& link) : shared_(std::make_shared<Shared>(link)) {}

EventPool::~EventPool() {
  deferred_.clear();
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

// As long as nobody has asked for one, all that defer on a stream mean the same place: whoever sees it not begun has enqueued his work
// before whoever begins it.
Token EventPool::defer(Stream stream) {
  const std::lock_guard lock(deferredMutex_);
  std::erase_if(deferred_, [](const Token& token) { return token.record_->begun.load(); });
  const auto open =
      std::find_if(deferred_.begin(), deferred_.end(), [stream](const Token& token) { return token.isOn(stream); });
  if (open != deferred_.end()) return *open;
  if (deferred_.size() >= kMostDeferred) deferred_.erase(deferred_.begin()); // the next of that stream is another one
  return deferred_.emplace_back(Token(std::make_shared<Token::Record>(shared_, stream, true)));
}

Token EventPool::record(Stream stream) {
  auto record = std::make_shared<Token::Record>(shared_, stream, false);
  try {
    record->recordedEvent();
  } catch (const Error&) {
    // Whoever asks the token learns of it. The work is enqueued, so it must not be left without one.
    record->begun = true; // an event could not be had, maybe, and its place is behind us all the same
  }
  return Token(std::move(record));
}

void TokenSet::add(Token token) {
  if (token.knownDone()) return;
  std::erase_if(tokens_, [&token](const Token& earlier) { return earlier.impliedBy(token); });
  tokens_.push_back(std::move(token));
}

void TokenSet::add(const TokenSet& others) {
  for (const Token& token : others.tokens_) add(token);
}

void TokenSet::prune() {
  std::erase_if(tokens_, [](const Token& token) { return token.knownDone(); });
}

void TokenSet::appendTo(std::vector<Token>& out) const {
  out.insert(out.end(), tokens_.begin(), tokens_.end());
}

void TokenSet::wait() const {
  for (const Token& token : tokens_) token.wait();
}

bool TokenSet::isOrdered() const noexcept {
  for (auto later = tokens_.begin(); later != tokens_.end(); ++later) {
    // A deferred one may be getting its place now, and learn of it after this.
    auto superfluous = [&](const Token& earlier) { return !earlier.record_->deferred && earlier.impliedBy(*later); };
    if (std::any_of(tokens_.begin(), later, superfluous)) return false;
  }
  return true;
}

std::vector<Token> TokenSet::take() noexcept {
  return std::exchange(tokens_, {});
}

} // namespace offload
