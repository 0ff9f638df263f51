#include "aten/context.h"

#include "aten/activity_ranges.h"
#include "aten/cuda_glue.h"
#include "aten/settings_check.h"
#include "core/error.h"
#include "core/forked.h"
#include "core/link/sim_link.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace offload {
namespace {

std::atomic<Context*> theContext{nullptr};

std::vector<std::function<void()>>& firstUseTasks() {
  static auto* tasks = new std::vector<std::function<void()>>();
  return *tasks;
}

// None where it is not set, or to nothing.
std::optional<std::size_t> environmentNumber(const char* name, std::size_t most = SIZE_MAX, std::size_t least = 0) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  std::size_t value = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  TORCH_CHECK(
      parsed.ec == std::errc() && parsed.ptr == end && value >= least && value <= most, "offload: ", name, "=\"", text,
      "\" is not a whole number from ", least, " to ", most, "; give bytes or a count in digits.");
  return value;
}

// Those that the simulated link plays, or will from first use on; 0 where the link is another.
int simulatedDevices() noexcept {
  if (const Context* now = Context::ifCreated()) return now->backend() == Backend::Sim ? now->link()->deviceCount() : 0;
  try {
    const Settings settings = Settings::fromEnvironment();
    return settings.link == "sim" ? settings.simDevices : 0;
  } catch (const c10::Error&) {
    return 0; // first use will tell
  }
}

// A machine may be small: the ring takes a sixteenth of the device and no more than what hides a link's latency well.
std::size_t defaultRingBytes(Backend backend) {
  constexpr std::size_t most = std::size_t{512} << 20;
  if (backend != Backend::Cuda) return most;
  return std::clamp<std::size_t>(cuda::totalMemory() / 16, std::size_t{64} << 20, most);
}

void refuseFork() {
  TORCH_CHECK(
      !isForked(),
      "offload: this process was forked from one that had already used offload tensors, and page-locked memory and CUDA do "
      "not survive a fork. Start workers with multiprocessing's \"spawn\" or \"forkserver\" method, or fork before the "
      "first use.");
}

std::optional<HostJobs::When> environmentJobs() {
  const char* text = std::getenv("TORCH_OFFLOAD_HOST_JOBS");
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::string_view name = text;
  if (name == "now") return HostJobs::When::AtOnce;
  if (name == "wanted") return HostJobs::When::Wanted;
  TORCH_CHECK(name == "soon", "offload: TORCH_OFFLOAD_HOST_JOBS=\"", name, "\" names no time; choose now, soon or wanted.");
  return HostJobs::When::Soon;
}

} // namespace

Settings Settings::fromEnvironment() {
  Settings settings;
  const char* link = std::getenv("TORCH_OFFLOAD_LINK");
  if (link != nullptr && *link != '\0') settings.link = link;
  settings.seed = environmentNumber("TORCH_OFFLOAD_SEED").value_or(settings.seed);
  constexpr auto mostDevices = std::numeric_limits<c10::DeviceIndex>::max(); // that an index can name
  settings.simDevices = static_cast<int>(environmentNumber("TORCH_OFFLOAD_SIM_DEVICES", mostDevices, 1).value_or(1));
  settings.ringBytes = environmentNumber("TORCH_OFFLOAD_RING_BYTES");
  const char* budget = std::getenv("TORCH_OFFLOAD_BUDGET");
  if (budget != nullptr && *budget != '\0') settings.budget = budget;
  settings.pinnedLimit = environmentNumber("TORCH_OFFLOAD_PINNED_LIMIT").value_or(settings.pinnedLimit);
  settings.evictAtUnpin = environmentNumber("TORCH_OFFLOAD_EVICT").value_or(0) != 0;
  settings.prefetch = environmentNumber("TORCH_OFFLOAD_PREFETCH").value_or(1) != 0;
  settings.poison = environmentNumber("TORCH_OFFLOAD_POISON").value_or(0) != 0;
  // More than a second for each copy would look like a program that hangs.
  settings.copyDelay = std::chrono::microseconds(environmentNumber("TORCH_OFFLOAD_COPY_DELAY_US", 1'000'000).value_or(0));
  settings.validate = environmentNumber("TORCH_OFFLOAD_VALIDATE").value_or(0) != 0;
  settings.hostJobs = environmentJobs();
  settings.fault = environmentNumber("TORCH_OFFLOAD_FAULT");
  return settings;
}

Context& Context::get() {
  refuseFork();
  static Context* instance = [] {
    auto* created = new Context(Settings::fromEnvironment());
    theContext.store(created, std::memory_order_release);
    // Plain host memory is the child's own after a fork; only what a device knows of is lost.
    if (created->hasCache()) noteForks();
    for (const auto& task : firstUseTasks()) task();
    return created;
  }();
  return *instance;
}

void Context::atFirstUse(std::function<void()> task) {
  firstUseTasks().push_back(std::move(task));
}

Context* Context::ifCreated() noexcept {
  return theContext.load(std::memory_order_acquire);
}

bool Context::inUse() noexcept {
  return ifCreated() != nullptr && !isForked();
}

