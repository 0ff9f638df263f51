// Random programs on the simulated link, with some of their waits left out. A second, naive account of the order (the set of all
// earlier operations for each operation) says which calls race; the link must report in exactly those. Programs without a race
// must end with the bytes that running their calls in order gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <vector>

#include "core/error.h"
#include "core/link/sim_link.h"

namespace offload {
namespace {

constexpr std::size_t bufferBytes = 32;
constexpr std::size_t hostBuffers = 3;
constexpr std::size_t deviceBuffers = 3;
constexpr std::size_t streamCount = 4; // the first is the host-driven one
constexpr std::size_t maxOperations = 512;
using Past = std::bitset<maxOperations>;
using Bytes = std::array<unsigned char, bufferBytes>;

class Program {
 public:
  Program(std::uint64_t seed, bool leaveOut) : random_(seed), leaveOut_(leaveOut), link_({.seed = seed, .failFast = false}) {
    for (std::size_t i = 1; i < streamCount; ++i) {
      streams_[i] = link_.createStream(0);
    }
    for (std::size_t i = 0; i < hostBuffers; ++i) {
      buffers_[i].data = home_[i].data();
    }
    for (std::size_t i = hostBuffers; i < buffers_.size(); ++i) {
      allocate(buffers_[i]);
    }
  }

  void run(std::size_t operations) {
    while (operations-- > 0 && !raced_) {
      switch (random_.below(8)) {
        case 0:
        case 1:
          copy(host(), device());
          break;
        case 2:
        case 3:
          copy(device(), host());
          break;
        case 4:
          fill(device());
          break;
        case 5:
          kernel(any(), any());
          break;
        case 6:
          touch(host());
          break;
        default:
          replace(device());
      }
    }
    link_.drain();
  }

  void expectBytesOfCallOrder() const {
    for (std::size_t i = 0; i < hostBuffers; ++i) {
      ASSERT_EQ(home_[i], buffers_[i].expected);
    }
  }
  bool raced() const {
    return raced_;
  }
  std::uint64_t trace() const {
    return link_.trace();
  }

 private:
  struct Buffer;
  struct Use {
    std::size_t operation;
    std::size_t stream;
    std::size_t begin;
    std::size_t end;
    bool writes;
    Event event;
    Past known; // what waiting for the event makes known
  };
  struct Buffer {
    unsigned char* data = nullptr;
    std::size_t owner = 0; // the stream of its allocation
    Bytes expected{};
    std::vector<Use> uses;
  };
  struct Part {
    Buffer* buffer;
    std::size_t begin;
    std::size_t end;
    bool writes;

    bool conflictsWith(const Use& use) const {
      return (writes || use.writes) && begin < use.end && use.begin < end;
    }
    unsigned char* data() const {
      return buffer->data + begin;
    }
    std::size_t bytes() const {
      return end - begin;
    }
  };

  Buffer& host() {
    return buffers_[random_.below(hostBuffers)];
  }
  Buffer& device() {
    return buffers_[hostBuffers + random_.below(deviceBuffers)];
  }
  Buffer& any() {
    return buffers_[random_.below(buffers_.size())];
  }

  /// Waits on `stream` for all that `parts` must come after, now and then leaving one out; makes the call; compares its reports.
  template <class Call>
  void perform(std::size_t stream, const std::vector<Part>& parts, Call call) {
    bool races = false;
    for (const Part& part : parts) {
      for (const Use& use : part.buffer->uses) {
        const bool needed = part.conflictsWith(use) && !known(stream)[use.operation];
        if (needed && !(leaveOut_ && random_.oneIn(16))) {
          waitFor(stream, use);
        }
      }
    }
    for (const Part& part : parts) {
      for (const Use& use : part.buffer->uses) {
        races = races || (part.conflictsWith(use) && !known(stream)[use.operation]);
      }
    }
    const std::size_t before = link_.reports().size();
    call();
    const auto reports = link_.reports();
    ASSERT_EQ(reports.size() > before, races) << "operation " << operations_ << ": " << (races ? "" : reports.back());
    raced_ = races;

    Past& past = past_[stream];
    past = known(stream);
    past.set(operations_);
    const Event event = link_.createEvent(0);
    link_.record(event, streams_[stream]);
    for (const Part& part : parts) {
      part.buffer->uses.push_back({operations_, stream, part.begin, part.end, part.writes, event, past});
    }
    ++operations_;
  }

  /// What the next operation on the stream comes after.
  Past known(std::size_t stream) const {
    return past_[stream] | past_[0];
  }

  void waitFor(std::size_t stream, const Use& use) {
    const bool onHost = stream == 0 || random_.oneIn(4);
    if (!onHost) {
      link_.wait(streams_[stream], use.event);
    } else if (random_.oneIn(2)) {
      link_.synchronize(use.event);
    } else {
      while (!link_.query(use.event)) {
      }
    }
    past_[onHost ? 0 : stream] |= use.known;
  }

