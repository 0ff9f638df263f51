// A stream of our own.
#pragma once

#include "core/link/link.h"

namespace offload {

class OwnedStream {
 public:
  OwnedStream(Link& link, int device) : link_(link), stream_(link.createStream(device)) {}
  ~OwnedStream() {
    link_.destroyStream(stream_);
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream get() const noexcept {
    return stream_;
  }

 private:
  Link& link_;
  const Stream stream_;
};

} // namespace offload
