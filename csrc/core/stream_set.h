// A few streams.
#pragma once

#include "core/link/link.h"

#include <algorithm>
#include <array>
#include <vector>

namespace offload {

/// Streams in the order in which they were added, each once. Two need no memory of their own: most sets have one.
class StreamSet {
 public:
  StreamSet() = default;
  StreamSet(Stream only) : few_{only}, count_(1) {}
  StreamSet(const StreamSet&) = default; // and no move, which would leave a count without its streams
  StreamSet& operator=(const StreamSet&) = default;

  void add(Stream stream) {
    if (std::find(begin(), end(), stream) != end()) return;
    if (count_ == few_.size()) many_.assign(few_.begin(), few_.end());
    if (count_ >= few_.size()) {
      many_.push_back(stream);
    } else {
      few_[count_] = stream;
    }
    ++count_;
  }
  const Stream* begin() const noexcept {
    return many_.empty() ? few_.data() : many_.data();
  }
  const Stream* end() const noexcept {
    return begin() + count_;
  }
  bool isOnly(Stream stream) const noexcept {
    return count_ == 1 && *begin() == stream;
  }

 private:
  std::array<Stream, 2> few_{};
  std::vector<Stream> many_; // all of them, where they are more
  std::size_t count_ = 0;
};

} // namespace offload
