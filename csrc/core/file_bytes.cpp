#include "core/file_bytes.h"

#include <cstring>
#include <exception>

namespace offload {
namespace {

constexpr std::size_t kThreads = 8;

} // namespace

FileBytes::FileBytes(std::shared_ptr<File> file, std::uint64_t offset, std::size_t bytes)
    : file_(std::move(file)), offset_(offset), bytes_(bytes), data_(file_->mapping() + offset) {}

FileBytes::~FileBytes() {
  if (!inFile_) file_->forget(offset_, bytes_);
}

void FileBytes::prepare(Access access) {
  if (!inFile_) return;
  if (access == Access::Read) return file_->requireUnchanged();
  const std::lock_guard lock(mutex_);
  if (!inFile_) return;
  file_->requireUnchanged();
  file_->detach(offset_, bytes_, kThreads);
  leaveFile();
}

void FileBytes::leaveFile() noexcept {
  if (inFile_.exchange(false) && tell_) tell_();
}

void FileBytes::markWritten() noexcept {
  if (!inFile_) return;
  file_->keepWritten(offset_, bytes_);
  leaveFile();
}

HostTask FileBytes::readTask(std::shared_ptr<FileBytes> source, Extent extent, std::byte* to, DeferredError& errors) {
  auto run = [source = std::move(source), extent, to, &errors]() noexcept {
    try {
      const FilePart part{source->offset_ + extent.begin, to, extent.bytes()};
      source->file_->read({&part, 1}, kThreads);
    } catch (const std::exception& error) {
      std::memset(to, 0xFF, extent.bytes());
      ++source->failures_;
      errors.keep(
          error.what() + std::string(" The tensor was given NaN there, so results that were computed from it are not valid."));
    }
  };
  return {std::move(run), {{to, extent.bytes(), Access::Write}}};
}

} // namespace offload
