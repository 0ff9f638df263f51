// Files that tensors are read from: every byte, or one sentence.
#include "core/file.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "core/descriptors.h"
#include "core_rig.h"
#include "test_file.h"

namespace offload {
namespace {

using namespace core_test;
using testing::AllOf;
using testing::HasSubstr;

template <class Body>
std::string messageOf(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(File, PartsOfAllSizesAreReadWhole) {
  const Bytes contents = pattern(1, (std::size_t{5} << 20) + 3); // more than a piece for each of some threads
  const TestFile on(contents);
  const File file(on.path());
  EXPECT_EQ(file.bytes(), contents.size());
  for (const std::size_t threads : {1, 2, 16}) {
    Bytes first(contents.size() - 1);
    Bytes second(7);
    Bytes none;
    const std::vector<FilePart> parts{
        {1, reinterpret_cast<std::byte*>(first.data()), first.size()},
        {0, reinterpret_cast<std::byte*>(none.data()), 0},
        {100, reinterpret_cast<std::byte*>(second.data()), second.size()}};
    file.read(parts, threads);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), contents.begin() + 1));
    EXPECT_TRUE(std::equal(second.begin(), second.end(), contents.begin() + 100));
  }
}

TEST(File, WhatCannotBeOpenedIsNamed) {
  EXPECT_EQ(messageOf([] { File("/nowhere/x"); }), "offload: can't open /nowhere/x: No such file or directory.");
  EXPECT_EQ(messageOf([] { File("/"); }), "offload: can't read tensors from /: it is not a regular file.");
}

