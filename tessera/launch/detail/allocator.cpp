#include "tessera/launch/detail/allocator.h"

#include <elf.h>
#include <features.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::detail {
namespace {

// glibc's malloc: everything from the heap, nothing of it back to the system before the end.
// top_pad: the heap grows by 16 MiB, and not by a request at a time.
constexpr const char* kKeep =
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:"
    "glibc.malloc.top_pad=16777216";

std::string value_of(const std::vector<std::string>& environment, const std::string& name) {
  for (const std::string& variable : environment) {
    if (variable.rfind(name + "=", 0) == 0) return variable.substr(name.size() + 1);
  }
  return "";
}

// The start of an ELF file: its class, its byte order, its type and the machine it is for.
std::array<unsigned char, 20> elf_start(const std::string& path) {
  std::array<unsigned char, 20> start{};
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(start.data()), start.size());
  if (!file || std::memcmp(start.data(), ELFMAG, SELFMAG) != 0) return {};
  return start;
}

// The dynamic linker only warns of a file that it cannot load, and starts the program without it.
std::string loadable(const std::string& path) {
  std::error_code error;
  const std::string found = std::filesystem::canonical(path, error);
  if (error) throw InvalidArgument(concat("--allocator ", path, ": ", error.message()));
  const auto library = elf_start(found), own = elf_start("/proc/self/exe");
  constexpr std::size_t kType = 16, kMachine = 18;
  const bool same = library[0] != 0 && library[EI_CLASS] == own[EI_CLASS] &&
                    library[EI_DATA] == own[EI_DATA] && library[kMachine] == own[kMachine] &&
                    library[kMachine + 1] == own[kMachine + 1];
  if (!same || library[kType + (own[EI_DATA] == ELFDATA2MSB ? 1 : 0)] != ET_DYN)
    throw InvalidArgument(
        concat("--allocator ", path, " is not a shared library for programs of this machine"));
  if (found.find_first_of(" :") != std::string::npos)
    throw InvalidArgument(concat("--allocator ", found,
                                 ": the dynamic linker takes no path with a blank or a colon"));
  return found;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> allocator_variables(
    const std::string& choice, const std::vector<std::string>& inherited) {
  if (choice == "system") return {};
  if (choice == "keep") {
#ifdef __GLIBC__
    // Of two values of one setting the later counts: what the user has set stays.
    const std::string theirs = value_of(inherited, "GLIBC_TUNABLES");
    return {{"GLIBC_TUNABLES", concat(kKeep, theirs.empty() ? "" : ":", theirs)}};
#else
    throw NotAvailable(
        "--allocator keep sets glibc's malloc, and this C library is another one; give the path "
        "of an allocator's shared library");
#endif
  }
  if (choice.find('/') == std::string::npos)
    throw InvalidArgument(concat("--allocator ", choice,
                                 ": give system, keep, or the path of a shared library, with a /"));
  const std::string theirs = value_of(inherited, "LD_PRELOAD");
  return {{"LD_PRELOAD", concat(loadable(choice), theirs.empty() ? "" : ":", theirs)}};
}

}  // namespace tessera::detail
