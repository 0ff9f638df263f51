#include "core/file.h"

#include "core/descriptors.h"
#include "core/error.h"
#include "core/parallel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace offload {
namespace {

// Long enough that starting a thread for it pays, and that a disk is asked for much at a time.
constexpr std::size_t kPiece = std::size_t{2} << 20;

std::string reason(int code) {
  return std::generic_category().message(code);
}

std::vector<FilePart> piecesOf(std::span<const FilePart> parts) {
  std::vector<FilePart> pieces;
  for (const FilePart& part : parts) {
    for (std::size_t at = 0; at < part.bytes; at += kPiece) {
      pieces.push_back({part.offset + at, part.to + at, std::min(kPiece, part.bytes - at)});
    }
  }
  return pieces;
}

// Memory whose huge pages, which are much faster to get, lie as they will at `target`: only so are they moved there whole. MAP_FAILED
// if the system refuses.
void* mapLike(const std::byte* target, std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  void* const mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return mapped;
  const std::size_t before = (reinterpret_cast<std::uintptr_t>(target) - reinterpret_cast<std::uintptr_t>(mapped)) % kHugePage;
  auto* const data = static_cast<std::byte*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(data + bytes, kHugePage - before);
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

// A model may have more files than a process is given descriptors at first; some are left for the rest of the program. The number of a
// new one is the least that is free.
int openToRead(const std::string& path) {
  int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct rlimit limit {};
  const bool last = descriptor < 0 && errno == EMFILE;
  const bool few = descriptor >= 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
      static_cast<std::size_t>(descriptor) + kDescriptorsForOthers >= limit.rlim_cur;
  if (last || few) (void)raiseDescriptorLimit();
  if (last) descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  return descriptor;
}

std::uint64_t pageBytes() {
  return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

/// The first and the last page of bytes, of which there are some.
std::pair<std::uint64_t, std::uint64_t> edgesOf(std::uint64_t offset, std::size_t bytes) {
  return {offset / pageBytes(), (offset + bytes - 1) / pageBytes()};
}

// What kept a piece from being read; empty if nothing did.
std::string readPiece(int descriptor, const std::string& path, const FilePart& part) {
  std::size_t done = 0;
  while (done < part.bytes) {
    const ssize_t got = pread(descriptor, part.to + done, part.bytes - done, static_cast<off_t>(part.offset + done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got == 0 || errno != EINTR) {
      const std::string why = got == 0 ? "the file ends there" : reason(errno);
      return "offload: of the " + std::to_string(part.bytes) + " bytes from byte " + std::to_string(part.offset) + " of " +
          path + " only " + std::to_string(done) + " could be read: " + why + ".";
    }
  }
  return {};
}

} // namespace

File::File(std::string path) : path_(std::move(path)) {
  descriptor_ = openToRead(path_);
  if (descriptor_ < 0) throw Error("offload: can't open " + path_ + ": " + reason(errno) + ".");
  const bool known = fstat(descriptor_, &opened_) == 0;
  if (known && S_ISREG(opened_.st_mode)) return;
  const std::string why = known ? "it is not a regular file" : reason(errno);
  close(descriptor_);
  throw Error("offload: can't read tensors from " + path_ + ": " + why + ".");
}

File::~File() {
  if (mapping_ != nullptr) munmap(mapping_, bytes());
  close(descriptor_);
}

std::uint64_t File::bytes() const noexcept {
  return static_cast<std::uint64_t>(opened_.st_size);
}

void File::read(std::span<const FilePart> parts, std::size_t threads) const {
  const std::vector<FilePart> pieces = piecesOf(parts);
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::string failure;
  auto work = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++) {
      std::string problem = readPiece(descriptor_, path_, pieces[i]);
      if (problem.empty()) continue;
      const std::lock_guard lock(mutex);
      if (failure.empty()) failure = std::move(problem);
      next = pieces.size();
    }
  };
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  inParallel(std::min({pieces.size(), threads, cores}), work);
  if (!failure.empty()) throw Error(failure);
}

void File::requireUnchanged() const {
  struct stat now {};
  if (fstat(descriptor_, &now) != 0) throw Error("offload: can't look at " + path_ + ": " + reason(errno) + ".");
  const auto same = [](const timespec& a, const timespec& b) { return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec; };
  if (now.st_size == opened_.st_size && same(now.st_mtim, opened_.st_mtim)) return;
  throw Error(
      "offload: " + path_ + " was changed while tensors are read from it: it had " + std::to_string(bytes()) +
      " bytes when it was opened and has " + std::to_string(now.st_size) +
      " now; load it again, and replace a file by renaming a new one over it.");
}

std::byte* File::mapping() {
  const std::lock_guard lock(mutex_);
  if (mapping_ != nullptr) return mapping_;
  // Writable, though nobody writes before detach(): a stray write shall not reach the file, nor end the process. Without a
  // reservation: the system may not have as much memory as the file is long.
  void* const mapped = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (mapped == MAP_FAILED) {
    throw Error("offload: can't map the " + std::to_string(bytes()) + " bytes of " + path_ + ": " + reason(errno) + ".");
  }
  mapping_ = static_cast<std::byte*>(mapped);
  return mapping_;
}

// A written page of a private mapping won't do: cutting the file short takes it away, and the next access ends the process.
void File::detach(std::uint64_t offset, std::size_t bytes, std::size_t threads) {
  if (bytes == 0) return;
  std::byte* const all = mapping();
  const std::uint64_t page = pageBytes();
  const std::lock_guard lock(mutex_);
  const auto [firstEdge, lastEdge] = edgesOf(offset, bytes);
  std::uint64_t first = firstEdge;
  std::uint64_t last = lastEdge;
  {
    const std::lock_guard edges(edgesMutex_);
    if (edges_.contains(first)) ++first;
    if (first <= last && edges_.contains(last)) --last;
  }
  if (first <= last) {
    const std::uint64_t begin = first * page;
    const std::size_t length = (last + 1 - first) * page;
    void* const memory = mapLike(all + begin, length);
    const auto refuse = [&] {
      throw Error(
          "offload: the system has no memory for " + std::to_string(length) + " bytes of " + path_ +
          ", which are to be written: " + reason(errno) + ".");
    };
    if (memory == MAP_FAILED) refuse();
    try {
      const FilePart part{begin, static_cast<std::byte*>(memory), std::min<std::uint64_t>(length, this->bytes() - begin)};
      read({&part, 1}, threads);
      if (mremap(memory, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, all + begin) == MAP_FAILED) refuse();
    } catch (...) {
      munmap(memory, length);
      throw;
    }
  }
  addEdges(firstEdge, lastEdge);
}

void File::keepWritten(std::uint64_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  const auto [first, last] = edgesOf(offset, bytes);
  addEdges(first, last);
}

void File::forget(std::uint64_t offset, std::size_t bytes) noexcept {
  const std::uint64_t begin = (offset + pageBytes() - 1) / pageBytes() * pageBytes();
  const std::uint64_t end = (offset + bytes) / pageBytes() * pageBytes();
  if (begin < end) (void)madvise(mapping_ + begin, end - begin, MADV_DONTNEED);
}

void File::addEdges(std::uint64_t first, std::uint64_t last) {
  const std::lock_guard lock(edgesMutex_);
  edges_.insert({first, last});
}

} // namespace offload
