// The slots through which a loaded library calls functions of other libraries.
//
// Note [Import slots]
// A call across libraries, and within one library a call to a function that it exports, goes through a word of data that the
// dynamic linker fills with the function's address (R_*_JUMP_SLOT, R_*_GLOB_DAT). Writing another address into that word
// redirects the calls of that library and of no other; code is never touched.
//   - A library has at most one slot of each kind for a symbol. A function that the compiler inlined, or bound within its own
//     library (-Bsymbolic, protected visibility), is called through none: who redirects has to test that it had an effect.
//   - Addresses kept elsewhere (function pointers in tables, dlsym) stay what they were.
//   - A slot inside PT_GNU_RELRO is read-only once its library is loaded. Its page is made writable for the one store and
//     read-only again. Slots outside stay writable for good, and where the library was loaded with RTLD_LAZY (Python doesn't) hold
//     the dynamic linker's resolver until the first call: it writes the function's address, so whoever redirects must not call
//     what was in the slot, but the function by a slot of his own library.
//   - The store is one aligned word, so a thread that calls through the slot meanwhile takes the old function or the new one.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace offload::compat {

struct ImportSlot {
  void** address;
  std::string library; ///< base name of the file
  bool readOnly;
};

/// The slots for the (mangled) `symbol` in those loaded libraries whose base name `wanted` accepts.
std::vector<ImportSlot> findImportSlots(std::string_view symbol, const std::function<bool(std::string_view)>& wanted);

/// Makes calls through `slot` reach `function`. Throws std::system_error where the page can't be made writable.
void redirect(const ImportSlot& slot, void* function);

} // namespace offload::compat
