#include "core/link/sim_link.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.h"

namespace offload {

thread_local const SimLink::RunningTask* SimLink::running_ = nullptr;

SimLink::SimLink(SimOptions options)
    : options_(options),
      memory_(options.devices, options.deviceBytes, options.foreignDeviceMemory),
      races_(options.detectRaces),
      checks_(options.failFast, memory_, races_),
      streams_(1),
      schedule_(options.seed, options.bias, options.maxPending) {}

SimLink::~SimLink() {
  Lock lock(mutex_);
  if (checks_.reports().empty()) {
    schedule_.runAll(lock);
  }
}

Stream SimLink::createStream(int device) {
  const Lock lock = enter();
  actorOf({device, nullptr});
  const Actor actor = races_.addActor();
  schedule_.addStream();
  streams_.push_back({device, true});
  return {device, reinterpret_cast<void*>(actor)};
}

void SimLink::destroyStream(Stream stream) noexcept {
  // What is enqueued there still runs.
  enterQuietly([&](Lock&) { streams_[actorOf(stream)].open = false; });
}

Event SimLink::createEvent(int device) {
  const Lock lock = enter();
  actorOf({device, nullptr});
  events_[++lastEvent_] = {device, nullptr};
  return reinterpret_cast<Event>(lastEvent_);
}

void SimLink::destroyEvent(Event event) noexcept {
  enterQuietly([&](Lock&) {
    eventOf(event);
    events_.erase(reinterpret_cast<std::uintptr_t>(event));
  });
}

void SimLink::record(Event event, Stream stream) {
  Lock lock = enter();
  const Actor actor = actorOf(stream);
  SimEvent& target = eventOf(event);
  if (target.device != stream.device) {
    checks_.refuse("an event of device " + std::to_string(target.device) + " was recorded on a stream of another device");
  }
  const ActionPtr action = races_.act(actor, "record");
  const auto recording = std::make_shared<Recording>(Recording{actor, action->clock, false});
  target.latest = recording;
  enqueue(lock, {action, [this, recording] {
                   recording->happened = true;
                   recording->when = schedule_.ran();
                 }});
}

void SimLink::wait(Stream stream, Event event) {
  Lock lock = enter();
  const Actor actor = actorOf(stream);
  const RecordingPtr recording = eventOf(event).latest;
  if (recording == nullptr) {
    return;
  }
  if (actor == hostActor) {
    schedule_.runUntil(lock, recording);
  }
  races_.join(actor, recording->clock);
  if (!recording->happened) {
    enqueue(lock, {races_.act(actor, "wait"), {}, recording});
  }
  checks_.throwKept();
}

bool SimLink::query(Event event) {
  Lock lock = enter();
  const RecordingPtr recording = eventOf(event).latest;
  if (recording == nullptr) {
    return true;
  }
  // Some progress now and then, or a loop that polls would never end.
  for (std::uint64_t steps = schedule_.random().below(3); steps > 0 && !recording->happened; --steps) {
    schedule_.step(lock);
  }
  const bool happened = recording->happened;
  if (happened) {
    races_.join(hostActor, recording->clock);
  }
  checks_.throwKept();
  return happened;
}

void SimLink::synchronize(Event event) {
  Lock lock = enter();
  const RecordingPtr recording = eventOf(event).latest;
  if (recording != nullptr) {
    schedule_.runUntil(lock, recording);
    races_.join(hostActor, recording->clock);
  }
  checks_.throwKept();
}

std::optional<double> SimLink::elapsed(int device, Event from, Event to) {
  const Lock lock = enter();
  for (Event event : {from, to}) {
    const SimEvent& timer = eventOf(event);
    if (timer.device != device || timer.latest == nullptr) {
      checks_.refuse("a timer was read that was not recorded on device " + std::to_string(device));
    }
    if (!timer.latest->happened) return std::nullopt;
  }
  return static_cast<double>(eventOf(to).latest->when - eventOf(from).latest->when) / 1e6;
}

void SimLink::copyToDevice(void* device, const void* host, std::size_t bytes, Stream stream) {
  Lock lock = enter();
  const ActionPtr action = races_.act(actorOf(stream), "copy to device");
  if (checks_.admit(action, {{{host, bytes}, Access::Read, false}, {{device, bytes}, Access::Write, true}})) {
    enqueue(lock, {action, [=] { std::memcpy(device, host, bytes); }});
  }
}

void SimLink::copyAllToDevice(std::span<const Copy> copies, Stream stream) {
  Lock lock = enter();
  const Actor actor = actorOf(stream);
  if (actor == hostActor) {
    checks_.refuse("copies were enqueued at once on the default stream of device " + std::to_string(stream.device));
  }
  std::vector<Operation> operations;
  for (const ActionPtr& action : races_.actAtOnce(actor, "copy to device", copies.size())) {
    const Copy copy = copies[operations.size()];
    const std::vector<SimAccess> accesses{
        {{copy.from, copy.bytes}, Access::Read, false}, {{copy.to, copy.bytes}, Access::Write, true}};
    const bool admitted = checks_.admit(action, accesses);
    operations.push_back({action, [=] {
                            if (admitted) std::memcpy(copy.to, copy.from, copy.bytes);
                          }});
  }
  while (!operations.empty()) {
    std::swap(operations[schedule_.random().below(operations.size())], operations.back());
    enqueue(lock, std::move(operations.back()));
    operations.pop_back();
  }
}

void SimLink::copyToHost(void* host, const void* device, std::size_t bytes, Stream stream) {
  Lock lock = enter();
  const ActionPtr action = races_.act(actorOf(stream), "copy to host");
  if (checks_.admit(action, {{{device, bytes}, Access::Read, true}, {{host, bytes}, Access::Write, false}})) {
    enqueue(lock, {action, [=] { std::memcpy(host, device, bytes); }});
  }
}

void SimLink::fill(void* device, unsigned char value, std::size_t bytes, Stream stream) {
  Lock lock = enter();
  const ActionPtr action = races_.act(actorOf(stream), "fill");
  if (checks_.admit(action, {{{device, bytes}, Access::Write, true}})) {
    enqueue(lock, {action, [=] { std::memset(device, value, bytes); }});
  }
}

void SimLink::launchHost(HostTask task, Stream stream) {
  Lock lock = enter();
  const ActionPtr action = races_.act(actorOf(stream), "host task");
  std::vector<SimAccess> accesses;
  for (const HostUse& use : task.uses) {
    accesses.push_back({{use.data, use.bytes}, use.access, false});
  }
  if (checks_.admit(action, accesses)) {
    enqueueUsersCode(lock, action, std::move(task.run));
  }
}

void SimLink::launch(
    Stream stream, std::function<void()> body, const std::vector<MemoryRange>& reads, const std::vector<MemoryRange>& writes) {
  Lock lock = enter();
  const ActionPtr action = races_.act(actorOf(stream), "kernel");
  std::vector<SimAccess> accesses;
  for (const MemoryRange& range : reads) {
    accesses.push_back({range, Access::Read, memory_.find(range.data) != nullptr});
  }
  for (const MemoryRange& range : writes) {
    accesses.push_back({range, Access::Write, memory_.find(range.data) != nullptr});
  }
  if (checks_.admit(action, accesses)) {
    enqueueUsersCode(lock, action, std::move(body));
  }
}

bool SimLink::registerHost(void* /*host*/, std::size_t bytes) {
  const Lock lock = enter();
  if (bytes > options_.registrationLimit - registered_) {
    return false;
  }
  registered_ += bytes;
  return true;
}

void SimLink::unregisterHost(void* host, std::size_t bytes) noexcept {
  enterQuietly([&](Lock&) {
    registered_ -= std::min(bytes, registered_);
    // The memory is about to go back to the system: as good as a write.
    checks_.admit(races_.act(hostActor, "unregistration"), {{{host, bytes}, Access::Write, false}});
  });
}

void* SimLink::allocate(std::size_t bytes, Stream stream) {
  Lock lock = enter();
  const Actor actor = actorOf(stream);
  SimMemory::Region& region = memory_.allocate(bytes, stream.device, actor, schedule_.oldestPending(), schedule_.random());
  const ActionPtr action = races_.act(actor, "allocation");
  for (const MemoryRange& returned : memory_.takeReturned()) {
    races_.forget(returned);
  }
  races_.forget(region.whole());
  races_.remember(action, {region.data, bytes}, Access::Write);
  void* const data = region.data;
  enqueue(lock, {action, [this, &region, bytes] { memory_.poisonFresh(region, bytes); }});
  return data;
}

MemoryInfo SimLink::memoryInfo(int device) {
  const Lock lock = enter();
  return {memory_.bytesFree(device), options_.deviceBytes};
}

void SimLink::free(void* device, Stream stream) noexcept {
  enterQuietly([&](Lock& lock) {
    const Actor actor = actorOf(stream);
    const ActionPtr action = races_.act(actor, "free");
    SimMemory::Region* region = memory_.find(device);
    if (region == nullptr || region->data != device || !region->live) {
      checks_.refuse(SimChecks::describe(*action) + " frees what is not allocated: " + memory_.describe({device, 0}));
    }
    if (region->actor != actor) {
      checks_.refuse(
          SimChecks::describe(*action) + " frees " + memory_.describe(region->whole()) +
          ", which was allocated on another stream");
    }
    checks_.admit(action, {{{region->data, region->bytes}, Access::Write, true}});
    memory_.free(*region, action->sequence);
    auto poison = [this, action, region, bytes = region->bytes, number = region->number] {
      if (!memory_.poisonFreed(*region, bytes, number)) {
        checks_.reportLater(
            "something wrote out of the bounds of allocation " + std::to_string(number) + " of " + std::to_string(bytes) +
            " bytes; " + SimChecks::describe(*action) + " found its guard bytes changed");
      }
    };
    enqueue(lock, {action, std::move(poison)});
  });
}

void SimLink::hostAccess(const void* host, std::size_t bytes, Access access) {
  const Lock lock = enter();
  checks_.admit(races_.act(hostActor, "access"), {{{host, bytes}, access, memory_.find(host) != nullptr}});
}

void SimLink::deviceAccess(const void* host, std::size_t bytes, Access access, Stream stream) noexcept {
  enterQuietly([&](Lock&) {
    checks_.admit(races_.act(actorOf(stream), "kernel"), {{{host, bytes}, access, memory_.find(host) != nullptr}});
  });
}

void SimLink::drain() {
  Lock lock = enter();
  schedule_.runAll(lock);
  for (Actor actor = hostActor; actor < streams_.size(); ++actor) {
    races_.join(hostActor, races_.clock(actor));
  }
  checks_.throwKept();
}

void SimLink::refuseInsideTask() {
  if (running_ != nullptr && running_->link == this) {
    checks_.refuse(SimChecks::describe(*running_->action) + " called the link");
  }
}

SimLink::Lock SimLink::enter() {
  Lock lock(mutex_);
  refuseInsideTask();
  checks_.throwKept();
  return lock;
}

/// For calls that can't throw: what they report is thrown by the next call that can.
template <class Body>
void SimLink::enterQuietly(Body body) noexcept {
  Lock lock(mutex_);
  try {
    refuseInsideTask();
    body(lock);
  } catch (const Error& error) {
    checks_.keep(error.what());
  }
}

Actor SimLink::actorOf(Stream stream) {
  const auto actor = reinterpret_cast<Actor>(stream.handle);
  if (stream.device < 0 || stream.device >= options_.devices) {
    checks_.refuse("there is no simulated device " + std::to_string(stream.device));
  }
  if (actor != hostActor && (actor >= streams_.size() || !streams_[actor].open || streams_[actor].device != stream.device)) {
    checks_.refuse("stream " + std::to_string(actor) + " is no living stream of device " + std::to_string(stream.device));
  }
  return actor;
}

SimLink::SimEvent& SimLink::eventOf(Event event) {
  const auto found = events_.find(reinterpret_cast<std::uintptr_t>(event));
  if (found == events_.end()) {
    checks_.refuse("event " + std::to_string(reinterpret_cast<std::uintptr_t>(event)) + " is no living event");
  }
  return found->second;
}

void SimLink::enqueue(Lock& lock, Operation operation) {
  if (operation.action->actor == hostActor) {
    schedule_.runNow(lock, std::move(operation));
  } else {
    schedule_.enqueue(lock, std::move(operation));
  }
}

void SimLink::enqueueUsersCode(Lock& lock, const ActionPtr& action, std::function<void()> body) {
  auto effect = [this, action, body = std::move(body)]() mutable {
    const RunningTask task{this, action};
    const RunningTask* const outer = std::exchange(running_, &task);
    std::string failure;
    try {
      body();
    } catch (const std::exception& error) {
      failure = error.what();
    } catch (...) {
      failure = "an unknown exception";
    }
    body = nullptr; // here, so that destructors that call the link are noticed as well
    running_ = outer;
    if (!failure.empty()) {
      const Lock relock(mutex_);
      checks_.reportLater(SimChecks::describe(*action) + " threw: " + failure);
    }
  };
  enqueue(lock, {action, std::move(effect), nullptr, true});
}

} // namespace offload
