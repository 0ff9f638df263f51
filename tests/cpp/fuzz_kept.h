// Programs that once found a mistake: see Note [Kept programs]. Each is as short as still finds it.
#pragma once

#include "fuzz_options.h"

namespace offload::core_test {

struct Kept {
  const char* mistake;
  Kind kind;
  std::uint64_t seed; // of the simulation's schedule, and of what a kind makes of it
  const char* program;
};

inline constexpr Kept kKept[] = {
    {"accesses to simulated device memory were remembered when the heap had handed it out as host memory", Kind::Any, 1078, R"(
system deviceBytes=1 secondDevice=1
addBlock
addBlock
changeBehindItsBack
fetch block=1
adopt another=1 stream=4
addBlock
store block=1 stream=5
fetch block=1 stream=1
addBlock bytes=407
drop
addBlock bytes=230
addBlock
forget
store block=4
addBlock bytes=1883
store block=3
adopt stream=3
adopt stream=3
forget block=1
fetch block=4 stream=5 whole=1
addBlock bytes=760 foreign=1
store block=5 whole=1
)"},
    {"memory that could not be adopted was lost", Kind::Failing, 21, R"(
system
addBlock
adopt fails=1
)"},
    {"a store that failed left its copy reading what the caller then freed", Kind::Failing, 4, R"(
system
addBlock
store call=7 fails=1
)"},
    {"an unpin that failed kept its Slot for good", Kind::Failing, 5, R"(
system deviceBytes=4
addBlock bytes=1703
fetch whole=1
drop fails=1
)"},
    {"a copy whose event was refused had no token", Kind::Failing, 0, R"(
system
addBlock
fetch call=4 fails=1 reads=1
)"},
    {"a Slot that was never listed outlived its Block, and pointed to it", Kind::Failing, 0, R"(
system
addBlock
fetch call=1 fails=1
)"},
    {"a write to shared memory that failed gave its source back before the producer was through with it", Kind::Shared, 89, R"(
system
addBlock
meet
adopt fails=1 stream=1
)"},
    {"the host allocator lost what was pending when a token threw", Kind::Failing, 103, R"(
system
addBlock
addBlock
fetch block=1
forget block=1
trim fails=1
)"},
    {"whoever waited for all copies did not wait for kernels that read host bytes in place", Kind::Any, 73, R"(
system chunk=4 deviceBytes=1 noBudget=1 ringBytes=2 secondDevice=1
addBlock bytes=78
readInPlace begin=74 more=2 stream=1
changeBehindItsBack whole=1
)"},
};

} // namespace offload::core_test
