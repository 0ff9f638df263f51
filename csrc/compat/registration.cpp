#include "compat/registration.h"

#include <memory>
#include <vector>

namespace offload::compat {
namespace {

struct Block {
  torch::Library::Kind kind;
  const char* space;
  std::optional<c10::DispatchKey> key;
  Registration::Fill fill;
  const char* file;
  int line;
};

// Made by the first of the list's entries, whatever the order of the object files.
std::vector<Block>& blocks() {
  static auto* instance = new std::vector<Block>();
  return *instance;
}

std::vector<void (*)()>& runs() {
  static auto* instance = new std::vector<void (*)()>();
  return *instance;
}

} // namespace

Registration::Registration(
    torch::Library::Kind kind, const char* space, std::optional<c10::DispatchKey> key, Fill fill, const char* file, int line) {
  blocks().push_back({kind, space, key, fill, file, line});
}

Registration::Registration(void (*run)()) {
  runs().push_back(run);
}

void registerAll() {
  static auto* registered = new std::vector<std::unique_ptr<torch::Library>>(); // as long as the dispatcher
  std::vector<std::unique_ptr<torch::Library>> made;
  for (const Block& block : blocks()) {
    made.push_back(std::make_unique<torch::Library>(
        block.kind, block.space, block.key, block.file, static_cast<std::uint32_t>(block.line)));
    block.fill(*made.back());
  }
  *registered = std::move(made);
  for (auto* run : runs()) run();
}

} // namespace offload::compat
