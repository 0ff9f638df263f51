// The bytes of a Block that are those of a file.
//
// Note [File-backed Blocks]
// The host address of such a Block is its place in a private mapping of the file, so host operations read the page cache, and the
// Block has no memory of its own. A mapping is not what a copy should read from: it can't be page-locked, a page fault reads 4 KiB
// at a time, and where the disk fails or the file was cut short it ends the process (SIGBUS). So a fetch reads the file itself,
// by a host task that fills chunks of page-locked memory.
//
// The first write lease ends that: ordinary memory with the bytes of the Block takes the place of its part of the mapping. From then
// on it is a pageable Block like any other, whatever becomes of the file.
//
// Every access first asks whether the file is as it was opened. What goes wrong later, within a host task, can't throw there: the
// task leaves 0xFF, which is NaN in every floating-point type, keeps the sentence for the next call that can throw it
// (deferred_error.h), and counts. A Slot that was fetched before the count rose is never found again.
#pragma once

#include "core/deferred_error.h"
#include "core/extent.h"
#include "core/file.h"
#include "core/fork_mutex.h"
#include "core/link/link.h"

#include <functional>
#include <memory>

namespace offload {

class FileBytes {
 public:
  /// Bytes of `file` from `offset` on, all of them within it. Throws Error where the file can't be mapped.
  FileBytes(std::shared_ptr<File> file, std::uint64_t offset, std::size_t bytes);
  /// The memory of what was written goes; the file may have other tensors for long.
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  /// Their place in the mapping.
  std::byte* data() const noexcept {
    return data_;
  }
  /// Whether a fetch reads the file: the host has not written to them.
  bool inFile() const noexcept {
    return inFile_;
  }
  /// How many reads have failed in a host task.
  std::uint64_t failures() const noexcept {
    return failures_;
  }

  /// Calls `tell` once, when they begin to have memory of their own. Set before anybody else knows them; it must neither throw nor
  /// wait, and who writes outlives what it needs.
  void whenWritten(std::function<void()> tell) {
    tell_ = std::move(tell);
  }
  /// Makes the memory fit to be read, or written, by the host. Throws Error; nothing has changed then. May wait for the disk.
  void prepare(Access access);
  /// The host has written to the memory without prepare().
  void markWritten() noexcept;

  /// Reads `extent` of `source` into `to`. What fails is kept in `errors`, which outlives the task.
  static HostTask readTask(std::shared_ptr<FileBytes> source, Extent extent, std::byte* to, DeferredError& errors);

 private:
  const std::shared_ptr<File> file_;
  const std::uint64_t offset_;
  const std::size_t bytes_;
  std::byte* const data_;
  void leaveFile() noexcept;

  std::function<void()> tell_;
  ForkMutex mutex_{ForkRank::FileBytes}; // they are detached once
  std::atomic<bool> inFile_{true};
  std::atomic<std::uint64_t> failures_{0};
};

} // namespace offload