Context::Context(const Settings& settings) {
  const std::string& name = settings.link;
  TORCH_CHECK(
      name == "auto" || name == "cuda" || name == "sim" || name == "none", "offload: TORCH_OFFLOAD_LINK=\"", name,
      "\" names no link; choose auto, cuda, sim or none.");
  TORCH_CHECK(
      name != "cuda" || cuda::deviceCount() > 0,
      "offload: TORCH_OFFLOAD_LINK=cuda asks for a CUDA device, and PyTorch sees none here; choose auto or none.");
  if (name == "sim") {
    SimOptions options;
    options.seed = settings.seed;
    options.devices = settings.simDevices;
    options.deviceBytes = deviceBytes_ = std::size_t{8} << 30;
    options.foreignDeviceMemory = true;
    options.tellsTime = true;
    options.wantsRegistration = settings.pinnedLimit != SIZE_MAX; // so that a limit has something to limit
    backend_ = Backend::Sim;
    link_ = std::make_unique<SimLink>(options);
  } else if (name != "none" && cuda::deviceCount() > 0) {
    backend_ = Backend::Cuda;
    link_ = cuda::makeLink();
    deviceBytes_ = cuda::totalMemory();
  }
  checkEnvironment(backend_);
  std::optional<std::size_t> budget;
  try {
    budget = budgetOf(settings.budget, deviceBytes_);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK(false, "offload: TORCH_OFFLOAD_BUDGET can't be read: ", error.what());
  }
  if (link_ && settings.fault) faults_ = std::make_unique<FaultLink>(*link_);
  ArenaOptions arena;
  arena.poison = settings.poison;
  arena.validate = settings.validate;
  arena.pinnedLimit = settings.pinnedLimit;
  arena.warn = [](const std::string& sentence) { TORCH_WARN(sentence); };
  arena_ = std::make_unique<Arena>(link(), std::move(arena));
  if (!link_) return;
  ResidencyOptions options;
  options.ringBytes = settings.ringBytes ? *settings.ringBytes : defaultRingBytes(backend_);
  options.budgetBytes = budget;
  // What PyTorch may ask for between two looks at what is free, without our having to give something back for it.
  options.headroomBytes = backend_ == Backend::Cuda ? std::size_t{4} << 30 : std::size_t{1} << 20;
  options.headroomShare = 1.0 / 16;
  options.evictAtUnpin = settings.evictAtUnpin;
  options.writeBufferShare = 1.0 / 4;
  options.prefetch = settings.prefetch;
  options.poison = settings.poison;
  options.hostJobs = settings.hostJobs.value_or(backend_ == Backend::Sim ? HostJobs::When::Wanted : HostJobs::When::Soon);
  options.copyDelay = settings.copyDelay;
  options.observer = &activityRanges();
  options.validate = settings.validate;
  options.ringIsSet = settings.ringBytes.has_value();
  options.warn = [](const std::string& sentence) { TORCH_WARN(sentence); };
  residency_ = std::make_unique<Residency>(*link(), options);
  for (const auto& [what, bytes] : {std::pair{"ring", settings.ringBytes.value_or(0)}, {"budget", budget.value_or(0)}}) {
    const std::string problem = problemOf(what, std::to_string(bytes) + " bytes", bytes, backend_, deviceBytes_);
    if (!problem.empty()) TORCH_WARN(problem);
  }
  if (faults_) faults_->fail(*settings.fault);
  if (backend_ != Backend::Cuda) return;
  cuda::relieveAllocatorBy(
      [](c10::DeviceIndex index, std::size_t free, std::size_t usual, std::size_t most, std::size_t kept) -> std::size_t {
        const Context* now = ifCreated();
        return now != nullptr ? now->residency().relieve(index, free, usual, most, kept) : 0;
      },
      [](c10::DeviceIndex index, std::size_t bytes) -> std::size_t {
        const Context* now = ifCreated();
        return now != nullptr ? now->residency().relieveOf(index, bytes) : 0;
      },
      [](c10::DeviceIndex index) {
        try {
          if (const Context* now = ifCreated()) now->residency().emptyCache(index);
        } catch (...) {
          // The allocator raises its own out-of-memory error.
        }
      });
}

Stream Context::currentStream(c10::DeviceIndex index) const {
  if (backend_ == Backend::Cuda) return cuda::currentStream(index);
  return {index, nullptr};
}

HostRange Context::allocate(std::size_t bytes, bool locked) {
  try {
    return arena_->allocate(bytes, locked);
  } catch (const OutOfMemory& error) {
    const bool keeps = residency_ && residency_->hostJobStats().pending > 0;
    TORCH_CHECK_WITH(OutOfMemoryError, keeps, error.what());
  }
  residency_->finishJobs(); // which may hold memory that nobody else does
  return allocate(bytes, locked);
}

