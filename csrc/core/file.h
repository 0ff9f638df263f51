// A file that tensors are read from.
#pragma once

#include "core/fork_mutex.h"

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>

namespace offload {

/// Bytes of a file, and where they shall go.
struct FilePart {
  std::uint64_t offset = 0;
  std::byte* to = nullptr;
  std::size_t bytes = 0;
};

/// Open for reading only; nothing here ever changes the file.
class File {
 public:
  /// Throws Error where there is no regular file that may be read.
  explicit File(std::string path);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const noexcept {
    return path_;
  }
  /// When it was opened.
  std::uint64_t bytes() const noexcept;

  /// Reads all parts, on up to `threads` threads. Throws Error with file, offset, and what was wanted and read.
  void read(std::span<const FilePart> parts, std::size_t threads) const;

  /// Throws Error if the file has another length, or was written to, since it was opened: its bytes are not those that were meant.
  void requireUnchanged() const;

  /// The whole file as memory, mapped at first use: it takes no room but that of the page cache. Throws Error.
  std::byte* mapping();

  /// Puts ordinary memory with the same bytes in the place of the pages of the mapping that hold these. It can be written, and stays
  /// whatever becomes of the file. Each byte at most once; pages that two calls share are replaced by the first. Whoever reads
  /// meanwhile sees no change. Throws Error; the mapping is as before then.
  void detach(std::uint64_t offset, std::size_t bytes, std::size_t threads);
  /// These bytes of the mapping were written as they are: no call of detach() replaces a page that they share with others. Waits for
  /// none.
  void keepWritten(std::uint64_t offset, std::size_t bytes);
  /// Gives up the memory of bytes that were detached or written, and that nobody uses any more: all but the pages that they may share
  /// with others.
  void forget(std::uint64_t offset, std::size_t bytes) noexcept;

 private:
  void addEdges(std::uint64_t first, std::uint64_t last);

  const std::string path_;
  int descriptor_ = -1;
  struct stat opened_ {};
  ForkMutex mutex_{ForkRank::File}; // of the mapping
  std::byte* mapping_ = nullptr;
  ForkMutex edgesMutex_{ForkRank::FileEdges}; // of the next
  std::unordered_set<std::uint64_t> edges_; // first and last pages of what was detached, or written
};

} // namespace offload
