// A random program on the cache over the simulated link, with a model that knows every byte's one legal value. The simulation reports
// what nothing orders; the model, what is ordered and wrong. Some programs have a link that fails now and then: what threw may leave
// the bytes that it was to write unspecified, and nothing else.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "fuzz_model.h"
#include "fuzz_options.h"
#include "test_file.h"

namespace offload::core_test {

class Program {
 public:
  Program(std::uint64_t seed, Kind kind, Choices choices)
      : seed_(seed),
        choices_(std::move(choices)),
        ordered_(isOrdered(kind, seed)),
        shared_(kind == Kind::Shared),
        saved_(kind == Kind::Saved),
        jobs_(kind == Kind::Jobs),
        updates_(kind == Kind::Updates),
        faulty_(kind == Kind::Failing || ((ordered_ || shared_ || saved_ || updates_) && !jobs_ && seed % 2 == 1)),
        batches_(kind == Kind::Batches),
        options_(programOptions(choices_, seed, kind)),
        rig_(options_) {
    for (int device = 0; device < rig_.sim.deviceCount(); ++device) {
      streams_.push_back({device, nullptr});
      streams_.push_back(rig_.sim.createStream(device));
      streams_.push_back(rig_.sim.createStream(device));
    }
  }
  ~Program() {
    rig_.link.fail(0);
    while (!models_.empty()) {
      forget(models_.size() - 1);
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Done done() const {
    return {rig_.link.batches.size(), writesOfOthers_, updatesDone_, changedInPlace_, takenBack_, readInPlace_};
  }

  /// As text, where the choices are written down.
  std::string text() const {
    return choices_.text();
  }

  void run() {
    while (choices_.hasMore(batches_ ? 4 * kSteps : ordered_ ? 2 * kSteps : kSteps)) {
      choices_.begin("nothing");
      if (faulty_ && choices_.oneIn("fails", 3)) {
        rig_.link.fail(1 + choices_.below("call", kFailingCalls));
      }
      if (faulty_ && batches_) {
        rig_.link.failAfter = choices_.oneIn("failsMidway", 8) ? choices_.below("after", 3) : SIZE_MAX;
      }
      try {
        act();
      } catch (const OutOfMemory&) {
      } catch (const Error& error) {
        if (rig_.link.failures() == 0) {
          throw;
        }
      }
      rig_.link.fail(0);
      // A copy that failed to be waited for may still be on its way under a lease.
      for (Model& model : models_) {
        if (!model.known && !model.beingWritten()) {
          model.lease = {};
        }
      }
      validate();
    }
    finish();
  }

 private:
  struct Act {
    std::string_view name; // by which programs are kept
    void (Program::*run)();
  };

  std::string_view draw(SimRandom& random) const;

  void act() {
    static constexpr Act kActs[] = {
        {"addBlock", &Program::addBlock},
        {"adopt", &Program::adopt},
        {"alsoUse", &Program::alsoUse},
        {"changeBehindItsBack", &Program::changeBehindItsBack},
        {"changeInPlace", &Program::changeInPlace},
        {"changeThere", &Program::changeThere},
        {"drop", &Program::drop},
        {"fetch", &Program::fetch},
        {"fetchAhead", &Program::fetchAhead},
        {"fetchNext", &Program::fetchNext},
        {"forget", &Program::forget},
        {"giveUp", &Program::giveUp},
        {"giveUpLeaving", &Program::giveUpLeaving},
        {"holdLease", &Program::holdLease},
        {"hostRead", &Program::hostRead},
        {"hostWrite", &Program::hostWrite},
        {"meet", &Program::meet},
        {"read", &Program::read},
        {"readInPlace", &Program::readInPlace},
        {"save", &Program::save},
        {"setRing", &Program::setRing},
        {"store", &Program::store},
        {"takeBack", &Program::takeBack},
        {"trim", &Program::trim},
        {"updateThere", &Program::updateThere},
        {"writeLater", &Program::writeLater},
    };
    const std::string_view name = choices_.act([this](SimRandom& random) { return draw(random); });
    const auto* const found = std::ranges::find(kActs, name, &Act::name);
    if (found == std::end(kActs)) throw std::logic_error("no such act: " + std::string(name));
    // A call that failed in a kept program may be another by now, and have left no Block.
    if (models_.empty() && name != "addBlock") return;
    (this->*found->run)();
  }

  // ---- choices

  Stream stream() {
    return streams_[choices_.below("stream", streams_.size())];
  }
  Stream streamOf(int device) {
    return streams_[static_cast<std::size_t>(device) * 3 + choices_.below("another", 3)];
  }
  Model& model(std::string_view which = "block") {
    return models_[choices_.below(which, models_.size())];
  }
  Range range(const Model& model) {
    const std::size_t all = model.bytes.size();
    if (choices_.oneIn("whole", 2)) {
      return {0, all};
    }
    std::size_t begin = choices_.below("begin", all);
    if (choices_.oneIn("aligned", 2)) {
      begin = Extent{begin, all}.aligned().begin;
    }
    return {begin, 1 + choices_.below("more", all - begin)};
  }
  std::vector<Held>::iterator pick(std::string_view which = "pin") {
    return pins_.empty() ? pins_.end() : pins_.begin() + static_cast<std::ptrdiff_t>(choices_.below(which, pins_.size()));
  }
  Bytes value(std::size_t bytes) {
    return pattern(++values_, bytes);
  }

  // ---- Blocks

  void addBlock() {
    Model model;
    const std::size_t bytes = 1 + choices_.below("bytes", batches_ ? kMostBytes / 4 : kMostBytes);
    model.bytes = value(bytes);
    if (shared_ && choices_.oneIn("shared", 2)) {
      makeShared(model);
    } else if (choices_.oneIn("foreign", batches_ ? 16 : 4)) {
      if (bytes % 2 == 0) {
        const std::size_t offset = bytes % 100;
        Bytes contents(offset);
        contents.insert(contents.end(), model.bytes.begin(), model.bytes.end());
        model.block = rig_.fileBlock(std::make_shared<File>(TestFile(contents).path()), offset, bytes);
        model.foreign = model.block->file;
      } else {
        auto memory = std::make_shared<Bytes>(model.bytes);
        model.block = {new Block(memory->data(), bytes, BlockKind::Foreign, Born::Host, 0), ProgramRig::Return{&rig_}};
        model.foreign = std::move(memory);
      }
    } else if (saved_ && choices_.oneIn("pageable", 4)) {
      model.block = rig_.newBlock(bytes, Born::Device, false);
      model.known = false;
    } else {
      model.block = rig_.newBlock(bytes, saved_ ? Born::Device : Born::Host);
      model.known = false;
    }
    models_.push_back(std::move(model));
    Model& added = models_.back();
    if (!added.known) {
      writeHost(added, {0, bytes});
    }
  }

  void forget() {
    forget(choices_.below("block", models_.size()));
  }

  void forget(std::size_t index) {
    Model model = std::move(models_[index]);
    models_.erase(models_.begin() + static_cast<std::ptrdiff_t>(index));
    letGo(std::move(model));
  }

  void letGo(Model model) {
    model.lease = {};
    if (jobs_) model.lease = rig_.cache.lease(*model.block, Access::Read); // a job keeps its Blocks
    model.lease = {};
    if (model.foreign) {
      Block* const block = model.block.release();
      rig_.arena.keepAlive(std::move(model.foreign), rig_.cache.forget(*block));
      delete block;
    }
  }

  // ---- other processes

  void makeShared(Model& model);

  void meet();

  void otherReads(const Model& from);

  void otherWrites(Model& to);

  // ---- memory

  void giveUp() {
    const int device = stream().device;
    switch (choices_.below("how", 4)) {
      case 0:
        relieve(device);
        return;
      case 1:
        rig_.cache.setBudget(choices_.below("budget", 1 << 14));
        return;
      case 2:
        rig_.cache.setBudget({});
        return;
      default:
        rig_.cache.emptyCache(device);
    }
  }

  void relieve(int device) {
    const std::size_t free = choices_.below("free", 1024);
    const std::size_t usual = choices_.below("usual", 2048);
    const std::size_t most = choices_.below("most", 4096);
    if (most % 4 == 0) {
      rig_.cache.relieveOf(device, usual);
    } else {
      rig_.cache.relieve(device, free, usual, most);
    }
  }

  void giveUpLeaving() {
    const int device = stream().device;
    rig_.cache.giveUpLeaving(device, Purpose::Temporary, choices_.below("most", 8192));
  }

  void setRing() {
    rig_.cache.setRingBytes(std::size_t{256} << choices_.below("ring", 7));
  }

  void trim() {
    rig_.arena.trim();
  }

  // ---- device

  void fetch() {
    Model& from = model();
    const Range part = range(from);
    fetch(from, part, stream());
  }

  /// Forward through all Blocks and back again; now and then one is left out. Most are let go at once, as a layer's weights are.
  void fetchNext() {
    const std::size_t count = models_.size();
    turn_ += choices_.oneIn("skips", batches_ ? 64 : 16) ? 2 : 1;
    const std::size_t at = turn_ % (2 * count);
    const std::size_t block = std::min(at, 2 * count - 1 - at);
    const std::size_t device = deviceOfTurn(seed_, block, at < count) % static_cast<std::size_t>(rig_.sim.deviceCount());
    Model& from = models_[block];
    const std::size_t before = pins_.size();
    fetch(from, {0, from.bytes.size()}, streams_[3 * device + 1]);
    if (pins_.size() > before && !choices_.oneIn("keeps", 4)) drop(std::prev(pins_.end()));
  }

  void fetch(Model& from, Range part, Stream on) {
    if (from.beingWritten()) return;
    const std::uint64_t hits = rig_.cache.stats(on.device).hits;
    Pin pin = rig_.cache.fetch(*from.block, {part.begin, part.begin + part.bytes}, on);
    const auto host = from.block->address() + part.begin;
    check((reinterpret_cast<std::uintptr_t>(pin.data()) - host) % kAlignment == 0, "a Slot lost its address's remainder");
    checkAccounts(on.device, rig_.cache.stats(on.device).hits > hits, part.bytes);
    Held held{std::move(pin), std::make_shared<std::optional<Bytes>>(), part.bytes, {on}, part.begin};
    if (from.known) *held.expected = from.at(part);
    if (from.other) from.copying.push_back(held.expected);
    pins_.push_back(std::move(held));
    if (choices_.oneIn("reads", 2)) {
      read(std::prev(pins_.end()));
    }
    if (pins_.size() > kMostPins) {
      drop(pick("dropped"));
    }
  }

  /// Has a few extents come, or lets go of them.
  void fetchAhead() {
    Model& from = model();
    if (ahead_.size() == kMostAhead || from.beingWritten()) return ahead_.clear();
    const Range part = range(from);
    ahead_.push_back(rig_.cache.fetchAhead(*from.block, {part.begin, part.begin + part.bytes}, stream()));
  }

  void read() {
    read(pick());
  }

  void read(std::vector<Held>::iterator held) {
    if (held == pins_.end()) return;
    const void* const data = held->pin.data();
    auto body = [this, data, expected = held->expected] {
      const auto& bytes = *expected;
      check(!bytes || std::memcmp(data, bytes->data(), bytes->size()) == 0, "a kernel read other bytes");
    };
    rig_.sim.launch(held->streams[choices_.below("reader", held->streams.size())], std::move(body), {{data, held->bytes}}, {});
  }

  void alsoUse() {
    const auto held = pick();
    if (held == pins_.end()) return;
    const Stream more = streamOf(held->streams.front().device);
    rig_.order(held->streams.front(), more);
    held->pin.alsoUsedOn(more);
    held->streams.push_back(more);
  }

  void drop() {
    drop(pick());
  }

  void drop(std::vector<Held>::iterator held) {
    if (held != pins_.end()) {
      pins_.erase(held);
    }
  }

  /// What is done for tensors that autograd saves.
  void save() {
    Model& to = model();
    to.block->goesHome = !choices_.oneIn("stays", 4);
    adopt(to);
  }

  void adopt(Model& to) {
    if (to.beingWritten() || to.foreign) return;
    const Stream producer = stream();
    const Stream home = streamOf(producer.device);
    const std::size_t bytes = to.bytes.size();
    const Bytes result = value(bytes);
    DeviceBuffer buffer;
    if (saved_ && choices_.oneIn("part", 2)) { // a part of what is held
      const std::size_t begin = kAlignment * choices_.below("begin", 8);
      buffer = rig_.newResult(home, value(begin + bytes + choices_.below("behind", 1024)));
      buffer.data = static_cast<std::byte*>(buffer.data) + begin;
    } else if (choices_.oneIn("ours", 4)) {
      buffer = {rig_.sim.allocate(bytes, home), bytes, home, nullptr};
    } else {
      buffer = rig_.newResult(home, result);
    }
    rig_.order(home, producer);
    rig_.writeOnDevice(producer, buffer.data, result);
    // A gradient, or what is only to be added to one.
    const std::uint64_t derived = choices_.below("derived", 6);
    to.block->derivedFrom = derived == 1 || derived == 2 ? to.block->data : nullptr;
    if (derived == 1) {
      to.block->purpose = Purpose::Temporary;
      addendBytes_[producer.device] = buffer.bytes;
    }
    if (derived == 2) to.block->purpose = Purpose::Gradient;
    to.known = false;
    rig_.cache.adopt(*to.block, std::move(buffer), producer);
    to.known = true;
    to.bytes = result;
  }

  // ---- what kernels have written: fuzz_results.h

  void adopt();
  void store();
  std::vector<Model>::iterator sourceOf(const Held& held);
  bool isShownElsewhere(const Held& held) const;
  void changeInPlace();
  void takeBack();

  // ---- host: fuzz_host.h

  void readHost(const Model& from, Range part);
  /// Under a lease, or before anybody else knows of the Block.
  void writeUnder(Model& to, Range part);
  void writeHost(Model& to, Range part);
  void readInPlace();
  void hostRead();
  void hostWrite();
  void writeLater();
  void updateThere();
  void changeThere();
  /// Takes a lease for a while, or lets go of one.
  void holdLease();
  void changeBehindItsBack();
  void checkAccounts(int device, bool hit, std::size_t bytes);

  // ---- what must hold

  void check(bool holds, const char* what) {
    if (!holds && wrong_.empty()) {
      wrong_ = what;
    }
  }

  void validate() {
    for (const Model& model : models_) {
      rig_.cache.validate(*model.block);
    }
    rig_.arena.validate();
    if (!rig_.sim.reports().empty()) {
      throw Error(rig_.sim.reports().front()); // also what somebody caught who goes on without the copy
    }
    if (!wrong_.empty()) {
      throw Error(wrong_);
    }
  }

  void finish() {
    while (!models_.empty()) {
      choices_.begin("end");
      if (choices_.oneIn("reads", 2)) {
        Model& last = models_.back();
        last.lease = {};
        last.lease = rig_.cache.lease(*last.block, Access::Read);
        readHost(last, {0, last.bytes.size()});
      }
      forget(models_.size() - 1);
    }
    pins_.clear();
    ahead_.clear();
    for (int device = 0; device < rig_.sim.deviceCount(); ++device) {
      rig_.cache.emptyCache(device);
      const ResidencyStats stats = rig_.cache.stats(device);
      check(stats.slotBytes == 0 && stats.pinnedBytes == 0, "Slots are left when everything has been let go");
      check(rig_.sim.bytesInUse(device) == 0, "device memory is left when everything has been let go");
    }
    check(rig_.owned == 0, "a result's memory was not released");
    check(rig_.arena.stats().allocated == 0, "host memory is left when everything has been let go");
    // To ask a token that the Link had refused to record records it, and a range may have several.
    for (int round = 0; round < 4; ++round) {
      rig_.sim.drain();
      rig_.arena.trim();
    }
    check(rig_.arena.stats().reserved == 0, "regions are left when everything is done");
    check(rig_.arena.stats().shared == 0, "shared memory is left when everything is done");
    validate();
  }

  const std::uint64_t seed_;
  Choices choices_;
  const bool ordered_;
  const bool shared_;
  const bool saved_;
  const bool jobs_;
  const bool updates_;
  const bool faulty_;
  std::map<int, std::size_t> addendBytes_; // of the last one on a device, for which the write buffer has room
  const bool batches_;
  std::size_t turn_ = 0;
  std::string wrong_;
  const CoreOptions options_;
  ProgramRig rig_;
  std::vector<Stream> streams_; // three of each device, the first its null stream
  std::vector<Model> models_;
  std::vector<Held> pins_;
  std::vector<Pin> ahead_;
  std::uint64_t values_ = 0;
  std::size_t writesOfOthers_ = 0;
  std::size_t updatesDone_ = 0;
  std::size_t changedInPlace_ = 0;
  std::size_t takenBack_ = 0;
  std::size_t readInPlace_ = 0;
};

} // namespace offload::core_test

#include "fuzz_accounts.h"
#include "fuzz_draw.h"
#include "fuzz_host.h"
#include "fuzz_process.h"
#include "fuzz_results.h"
