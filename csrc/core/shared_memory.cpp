#include "core/shared_memory.h"

#include "core/descriptors.h"
#include "core/error.h"
#include "core/host_region.h"
#include "core/memory_limits.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

namespace offload {
namespace {

constexpr std::uint64_t kMagic = 0x6472'6168'7366'666f; // "offshard", and a layout of its own for every change

std::string reason() {
  return std::strerror(errno);
}

bool reserve(int descriptor, std::size_t bytes) {
  int result = 0;
  do {
    result = ::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

} // namespace

struct SharedMemory::Header {
  std::uint64_t magic = kMagic;
  std::uint64_t bytes = 0;
  Born born = Born::Host;
  std::atomic<std::uint64_t> version{0};
  static_assert(decltype(version)::is_always_lock_free, "a lock would be each process's own");
};

void SharedMemory::requireDescriptor() {
  const auto shortage = raiseDescriptorLimit();
  if (!shortage) return;
  throw Error(
      "offload: a storage that processes share takes a file descriptor in each of them, and this one has " +
      std::to_string(shortage->used) + " open of the " + std::to_string(shortage->most) + " that it may have, of which " +
      std::to_string(kDescriptorsForOthers) +
      " are left to the rest of the program: share fewer storages (views of one tensor are one), or raise the hard limit "
      "(\"ulimit -Hn\").");
}

std::unique_ptr<SharedMemory> SharedMemory::create(std::size_t bytes, Born born) {
  const std::size_t whole = wholePages(sizeof(Header)) + wholePages(bytes);
  auto refuse = [&](const std::string& why) -> OutOfMemory {
    return {
        OutOfMemory::Where::Host, bytes,
        "offload: the host is out of memory. There are no " + std::to_string(bytes) + " bytes to share between processes (" +
            why + "): free tensors, or use a machine with more memory."};
  };
  // The kernel would not refuse: it would take memory until it has to kill somebody.
  const std::size_t available = readMemoryLimits().available;
  if (whole < bytes || whole > available) throw refuse(std::to_string(available) + " are available");
  const int descriptor = memfd_create("torch_offload", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) throw refuse(reason());
  std::unique_ptr<SharedMemory> memory(new SharedMemory(descriptor));
  if (!reserve(descriptor, whole) || !memory->map(whole)) throw refuse(reason());
  // Nobody relies on the seals but who would meet a bus error without them.
  (void)fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  auto* const header = new (memory->mapped_) Header;
  header->bytes = bytes;
  header->born = born;
  return memory;
}

std::unique_ptr<SharedMemory> SharedMemory::open(int descriptor) {
  std::unique_ptr<SharedMemory> memory(new SharedMemory(descriptor));
  auto refuse = [&](const std::string& why) {
    return Error(
        "offload: file descriptor " + std::to_string(descriptor) + " is no memory of a shared offload tensor: " + why + ".");
  };
  struct stat status {};
  if (fstat(descriptor, &status) != 0) throw refuse(reason());
  const std::size_t head = wholePages(sizeof(Header));
  const auto whole = static_cast<std::size_t>(status.st_size);
  if (!S_ISREG(status.st_mode) || whole < head) {
    throw refuse("it has " + std::to_string(whole) + " bytes, and a header alone has " + std::to_string(head));
  }
  if (!memory->map(whole)) throw refuse(reason());
  if (memory->header().magic != kMagic || wholePages(memory->bytes()) != whole - head) {
    throw refuse("it was not made by this version of this package");
  }
  return memory;
}

SharedMemory::~SharedMemory() {
  if (mapped_ != nullptr) munmap(mapped_, mappedBytes_);
  close(descriptor_);
}

bool SharedMemory::map(std::size_t bytes) noexcept {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (data == MAP_FAILED) return false;
  mapped_ = data;
  mappedBytes_ = bytes;
  return true;
}

SharedMemory::Header& SharedMemory::header() const noexcept {
  return *std::launder(static_cast<Header*>(mapped_));
}

void* SharedMemory::data() const noexcept {
  return static_cast<std::byte*>(mapped_) + wholePages(sizeof(Header));
}

std::size_t SharedMemory::bytes() const noexcept {
  return header().bytes;
}

Born SharedMemory::born() const noexcept {
  return header().born;
}

std::uint64_t SharedMemory::version() const noexcept {
  return header().version.load(std::memory_order_acquire);
}

std::uint64_t SharedMemory::bump() noexcept {
  return header().version.fetch_add(1, std::memory_order_acq_rel);
}

} // namespace offload
