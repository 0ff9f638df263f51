// A cache whose ring has room for 16 Blocks of 24, which are fetched in an order that repeats, over a BatchLink.
#pragma once

#include "batch_rig.h"

namespace offload::core_test {

class PrefetchBatch : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = 1024;
  static constexpr std::size_t kLayers = 24;
  static constexpr std::size_t kSlots = 16; // eight of them may be ahead, and four of these are a batch

  using BatchRig = BasicRig<BatchLink>;
  using BlockPtr = BatchRig::BlockPtr;

  static CoreOptions options(std::uint64_t seed = 0) {
    CoreOptions options;
    options.sim.seed = seed;
    options.cache.ringBytes = kSlots * kBytes;
    options.cache.batchLeast = kBytes / 2;
    options.cache.batchMost = kBytes;
    options.cache.batchBytes = 4 * kBytes;
    return options;
  }
  void make(const CoreOptions& options, const std::vector<std::size_t>& sizes = std::vector<std::size_t>(kLayers, kBytes)) {
    layers_.clear();
    rig_ = std::make_unique<BatchRig>(options);
    stream_ = rig_->sim.createStream(0);
    tags_.clear();
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      tags_.push_back(k);
      layers_.push_back(rig_->newBlock(pattern(k, sizes[k])));
    }
  }
  ~PrefetchBatch() override {
    layers_.clear();
  }
  /// Fetches some bytes and lets a kernel check them.
  void use(std::size_t k, Extent extent) {
    const Pin pin = rig_->cache.fetch(*layers_.at(k), extent, stream_);
    const void* const data = pin.data();
    const std::size_t bytes = extent.bytes();
    Bytes expected = pattern(tags_[k], layers_[k]->bytes);
    expected = Bytes(
        expected.begin() + static_cast<std::ptrdiff_t>(extent.begin),
        expected.begin() + static_cast<std::ptrdiff_t>(extent.end));
    rig_->sim.launch(
        stream_, [this, data, bytes, expected] { wrong_ += std::memcmp(data, expected.data(), bytes) != 0; }, {{data, bytes}},
        {});
    rig_->cache.validate(*layers_[k]);
  }
  void use(std::size_t k) {
    use(k, {0, layers_.at(k)->bytes});
  }
  void forward(int times = 1) {
    for (; times > 0; --times) {
      for (std::size_t k = 0; k < layers_.size(); ++k) use(k);
    }
  }
  std::size_t layerAt(const void* host) const {
    const auto found = std::find_if(layers_.begin(), layers_.end(), [host](const auto& layer) { return layer->data == host; });
    return static_cast<std::size_t>(found - layers_.begin());
  }
  void write(std::size_t k) {
    tags_[k] = 1000 + ++writes_;
    rig_->write(*layers_[k], pattern(tags_[k], layers_[k]->bytes));
  }
  ResidencyStats stats() const {
    return rig_->cache.stats(0);
  }
  TransferStats moved() const {
    return rig_->cache.transferStats(0);
  }
  void checkValues() {
    rig_->sim.drain();
    EXPECT_EQ(wrong_, 0);
    for (const std::string& report : rig_->sim.reports()) ADD_FAILURE() << report;
  }

  std::unique_ptr<BatchRig> rig_;
  Stream stream_;
  std::vector<BlockPtr> layers_;
  std::vector<std::uint64_t> tags_;
  std::uint64_t writes_ = 0;
  int wrong_ = 0;
};

} // namespace offload::core_test
