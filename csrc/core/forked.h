// What a forked child leaves alone.
#pragma once

namespace offload {

/// From now on a child that is forked knows it: of a cache it has the memory, but not the threads, maybe mutexes that stay locked, and
/// no device. What lets go of a part of one there, a fetched tensor say, gives nothing back.
void noteForks();
/// Whether this process was forked since.
bool isForked() noexcept;

} // namespace offload