TEST(File, MoreAreOpenThanThereWereDescriptorsAtFirst) {
  struct rlimit before {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const TestFile onDisk({1, 2, 3});
  const auto few = static_cast<rlim_t>(FailingReads::lowestFree()) + 10;
  ASSERT_GT(before.rlim_max, few + 100);
  const struct rlimit low {
    few, before.rlim_max
  };
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::vector<std::unique_ptr<File>> files;
  for (int k = 0; k < 24; ++k) {
    files.push_back(std::make_unique<File>(onDisk.path()));
  }
  struct rlimit now {};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &now), 0);
  EXPECT_GT(now.rlim_cur, few + 14 + kDescriptorsForOthers);
  EXPECT_EQ(now.rlim_max, before.rlim_max);
  // At the hard limit it says so.
  files.resize(12);
  const auto most = static_cast<rlim_t>(FailingReads::lowestFree()) + 1;
  const pid_t child = fork();
  if (child == 0) {
    const struct rlimit hard {
      most, most
    };
    const bool set = setrlimit(RLIMIT_NOFILE, &hard) == 0;
    const File last(onDisk.path());
    try {
      const File none(onDisk.path());
    } catch (const Error& error) {
      files.clear(); // a sanitizer that looks at the error takes a descriptor for that
      _exit(set && std::string(error.what()).find("Too many open files") != std::string::npos ? 0 : 1);
    }
    _exit(2);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(File, AReadPastTheEndSaysHowFarItCame) {
  const TestFile on(pattern(1, 100));
  const File file(on.path());
  Bytes to(50);
  const FilePart part{70, reinterpret_cast<std::byte*>(to.data()), to.size()};
  EXPECT_EQ(
      messageOf([&] { file.read({&part, 1}, 1); }),
      "offload: of the 50 bytes from byte 70 of " + on.path() + " only 30 could be read: the file ends there.");
}

TEST(File, AReadThatFailsSaysWhy) {
  const TestFile on(pattern(1, 100));
  const int descriptor = FailingReads::lowestFree();
  const File file(on.path());
  const FailingReads failing(descriptor);
  Bytes to(50);
  const FilePart part{20, reinterpret_cast<std::byte*>(to.data()), to.size()};
  EXPECT_EQ(
      messageOf([&] { file.read({&part, 1}, 1); }),
      "offload: of the 50 bytes from byte 20 of " + on.path() + " only 0 could be read: Is a directory.");
}

TEST(File, AChangeIsNoticed) {
  const TestFile on(pattern(1, 100));
  const File file(on.path());
  EXPECT_NO_THROW(file.requireUnchanged());
  on.cutTo(99);
  EXPECT_THAT(
      messageOf([&] { file.requireUnchanged(); }),
      AllOf(HasSubstr(on.path()), HasSubstr("had 100 bytes"), HasSubstr("99 now")));
  on.cutTo(100);
  EXPECT_THROW(file.requireUnchanged(), Error); // as long as before, but not the same bytes
}

TEST(File, TheMappingIsReadAndAStrayWriteStaysInThisProcess) {
  const TestFile on(pattern(1, 100));
  File file(on.path());
  std::byte* const data = file.mapping();
  EXPECT_EQ(file.mapping(), data);
  EXPECT_EQ(std::memcmp(data, pattern(1, 100).data(), 100), 0);
  std::memset(data, 7, 100);
  EXPECT_EQ(on.contents(), pattern(1, 100));
  EXPECT_NO_THROW(file.requireUnchanged());
}

TEST(File, DetachedBytesKeepTheirValuesWhateverTheirNeighboursDo) {
  // Ranges side by side that begin and end within pages, several in one page, and over many.
  const std::vector<std::size_t> lengths{100, 5000, 3, 8192, 40'000, 1, 12'287, 4096, 7, 30'000, 4097};
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    SimRandom random(seed);
    std::vector<std::pair<std::size_t, std::size_t>> ranges; // offset, length
    std::size_t size = 0;
    for (const std::size_t length : lengths) {
      ranges.emplace_back(size, length);
      size += length;
    }
    const Bytes contents = pattern(seed, size);
    const TestFile on(contents);
    File file(on.path());
    auto* const data = reinterpret_cast<unsigned char*>(file.mapping());
    Bytes expected = contents;
    for (; !ranges.empty(); ranges.pop_back()) {
      std::swap(ranges[random.below(ranges.size())], ranges.back());
      const auto [offset, length] = ranges.back();
      file.detach(offset, length, 2);
      ASSERT_EQ(std::memcmp(data, expected.data(), size), 0) << "seed " << seed;
      const Bytes written = pattern(offset + 99, length);
      std::copy(written.begin(), written.end(), data + offset);
      std::copy(written.begin(), written.end(), expected.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    on.cutTo(0);
    ASSERT_EQ(std::memcmp(data, expected.data(), size), 0) << "seed " << seed;
  }
}

TEST(File, ManyPagesAreDetachedWhole) {
  const Bytes contents = pattern(1, (std::size_t{7} << 20) + 5); // huge pages among them
  const TestFile on(contents);
  File file(on.path());
  std::byte* const data = file.mapping();
  file.detach(1234, (std::size_t{6} << 20) + 7, 4);
  EXPECT_EQ(std::memcmp(data, contents.data(), contents.size()), 0);
  file.detach(0, 1234, 4);
  file.detach((std::size_t{6} << 20) + 1241, contents.size() - (std::size_t{6} << 20) - 1241, 4);
  on.cutTo(0);
  EXPECT_EQ(std::memcmp(data, contents.data(), contents.size()), 0);
}

TEST(File, NoBytesAreNoPageThatIsDetached) {
  const Bytes contents = pattern(1, 12'000);
  for (const std::uint64_t offset : {0, 100, 4096, 12'000}) {
    const TestFile on(contents);
    File file(on.path());
    std::byte* const data = file.mapping();
    EXPECT_NO_THROW(file.detach(offset, 0, 2)) << offset;
    file.detach(0, contents.size(), 2);
    on.cutTo(0);
    EXPECT_EQ(std::memcmp(data, contents.data(), contents.size()), 0) << offset;
  }
}

TEST(File, WhatCouldNotBeDetachedIsAsBefore) {
  const TestFile on(pattern(1, 10'000));
  const int descriptor = FailingReads::lowestFree();
  File file(on.path());
  std::byte* const data = file.mapping();
  {
    const FailingReads failing(descriptor);
    EXPECT_THAT(messageOf([&] { file.detach(10, 9000, 2); }), HasSubstr("Is a directory"));
  }
  EXPECT_EQ(std::memcmp(data, pattern(1, 10'000).data(), 10'000), 0);
  file.detach(10, 9000, 2);
  on.cutTo(0);
  EXPECT_EQ(std::memcmp(data, pattern(1, 10'000).data(), 10'000), 0);
}

} // namespace
} // namespace offload
