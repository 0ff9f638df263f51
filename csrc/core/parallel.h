// Work that several threads share.
#pragma once

#include <cstddef>
#include <functional>

namespace offload {

/// Calls `work` on this thread and at the same time on up to `threads - 1` others; returns when all calls have. `work` takes pieces until
/// none is left, so that it does not matter how many threads come, or how late; it must not throw. Where the system has no threads
/// to give, this one does everything. Threads may call this at once, and a forked child may.
///
/// The other threads stay for a second after their last work: to start one takes as long as to copy 250 KiB, and much longer while
/// others take page faults in the same address space.
void inParallel(std::size_t threads, const std::function<void()>& work);

} // namespace offload
