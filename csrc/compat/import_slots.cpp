#include "compat/import_slots.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <span>
#include <system_error>

namespace offload::compat {
namespace {

#if defined(__x86_64__)
constexpr auto kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr auto kGlobDat = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr auto kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr auto kGlobDat = R_AARCH64_GLOB_DAT;
#else
#error "import slots are known for x86-64 and aarch64 Linux only"
#endif

using Relocations = std::span<const ElfW(Rela)>;

std::uintptr_t pageBegin(std::uintptr_t address) {
  return address & ~(static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
}

std::string_view baseName(std::string_view path) {
  return path.substr(path.find_last_of('/') + 1);
}

/// What the program headers and the dynamic section of one loaded library say.
struct Library {
  explicit Library(const dl_phdr_info& info) : base(info.dlpi_addr) {
    const ElfW(Dyn)* entry = nullptr;
    for (const auto& header : std::span(info.dlpi_phdr, info.dlpi_phnum)) {
      if (header.p_type == PT_DYNAMIC) entry = reinterpret_cast<const ElfW(Dyn)*>(base + header.p_vaddr);
      if (header.p_type == PT_GNU_RELRO) {
        // The dynamic linker protects whole pages: a last page that is shared with writable data stays writable.
        readOnlyBegin = pageBegin(base + header.p_vaddr);
        readOnlyEnd = pageBegin(base + header.p_vaddr + header.p_memsz);
      }
    }
    if (!entry) return;
    // glibc has already turned these file addresses into addresses in memory.
    const ElfW(Rela)* calls = nullptr, *others = nullptr;
    std::size_t callBytes = 0, otherBytes = 0;
    for (; entry->d_tag != DT_NULL; ++entry) {
      const auto value = entry->d_un.d_ptr;
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols = reinterpret_cast<const ElfW(Sym)*>(value);
          break;
        case DT_STRTAB:
          strings = reinterpret_cast<const char*>(value);
          break;
        case DT_JMPREL:
          calls = reinterpret_cast<const ElfW(Rela)*>(value);
          break;
        case DT_PLTRELSZ:
          callBytes = value;
          break;
        case DT_RELA:
          others = reinterpret_cast<const ElfW(Rela)*>(value);
          break;
        case DT_RELASZ:
          otherBytes = value;
          break;
        default:
          break;
      }
    }
    if (!symbols || !strings) return;
    if (calls) callSlots = Relocations(calls, callBytes / sizeof(ElfW(Rela)));
    if (others) otherSlots = Relocations(others, otherBytes / sizeof(ElfW(Rela)));
  }

  bool imports(const ElfW(Rela) & relocation, std::string_view symbol) const {
    const auto type = ELF64_R_TYPE(relocation.r_info);
    return (type == kJumpSlot || type == kGlobDat) && symbol == strings + symbols[ELF64_R_SYM(relocation.r_info)].st_name;
  }

  std::uintptr_t base;
  std::uintptr_t readOnlyBegin = 0, readOnlyEnd = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  Relocations callSlots, otherSlots;
};

struct Search {
  std::string_view symbol;
  const std::function<bool(std::string_view)>& wanted;
  std::vector<ImportSlot> found;
};

int searchLibrary(dl_phdr_info* info, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const auto name = baseName(info->dlpi_name ? info->dlpi_name : "");
  if (!search.wanted(name)) return 0;
  const Library library(*info);
  for (const auto relocations : {library.callSlots, library.otherSlots}) {
    for (const auto& relocation : relocations) {
      if (!library.imports(relocation, search.symbol)) continue;
      const auto address = library.base + relocation.r_offset;
      const bool readOnly = address >= library.readOnlyBegin && address < library.readOnlyEnd;
      search.found.push_back({reinterpret_cast<void**>(address), std::string(name), readOnly});
    }
  }
  return 0;
}

void protect(const ImportSlot& slot, int protection) {
  const auto page = pageBegin(reinterpret_cast<std::uintptr_t>(slot.address));
  if (mprotect(reinterpret_cast<void*>(page), static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), protection) != 0)
    throw std::system_error(errno, std::generic_category(), "mprotect of an import slot of " + slot.library);
}

} // namespace

std::vector<ImportSlot> findImportSlots(std::string_view symbol, const std::function<bool(std::string_view)>& wanted) {
  Search search{symbol, wanted, {}};
  dl_iterate_phdr(&searchLibrary, &search);
  return std::move(search.found);
}

void redirect(const ImportSlot& slot, void* function) {
  if (slot.readOnly) protect(slot, PROT_READ | PROT_WRITE);
  std::atomic_ref<void*>(*slot.address).store(function, std::memory_order_release);
  if (slot.readOnly) protect(slot, PROT_READ);
}

} // namespace offload::compat
