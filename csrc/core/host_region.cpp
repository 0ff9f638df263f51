#include "core/host_region.h"

#include "core/memory_node.h"
#include "core/parallel.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <thread>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

namespace offload {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
// What a thread takes at a time: a fraction of a millisecond's work, so that all end together.
constexpr std::size_t kPiece = std::size_t{8} << 20;

std::size_t pageBytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

char* roundUp(char* at, std::size_t to) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  return at + ((address + to - 1) / to * to - address);
}

// The CPUs that the process may use and that are on the memory node of this thread; all that it may use where that can't be told.
cpu_set_t nearbyCpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return allowed;
  unsigned cpu = 0;
  unsigned node = 0;
  if (syscall(SYS_getcpu, &cpu, &node, nullptr) != 0) return allowed;
  return cpusOfNode(node, allowed);
}

// Keeps this thread to some CPUs.
class Affinity {
 public:
  explicit Affinity(const cpu_set_t& cpus) {
    CPU_ZERO(&before_);
    if (CPU_COUNT(&cpus) == 0 || sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    changed_ = sched_setaffinity(0, sizeof(cpus), &cpus) == 0;
  }
  ~Affinity() {
    if (changed_) (void)sched_setaffinity(0, sizeof(before_), &before_);
  }
  Affinity(const Affinity&) = delete;
  Affinity& operator=(const Affinity&) = delete;

 private:
  cpu_set_t before_;
  bool changed_ = false;
};

bool populatePiece(char* data, std::size_t bytes) {
  int result = 0;
  do {
    result = madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return true;
  if (errno != EINVAL) return false;
  for (std::size_t at = 0; at < bytes; at += pageBytes()) *static_cast<volatile char*>(data + at) = 0; // an older kernel
  return true;
}

} // namespace

std::size_t wholePages(std::size_t bytes) {
  return (bytes + pageBytes() - 1) / pageBytes() * pageBytes();
}

HostRegion HostRegion::map(std::size_t bytes) {
  const std::size_t wanted = wholePages(bytes);
  // Room to begin at a huge page; what is before and behind goes back.
  const std::size_t spare = wanted >= kHugePage ? kHugePage : 0;
  if (wanted < bytes || wanted + spare < wanted) return {};
  void* const mapped = mmap(nullptr, wanted + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {};
  char* const begin = static_cast<char*>(mapped);
  char* const data = spare > 0 ? roundUp(begin, kHugePage) : begin;
  char* const end = begin + wanted + spare;
  if (data > begin) munmap(begin, static_cast<std::size_t>(data - begin));
  if (end > data + wanted) munmap(data + wanted, static_cast<std::size_t>(end - data) - wanted);
  // Of the last huge page only a part would be ours.
  if (const std::size_t huge = wanted / kHugePage * kHugePage; huge > 0) madvise(data, huge, MADV_HUGEPAGE);
  return {data, wanted};
}

HostRegion::~HostRegion() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

HostRegion::HostRegion(HostRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HostRegion& HostRegion::operator=(HostRegion&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool HostRegion::populate(std::size_t most) const {
  const std::size_t pieces = (bytes_ + kPiece - 1) / kPiece;
  if (pieces < 2) return populatePiece(data_, bytes_);
  std::atomic<std::size_t> next{0};
  std::atomic<bool> done{true};
  auto work = [&] {
    for (std::size_t piece = next++; piece < pieces && done; piece = next++) {
      const std::size_t begin = piece * kPiece;
      if (!populatePiece(data_ + begin, std::min(kPiece, bytes_ - begin))) done = false;
    }
  };
  const cpu_set_t cpus = nearbyCpus();
  const auto cores = static_cast<std::size_t>(std::max(1, CPU_COUNT(&cpus)));
  const auto caller = std::this_thread::get_id();
  inParallel(std::min({pieces, cores, most}), [&] {
    if (std::this_thread::get_id() == caller) return work();
    const Affinity scope(cpus);
    work();
  });
  return done;
}

void HostRegion::hideFromChildren() const {
  madvise(data_, bytes_, MADV_DONTFORK);
}

} // namespace offload
