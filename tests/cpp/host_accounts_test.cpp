// Host bytes by purpose.
#include "core/host_accounts.h"
#include "test_file.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace offload {
namespace {

struct Accounts : testing::Test {
  std::unique_ptr<Block> open(std::size_t bytes, Purpose purpose = Purpose::Temporary, int device = 0) {
    auto block = std::make_unique<Block>(nullptr, bytes, BlockKind::Pageable, Born::Host, device);
    block->purpose = purpose;
    accounts.open(*block);
    return block;
  }
  AccountStats of(Purpose purpose) const {
    return accounts.stats().of(purpose);
  }
  void expectSum() const {
    const AccountsStats now = accounts.stats();
    std::size_t bytes = 0;
    std::size_t count = 0;
    std::size_t bytesEver = 0;
    std::size_t countEver = 0;
    for (const AccountStats& account : now.purposes) {
      bytes += account.bytes;
      count += account.count;
      bytesEver += account.bytesEver;
      countEver += account.countEver;
    }
    EXPECT_EQ(bytesEver, now.all.bytesEver);
    EXPECT_EQ(countEver, now.all.countEver);
    EXPECT_EQ(bytes, now.all.bytes);
    EXPECT_EQ(count, now.all.count);
  }
  HostAccounts accounts;
};

/// An open Block of 40 bytes of a file.
struct OfFile {
  explicit OfFile(HostAccounts& accounts, int device = 0) : block(nullptr, 40, BlockKind::Foreign, Born::Host, device) {
    block.file = std::make_shared<FileBytes>(std::make_shared<File>(contents.path()), 0, 40);
    block.file->whenWritten([this, &accounts] { accounts.written(block); });
    accounts.open(block);
  }
  const core_test::TestFile contents{std::vector<unsigned char>(40)};
  Block block;
};

TEST_F(Accounts, ABlockIsOnTheAccountOfItsPurpose) {
  const auto weight = open(100, Purpose::Parameter);
  const auto result = open(30, Purpose::Activation);
  EXPECT_EQ(of(Purpose::Parameter).bytes, 100U);
  EXPECT_EQ(of(Purpose::Activation).bytes, 30U);
  EXPECT_EQ(of(Purpose::Activation).count, 1U);
  EXPECT_EQ(of(Purpose::Temporary).bytes, 0U);
  EXPECT_EQ(accounts.stats().all.bytes, 130U);
  EXPECT_EQ(accounts.stats().all.count, 2U);
  accounts.close(*result);
  EXPECT_EQ(of(Purpose::Activation).bytes, 0U);
  EXPECT_EQ(of(Purpose::Activation).bytesPeak, 30U);
  EXPECT_EQ(accounts.stats().all.bytesPeak, 130U);
  expectSum();
}

TEST_F(Accounts, AClaimMovesTheBytesAndBothPeaksSayWhatHasBeen) {
  const auto first = open(100);
  const auto second = open(20);
  accounts.claim(*first, Purpose::Parameter);
  EXPECT_EQ(first->purpose, Purpose::Parameter);
  EXPECT_EQ(of(Purpose::Temporary).bytes, 20U);
  EXPECT_EQ(of(Purpose::Temporary).count, 1U);
  EXPECT_EQ(of(Purpose::Temporary).bytesPeak, 120U);
  EXPECT_EQ(of(Purpose::Temporary).countPeak, 2U);
  EXPECT_EQ(of(Purpose::Parameter).bytes, 100U);
  EXPECT_EQ(of(Purpose::Parameter).bytesPeak, 100U);
  EXPECT_EQ(accounts.stats().all.bytes, 120U);
  EXPECT_EQ(accounts.stats().all.bytesPeak, 120U); // no byte was counted twice on the way
  accounts.close(*first);
  EXPECT_EQ(of(Purpose::Parameter).bytes, 0U);
  expectSum();
}

TEST_F(Accounts, WhatThereHasBeenCountsAsWhatItCameToBe) {
  const auto weight = open(100);
  const auto input = open(20);
  accounts.claim(*weight, Purpose::Parameter);
  EXPECT_EQ(of(Purpose::Parameter).bytesEver, 100U);
  EXPECT_EQ(of(Purpose::Temporary).bytesEver, 20U);
  EXPECT_EQ(of(Purpose::Temporary).countEver, 1U);
  accounts.close(*weight);
  accounts.close(*input);
  const auto result = open(5, Purpose::Activation);
  EXPECT_EQ(of(Purpose::Parameter).bytesEver, 100U);
  EXPECT_EQ(of(Purpose::Parameter).countEver, 1U);
  EXPECT_EQ(of(Purpose::Temporary).bytesEver, 20U);
  EXPECT_EQ(of(Purpose::Activation).bytesEver, 5U);
  EXPECT_EQ(accounts.stats().all.bytesEver, 125U);
  EXPECT_EQ(accounts.stats().all.countEver, 3U);
  accounts.resetPeaks();
  EXPECT_EQ(accounts.stats().all.bytesEver, 125U);
  expectSum();
}

TEST_F(Accounts, WhatThereHasBeenBeginsAnewWithWhatThereIs) {
  const auto weight = open(100);
  const auto input = open(20);
  accounts.close(*input);
  accounts.resetEver();
  EXPECT_EQ(accounts.stats().all.bytesEver, 100U);
  EXPECT_EQ(accounts.stats().all.countEver, 1U);
  EXPECT_EQ(accounts.stats().all.bytesPeak, 120U);
  expectSum();
  accounts.claim(*weight, Purpose::Parameter); // of before
  EXPECT_EQ(of(Purpose::Temporary).bytesEver, 0U);
  EXPECT_EQ(of(Purpose::Parameter).bytesEver, 100U);
  expectSum();
}

TEST_F(Accounts, APurposeOnlyRises) {
  const auto block = open(8);
  for (const Purpose purpose : {Purpose::Gradient, Purpose::Activation, Purpose::Optimizer, Purpose::Temporary}) {
    accounts.claim(*block, purpose);
    EXPECT_EQ(block->purpose, Purpose::Gradient);
    EXPECT_EQ(of(Purpose::Gradient).bytes, 8U);
  }
  accounts.claim(*block, Purpose::Parameter);
  EXPECT_EQ(of(Purpose::Parameter).bytes, 8U);
  EXPECT_EQ(of(Purpose::Gradient).bytes, 0U);
  expectSum();
}

TEST_F(Accounts, ParametersAreCountedByDevice) {
  EXPECT_EQ(accounts.parameterBytes(0), 0U);
  const auto gradient = open(1, Purpose::Gradient, 2);
  const auto first = open(10, Purpose::Parameter);
  const auto second = open(200, Purpose::Temporary, 2);
  EXPECT_EQ(accounts.parameterBytes(2), 0U);
  accounts.claim(*second, Purpose::Parameter);
  accounts.claim(*second, Purpose::Optimizer); // no purpose falls
  EXPECT_EQ(accounts.parameterBytes(0), 10U);
  EXPECT_EQ(accounts.parameterBytes(1), 0U);
  EXPECT_EQ(accounts.parameterBytes(2), 200U);
  EXPECT_EQ(accounts.parameterBytes(7), 0U);
  accounts.close(*second);
  accounts.close(*gradient);
  EXPECT_EQ(accounts.parameterBytes(0), 10U);
  EXPECT_EQ(accounts.parameterBytes(2), 0U);
}

TEST_F(Accounts, FilesAreCountedWithParameters) {
  const auto weight = open(3, Purpose::Parameter, 1);
  OfFile read(accounts, 1);
  Block& mapped = read.block;
  EXPECT_EQ(accounts.parameterBytes(1), 43U);
  accounts.claim(mapped, Purpose::Parameter);
  EXPECT_EQ(accounts.parameterBytes(1), 43U);
  accounts.close(mapped);
  EXPECT_EQ(accounts.parameterBytes(1), 3U);
}

TEST_F(Accounts, WhatIsReadFromAFileIsInNoSumUntilItIsWritten) {
  OfFile read(accounts);
  Block& mapped = read.block;
  accounts.claim(mapped, Purpose::Parameter);
  EXPECT_EQ(accounts.stats().files.bytes, 40U);
  EXPECT_EQ(accounts.stats().all.bytesEver, 0U);
  mapped.file->prepare(Access::Read);
  EXPECT_EQ(accounts.stats().files.bytes, 40U);
  mapped.file->prepare(Access::Write);
  mapped.file->prepare(Access::Write); // once
  mapped.file->markWritten();
  EXPECT_EQ(accounts.stats().files.bytes, 0U);
  EXPECT_EQ(accounts.stats().files.bytesPeak, 40U);
  EXPECT_EQ(accounts.stats().files.bytesEver, 40U);
  EXPECT_EQ(accounts.stats().all.bytes, 40U);
  EXPECT_EQ(accounts.stats().all.bytesEver, 40U);
  EXPECT_EQ(accounts.stats().all.count, 1U);
  EXPECT_EQ(of(Purpose::Parameter).bytes, 40U);
  EXPECT_EQ(accounts.parameterBytes(0), 40U);
  expectSum();
  accounts.close(mapped);
  EXPECT_EQ(accounts.stats().all.bytes, 0U);
  EXPECT_EQ(accounts.parameterBytes(0), 0U);
  expectSum();
}

TEST_F(Accounts, BytesOfAFileThatAreMarkedAsWrittenAreInTheSum) {
  OfFile read(accounts);
  Block& mapped = read.block;
  mapped.file->markWritten();
  EXPECT_EQ(accounts.stats().files.bytes, 0U);
  EXPECT_EQ(of(Purpose::Temporary).bytes, 40U);
  expectSum();
  accounts.close(mapped);
}

TEST_F(Accounts, ResetPeaksAreTheCurrentValues) {
  accounts.close(*open(1000));
  const auto kept = open(10, Purpose::Optimizer);
  accounts.resetPeaks();
  EXPECT_EQ(of(Purpose::Temporary).bytesPeak, 0U);
  EXPECT_EQ(of(Purpose::Temporary).countPeak, 0U);
  EXPECT_EQ(of(Purpose::Optimizer).bytesPeak, 10U);
  EXPECT_EQ(accounts.stats().all.bytesPeak, 10U);
}

TEST_F(Accounts, TheHistoryIsOffUntilItIsAskedFor) {
  accounts.close(*open(16));
  EXPECT_TRUE(accounts.history().empty());
}

TEST_F(Accounts, TheHistoryTellsWhatCameAndWent) {
  accounts.recordHistory(10);
  const auto block = open(16);
  accounts.claim(*block, Purpose::Parameter);
  accounts.close(*block);
  const auto events = accounts.history();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_FALSE(events[0].gone);
  EXPECT_EQ(events[0].bytes, 16U);
  EXPECT_EQ(events[0].purpose, Purpose::Temporary);
  EXPECT_TRUE(events[1].gone);
  EXPECT_EQ(events[1].purpose, Purpose::Parameter);
  EXPECT_LE(events[0].time, events[1].time);
  accounts.recordHistory(0);
  accounts.close(*open(1));
  EXPECT_EQ(accounts.history().size(), 2U);
  accounts.recordHistory(10);
  EXPECT_TRUE(accounts.history().empty());
}

TEST_F(Accounts, TheHistoryKeepsTheNewest) {
  accounts.recordHistory(3);
  std::vector<std::unique_ptr<Block>> blocks;
  for (std::size_t bytes = 1; bytes <= 5; ++bytes) blocks.push_back(open(bytes));
  const auto events = accounts.history();
  ASSERT_EQ(events.size(), 3U);
  for (std::size_t k = 0; k < 3; ++k) EXPECT_EQ(events[k].bytes, k + 3);
}

TEST_F(Accounts, TheHistoryLeavesOthersMemoryOut) {
  accounts.recordHistory(3);
  Block foreign(nullptr, 8, BlockKind::Foreign, Born::Host, 0);
  accounts.open(foreign);
  EXPECT_TRUE(accounts.history().empty());
  EXPECT_EQ(accounts.stats().all.bytes, 8U);
}

TEST_F(Accounts, ThreadsThatClaimOneBlockMoveItOnce) {
  for (int round = 0; round < 100; ++round) {
    const auto block = open(16);
    auto claim = [&](Purpose purpose) { accounts.claim(*block, purpose); };
    std::thread one(claim, Purpose::Parameter);
    std::thread two(claim, Purpose::Gradient);
    expectSum();
    one.join();
    two.join();
    EXPECT_EQ(block->purpose, Purpose::Parameter);
    EXPECT_EQ(of(Purpose::Parameter).bytes, 16U);
    accounts.close(*block);
    expectSum();
  }
  EXPECT_EQ(accounts.stats().all.bytes, 0U);
}

} // namespace
} // namespace offload
