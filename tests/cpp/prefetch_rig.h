// What the tests of copies ahead share: layers that are fetched in an order, by kernels that check their bytes.
#pragma once

#include "core_rig.h"

namespace offload::prefetch_test {

using namespace core_test;

inline constexpr std::size_t kBytes = 4096;

class Prefetch : public ::testing::Test {
 protected:
  void make(
      std::size_t layers, std::size_t slots, std::uint64_t seed = 0, std::size_t budget = 0, bool prefetch = true,
      double writeBufferShare = 0) {
    layers_.clear();
    CoreOptions options;
    options.sim.seed = seed;
    options.cache.ringBytes = slots * kBytes;
    options.cache.budgetBytes = budget;
    options.cache.prefetch = prefetch;
    options.cache.writeBufferShare = writeBufferShare;
    rig_ = std::make_unique<Rig>(options);
    stream_ = rig_->sim.createStream(0);
    for (std::size_t k = 0; k < layers; ++k) layers_.push_back(rig_->newBlock(pattern(k, kBytes)));
    tags_.assign(layers, 0);
    for (std::size_t k = 0; k < layers; ++k) tags_[k] = k;
  }
  ~Prefetch() override {
    gradients_.clear();
    layers_.clear();
  }
  /// Fetches a layer and lets a kernel check its bytes.
  void use(std::size_t k) {
    const Pin pin = rig_->cache.fetch(*layers_.at(k), {0, kBytes}, stream_);
    const void* const data = pin.data();
    rig_->sim.launch(
        stream_, [this, data, tag = tags_[k]] { wrong_ += std::memcmp(data, pattern(tag, kBytes).data(), kBytes) != 0; },
        {{data, kBytes}}, {});
    rig_->cache.validate(*layers_[k]);
  }
  void forward() {
    for (std::size_t k = 0; k < layers_.size(); ++k) use(k);
  }
  void backward() {
    for (std::size_t k = layers_.size(); k-- > 0;) use(k);
  }
  void write(std::size_t k) {
    tags_[k] = 1000 + ++writes_;
    rig_->write(*layers_[k], pattern(tags_[k], kBytes));
  }
  std::uint64_t copies() const {
    return rig_->cache.transferStats(0).copiesToDevice;
  }
  ResidencyStats stats() const {
    return rig_->cache.stats(0);
  }
  void checkValues() {
    rig_->sim.drain();
    EXPECT_EQ(wrong_, 0);
    for (const std::string& report : rig_->sim.reports()) ADD_FAILURE() << report;
  }

  std::unique_ptr<Rig> rig_;
  Stream stream_;
  std::vector<Rig::BlockPtr> layers_;
  std::vector<Rig::BlockPtr> gradients_;
  std::vector<std::uint64_t> tags_;
  std::uint64_t writes_ = 0;
  int wrong_ = 0;
};

} // namespace offload::prefetch_test