c10::DataPtr Context::newBlock(std::size_t bytes, c10::DeviceIndex index, Born born, Purpose purpose, bool locked) {
  const c10::Device device(kOffload, index);
  if (bytes == 0) return {nullptr, device};
  TORCH_CHECK(
      bytes <= PTRDIFF_MAX, "offload: a storage of ", static_cast<std::ptrdiff_t>(bytes),
      " bytes was asked for; give 0 or more.");
  const HostRange range = allocate(bytes, locked);
  auto* block = new Block(range.data, bytes, range.pinned ? BlockKind::Pinned : BlockKind::Pageable, born, index);
  block->purpose = purpose;
  return listed(block);
}

c10::DataPtr Context::foreignBlock(
    void* data, std::size_t bytes, c10::DeviceIndex index, std::shared_ptr<void> owner, Purpose purpose) {
  auto* block = new Block(data, bytes, BlockKind::Foreign, Born::Host, index);
  block->purpose = purpose;
  block->owner = std::move(owner);
  return listed(block);
}

c10::DataPtr Context::sharedBlock(std::shared_ptr<SharedMemory> memory, c10::DeviceIndex index, Purpose purpose) {
  auto* block = new Block(memory->data(), memory->bytes(), BlockKind::Shared, memory->born(), index);
  block->seenVersion = memory->version();
  block->shared = std::move(memory);
  block->purpose = purpose;
  return listed(block);
}

c10::DataPtr Context::retain(Block& block) {
  block.owners.fetch_add(1, std::memory_order_relaxed);
  return owned(block);
}

c10::DataPtr Context::owned(Block& block) {
  return {block.data, &block, &Context::deleteBlock, c10::Device(kOffload, static_cast<c10::DeviceIndex>(block.device))};
}

c10::DataPtr Context::fileBlock(std::shared_ptr<FileBytes> file, std::size_t bytes, c10::DeviceIndex index) {
  auto* block = new Block(file->data(), bytes, BlockKind::Foreign, Born::Host, index);
  block->owner = file;
  file->whenWritten([this, block] { accounts_.written(*block); });
  block->file = std::move(file);
  return listed(block);
}

c10::DataPtr Context::listed(Block* block) {
  std::lock_guard lock(blocksMutex_);
  blocks_[block->data] = block;
  accounts_.open(*block);
  return owned(*block);
}

void Context::deleteBlock(void* context) noexcept {
  if (static_cast<Block*>(context)->owners.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  if (isForked()) return; // what keeps its memory may know of a device
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  Context& self = *ifCreated();
  {
    std::lock_guard lock(self.blocksMutex_);
    const auto found = self.blocks_.find(block->data);
    if (found != self.blocks_.end() && found->second == block.get()) self.blocks_.erase(found);
    self.accounts_.close(*block);
  }
  std::vector<Token> pending;
  if (self.residency_) pending = self.residency_->forget(*block);
  forgetNames(*block);
  if (block->kind == BlockKind::Shared) {
    if (!pending.empty() || block->shared->pinned) self.arena_->keepAlive(std::move(block->shared), std::move(pending));
  } else if (block->kind != BlockKind::Foreign) {
    self.arena_->free(block->data, std::move(pending));
  } else if (!pending.empty()) {
    self.arena_->keepAlive(std::move(block->owner), std::move(pending));
  }
}

Block* Context::blockAt(const void* data) const {
  std::lock_guard lock(blocksMutex_);
  const auto found = blocks_.find(data);
  return found == blocks_.end() ? nullptr : found->second;
}

std::unordered_map<const void*, Context::BlockInfo> Context::blocks() const {
  std::unordered_map<const void*, BlockInfo> found;
  std::lock_guard lock(blocksMutex_);
  for (const auto& [data, block] : blocks_) found.emplace(data, BlockInfo{block->bytes, block->purpose});
  return found;
}

HostLease Context::lease(Block& block, Access access) const {
  if (residency_) return residency_->lease(block, access);
  if (block.file) block.file->prepare(access);
  return block.shared ? HostLease::uncached(block, access) : HostLease();
}

void Context::drain(bool close) const {
  if (!residency_) return;
  if (isForked()) {
    // A child has none of the threads, and what they had to do is the parent's affair.
    if (close) return;
    refuseFork();
  }
  residency_->drain(close);
}

c10::DeviceIndex deviceCount() noexcept {
  if (const int simulated = simulatedDevices(); simulated > 0) return static_cast<c10::DeviceIndex>(simulated);
  return std::max<c10::DeviceIndex>(1, cuda::deviceCount());
}

Block& blockOf(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  const bool here = data.device().type() == kOffload;
  if (here && Context::ownsBlock(data)) return *static_cast<Block*>(data.get_context());
  // PyTorch wraps a storage's address anew where it writes one to a file, and where it slices one.
  if (Block* block = here ? Context::get().blockAt(data.get()) : nullptr;
      block != nullptr && storage.nbytes() <= block->bytes) {
    return *block;
  }
  TORCH_CHECK(
      !here, "offload: a storage of ", storage.nbytes(),
      " bytes begins within the memory of another one; make a tensor over all of that one, and slice the tensor.");
  TORCH_CHECK(
      false, "offload: a storage of ", storage.nbytes(), " bytes on ", data.device(),
      " is not memory of the offload device; move the tensor with .to(\"offload\").");
}

} // namespace offload
