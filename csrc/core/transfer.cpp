#include "core/transfer.h"

#include "core/error.h"
#include "core/host_copy.h"

#include <algorithm>
#include <thread>

namespace offload {
namespace {

HostTask copyTask(void* to, const void* from, std::size_t bytes) {
  return {[=] { copyHost(to, from, bytes); }, {{from, bytes, Access::Read}, {to, bytes, Access::Write}}};
}

void orderBefore(std::span<const Token> tokens, Stream stream) {
  for (const Token& token : tokens) token.orderBefore(stream);
}

} // namespace

Transfer::Transfer(Link& link, EventPool& events, int device, TransferOptions options)
    : link_(link),
      events_(events),
      delay_(options.delay),
      leastAtOnce_(options.leastAtOnce),
      toDevice_(link, events, device, options.chunkBytes),
      toHost_(link, events, device, options.chunkBytes),
      files_(link, options.chunkBytes, BounceRing::Locking::Preferred) {}

Token Transfer::toDevice(
    void* device, const void* host, std::size_t bytes, HostMemory memory, std::span<const Token> after, TokenSet& reads) {
  if (memory == HostMemory::Pageable) {
    if (auto chunk = toDevice_.ring.take()) {
      const auto* const from = static_cast<const std::byte*>(host);
      const auto filling = [from](std::byte* to, std::size_t at, std::size_t piece) { return copyTask(to, from + at, piece); };
      return bounceToDevice(toDevice_.ring, std::move(chunk), static_cast<std::byte*>(device), bytes, filling, after, reads);
    }
  }
  orderBefore(after, deviceBound());
  send(device, host, bytes);
  ++copiesToDevice_;
  Token done = events_.record(deviceBound());
  reads.add(done);
  return done;
}

Token Transfer::allToDevice(std::vector<Copy> copies, std::span<const Token> after, TokenSet& reads) {
  orderBefore(after, deviceBound());
  const auto rest =
      std::partition(copies.begin(), copies.end(), [this](const Copy& copy) { return copy.bytes < leastAtOnce_; });
  try {
    for (auto copy = copies.begin(); copy != rest; ++copy) send(copy->to, copy->from, copy->bytes);
    sendAtOnce({rest, copies.end()});
  } catch (...) {
    reads.add(events_.record(deviceBound())); // some may be on their way
    throw;
  }
  copiesToDevice_ += copies.size();
  Token done = events_.record(deviceBound());
  reads.add(done);
  return done;
}

Token Transfer::fileToDevice(
    void* device, const std::shared_ptr<FileBytes>& file, Extent extent, std::span<const Token> after, TokenSet& reads,
    DeferredError& errors) {
  auto chunk = files_.take();
  if (!chunk) {
    throw OutOfMemory(
        OutOfMemory::Where::Host, files_.chunkBytes(),
        "offload: the host is out of memory. The system refused " + std::to_string(files_.chunkBytes()) +
            " bytes to read a file into: free tensors, or use a machine with more memory.");
  }
  const auto filling = [&](std::byte* to, std::size_t at, std::size_t piece) {
    return FileBytes::readTask(file, {extent.begin + at, extent.begin + at + piece}, to, errors);
  };
  return bounceToDevice(files_, std::move(chunk), static_cast<std::byte*>(device), extent.bytes(), filling, after, reads);
}

Token Transfer::bounceToDevice(
    BounceRing& ring, BounceRing::Taken chunk, std::byte* device, std::size_t bytes, const Filling& filling,
    std::span<const Token> after, TokenSet& reads) {
  orderBefore(after, toDevice_.executor.stream());
  Token done;
  for (std::size_t at = 0; at < bytes; at += ring.chunkBytes()) {
    if (at > 0) ring.exchange(chunk);
    const std::size_t piece = std::min(bytes - at, ring.chunkBytes());
    chunk->lastUse = toDevice_.executor.submit(filling(chunk->data, at, piece), {&chunk->lastUse, 1});
    reads.add(chunk->lastUse);
    chunk->lastUse.orderBefore(deviceBound());
    send(device + at, chunk->data, piece);
    done = chunk->lastUse = events_.record(deviceBound());
  }
  ++copiesToDevice_;
  return done;
}

Token Transfer::toHost(
    void* host, const void* device, std::size_t bytes, HostMemory memory, std::span<const Token> after, TokenSet& uses) {
  orderBefore(after, hostBound());
  if (memory == HostMemory::Pageable) {
    if (auto chunk = toHost_.ring.take()) {
      const auto* const from = static_cast<const std::byte*>(device);
      return bounceToHost(std::move(chunk), static_cast<std::byte*>(host), from, bytes, uses);
    }
  }
  receive(host, device, bytes);
  ++copiesToHost_;
  Token done = events_.record(hostBound());
  uses.add(done);
  return done;
}

Token Transfer::bounceToHost(
    BounceRing::Taken chunk, std::byte* host, const std::byte* device, std::size_t bytes, TokenSet& uses) {
  Token done;
  for (std::size_t at = 0; at < bytes; at += toHost_.ring.chunkBytes()) {
    if (at > 0) toHost_.ring.exchange(chunk);
    const std::size_t piece = std::min(bytes - at, toHost_.ring.chunkBytes());
    chunk->lastUse.orderBefore(hostBound());
    receive(chunk->data, device + at, piece);
    chunk->lastUse = events_.record(hostBound());
    uses.add(chunk->lastUse);
    done = chunk->lastUse = toHost_.executor.submit(copyTask(host + at, chunk->data, piece), {&chunk->lastUse, 1});
    uses.add(done);
  }
  ++copiesToHost_;
  uses.take(); // which `done` implies
  uses.add(done);
  return done;
}

void Transfer::send(void* device, const void* host, std::size_t bytes) {
  sleep(deviceBound());
  link_.copyToDevice(device, host, bytes, deviceBound());
  bytesToDevice_ += bytes;
}

void Transfer::sendAtOnce(std::span<const Copy> copies) {
  if (copies.empty()) return;
  if (copies.size() == 1) return send(copies[0].to, copies[0].from, copies[0].bytes);
  sleep(deviceBound());
  link_.copyAllToDevice(copies, deviceBound());
  for (const Copy& copy : copies) bytesToDevice_ += copy.bytes;
}

void Transfer::receive(void* host, const void* device, std::size_t bytes) {
  sleep(hostBound());
  link_.copyToHost(host, device, bytes, hostBound());
  bytesToHost_ += bytes;
}

void Transfer::sleep(Stream stream) {
  if (delay_.count() > 0) link_.launchHost([delay = delay_] { std::this_thread::sleep_for(delay); }, stream);
}

void Transfer::drain() {
  for (const Lane* lane : {&toDevice_, &toHost_}) {
    events_.record(lane->stream.get()).wait();
    events_.record(lane->executor.stream()).wait();
  }
}

void Transfer::trimRings() {
  for (BounceRing* ring : {&toDevice_.ring, &toHost_.ring, &files_}) ring->trim();
}

TransferStats Transfer::stats() const {
  const std::size_t rings = toDevice_.ring.bytes() + toHost_.ring.bytes() + files_.bytes();
  return {bytesToDevice_, bytesToHost_, copiesToDevice_, copiesToHost_, rings};
}

} // namespace offload
