// A file for tests, in memory, that can be cut short and made to fail.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace offload::core_test {

/// Goes by the name that it has among this process's open files; whoever has opened it by that may keep it.
class TestFile {
 public:
  explicit TestFile(const std::vector<unsigned char>& contents) : descriptor_(memfd_create("tensors", MFD_CLOEXEC)) {
    EXPECT_EQ(pwrite(descriptor_, contents.data(), contents.size(), 0), static_cast<ssize_t>(contents.size()));
  }
  ~TestFile() {
    close(descriptor_);
  }
  TestFile(const TestFile&) = delete;
  TestFile& operator=(const TestFile&) = delete;

  std::string path() const {
    return "/proc/self/fd/" + std::to_string(descriptor_);
  }
  void cutTo(std::size_t bytes) const {
    EXPECT_EQ(ftruncate(descriptor_, static_cast<off_t>(bytes)), 0);
  }
  std::vector<unsigned char> contents() const {
    struct stat now {};
    EXPECT_EQ(fstat(descriptor_, &now), 0);
    std::vector<unsigned char> all(static_cast<std::size_t>(now.st_size));
    EXPECT_EQ(pread(descriptor_, all.data(), all.size(), 0), now.st_size);
    return all;
  }

 private:
  const int descriptor_;
};

/// Lets every read of a file that was opened last fail, as long as it lives: its descriptor is then a folder's.
class FailingReads {
 public:
  /// `descriptor` is the lowest that was free before the file was opened.
  explicit FailingReads(int descriptor) : descriptor_(descriptor), kept_(dup(descriptor)) {
    const int folder = open("/", O_RDONLY | O_DIRECTORY);
    EXPECT_EQ(dup2(folder, descriptor_), descriptor_);
    close(folder);
  }
  ~FailingReads() {
    EXPECT_EQ(dup2(kept_, descriptor_), descriptor_);
    close(kept_);
  }
  FailingReads(const FailingReads&) = delete;
  FailingReads& operator=(const FailingReads&) = delete;

  static int lowestFree() {
    const int descriptor = dup(STDIN_FILENO);
    close(descriptor);
    return descriptor;
  }

 private:
  const int descriptor_;
  const int kept_;
};

} // namespace offload::core_test
