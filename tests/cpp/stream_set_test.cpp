// A few streams, each once.
#include "core/stream_set.h"

#include <gtest/gtest.h>

#include <utility>

namespace offload {
namespace {

std::vector<Stream> streams(int count) {
  static std::array<char, 8> handles;
  std::vector<Stream> made;
  for (int k = 0; k < count; ++k) made.push_back({0, &handles.at(static_cast<std::size_t>(k))});
  return made;
}

TEST(StreamSet, HoldsEachOnceInOrderHoweverMany) {
  const auto all = streams(6);
  StreamSet set;
  EXPECT_EQ(set.begin(), set.end());
  for (std::size_t count = 1; count <= all.size(); ++count) {
    for (std::size_t k = 0; k < count; ++k) set.add(all[k]);
    EXPECT_EQ(std::vector<Stream>(set.begin(), set.end()), std::vector<Stream>(all.begin(), all.begin() + count));
    EXPECT_EQ(set.isOnly(all[0]), count == 1);
    EXPECT_FALSE(set.isOnly(all[5]));
  }
}

TEST(StreamSet, WhatIsPassedOnLeavesItWhole) {
  const auto all = streams(3);
  StreamSet set;
  for (const Stream stream : all) set.add(stream);
  const StreamSet other = std::move(set);
  EXPECT_EQ(std::vector<Stream>(other.begin(), other.end()), all);
  EXPECT_EQ(std::vector<Stream>(set.begin(), set.end()), all);
}

} // namespace
} // namespace offload
