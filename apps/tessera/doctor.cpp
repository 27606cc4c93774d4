#include <errno.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::app {

Command add_doctor(CLI::App& program) {
  CLI::App* parser = program.add_subcommand("doctor", "Say what this machine and this launch offer, and what will not work (--check tries it)");
  parser->set_help_flag();  // Its own --help goes to the program that does the work.
  parser->prefix_command();
  return {parser, [parser]() -> int {
            const auto beside = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "tessera-doctor";
            const std::string path = beside.string();
            std::vector<std::string> words{path};
            for (const auto& word : parser->remaining()) words.push_back(word);
            std::vector<char*> arguments;
            for (auto& word : words) arguments.push_back(word.data());
            arguments.push_back(nullptr);
            execv(path.c_str(), arguments.data());
            throw NotAvailable(
                concat("cannot start ", path, ": ", std::strerror(errno), "; build the target tessera_doctor, or install it beside tessera"));
          }};
}

}  // namespace tessera::app