  Part part(Buffer& buffer, std::size_t bytes, bool writes) {
    const std::size_t begin = random_.below(bufferBytes - bytes + 1);
    return {&buffer, begin, begin + bytes, writes};
  }

  void copy(Buffer& from, Buffer& to) {
    const std::size_t bytes = 1 + random_.below(bufferBytes);
    const Part source = part(from, bytes, false);
    const Part target = part(to, bytes, true);
    const std::size_t stream = random_.below(streamCount);
    perform(stream, {source, target}, [&] {
      if (&to < &buffers_[hostBuffers]) {
        link_.copyToHost(target.data(), source.data(), bytes, streams_[stream]);
      } else {
        link_.copyToDevice(target.data(), source.data(), bytes, streams_[stream]);
      }
    });
    std::copy_n(
        from.expected.begin() + static_cast<std::ptrdiff_t>(source.begin), bytes,
        to.expected.begin() + static_cast<std::ptrdiff_t>(target.begin));
  }

  void fill(Buffer& to) {
    const Part target = part(to, 1 + random_.below(bufferBytes), true);
    const auto value = static_cast<unsigned char>(random_.next());
    const std::size_t stream = random_.below(streamCount);
    perform(stream, {target}, [&] { link_.fill(target.data(), value, target.bytes(), streams_[stream]); });
    std::fill_n(to.expected.begin() + static_cast<std::ptrdiff_t>(target.begin), target.bytes(), value);
  }

  void kernel(Buffer& from, Buffer& to) {
    const std::size_t bytes = 1 + random_.below(bufferBytes);
    const Part source = part(from, bytes, false);
    const Part target = part(to, bytes, true);
    const auto add = [bytes](const unsigned char* in, unsigned char* out) {
      for (std::size_t i = 0; i < bytes; ++i) {
        out[i] = static_cast<unsigned char>(3 * out[i] + in[i]);
      }
    };
    const std::size_t stream = random_.below(streamCount);
    perform(stream, {source, target}, [&] {
      link_.launch(
          streams_[stream], [=, in = source.data(), out = target.data()] { add(in, out); }, {{source.data(), bytes}},
          {{target.data(), bytes}});
    });
    add(from.expected.data() + source.begin, to.expected.data() + target.begin);
  }

  void touch(Buffer& buffer) {
    const bool writes = random_.oneIn(2);
    const Part target = part(buffer, 1 + random_.below(bufferBytes), writes);
    perform(0, {target}, [&] { link_.hostAccess(target.data(), target.bytes(), writes ? Access::Write : Access::Read); });
    if (raced_) {
      return;
    }
    for (std::size_t i = target.begin; i < target.end; ++i) {
      ASSERT_EQ(buffer.data[i], buffer.expected[i]);
      if (writes) {
        buffer.data[i] = buffer.expected[i] = static_cast<unsigned char>(random_.next());
      }
    }
  }

  void replace(Buffer& buffer) {
    perform(buffer.owner, {{&buffer, 0, bufferBytes, true}}, [&] { link_.free(buffer.data, streams_[buffer.owner]); });
    if (!raced_) {
      allocate(buffer);
    }
  }

  void allocate(Buffer& buffer) {
    buffer.uses.clear();
    buffer.owner = random_.below(streamCount);
    buffer.expected.fill(SimMemory::freshByte);
    perform(buffer.owner, {{&buffer, 0, bufferBytes, true}}, [&] {
      buffer.data = static_cast<unsigned char*>(link_.allocate(bufferBytes, streams_[buffer.owner]));
    });
  }

  SimRandom random_;
  bool leaveOut_;
  std::array<Bytes, hostBuffers> home_{}; // outlives the link, which may still copy when it ends
  SimLink link_;
  std::array<Stream, streamCount> streams_{};
  std::array<Buffer, hostBuffers + deviceBuffers> buffers_;
  std::array<Past, streamCount> past_;
  std::size_t operations_ = 0;
  bool raced_ = false;
};

TEST(SimProgram, OrderedProgramsHaveNoReportAndTheBytesOfCallOrder) {
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Program program(seed, false);
    program.run(50);
    ASSERT_FALSE(program.raced()) << "seed " << seed;
    ASSERT_NO_FATAL_FAILURE(program.expectBytesOfCallOrder()) << "seed " << seed;
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST(SimProgram, TheFirstUnorderedCallIsReported) {
  std::size_t racy = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Program program(seed, true);
    program.run(50);
    racy += program.raced();
    if (!program.raced()) {
      program.expectBytesOfCallOrder();
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
  EXPECT_GT(racy, 500U);
  EXPECT_LT(racy, 1000U);
}

TEST(SimProgram, TheSameSeedRunsInTheSameOrder) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Program first(seed, false);
    Program second(seed, false);
    first.run(50);
    second.run(50);
    ASSERT_EQ(first.trace(), second.trace());
  }
}

} // namespace
} // namespace offload
