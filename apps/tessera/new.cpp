// `tessera new`: a project that configures and trains, out of the files of skeleton/.

#include <cctype>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "commands.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera_skeleton.h"

namespace tessera::app {
namespace {

struct NewOptions {
  std::string folder;
  bool cmake = false, python = false;
};

using Files = std::vector<std::pair<const char*, const char*>>;

// The name of the project is the folder's, which CMake must take for one as well.
std::string project_name(const std::string& folder) {
  std::filesystem::path path(folder);
  if (!path.has_filename()) path = path.parent_path();  // "here/"
  const std::string name = path.filename().string();
  bool right = !name.empty() && std::isalpha(static_cast<unsigned char>(name[0]));
  for (const char c : name)
    right = right && (std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-');
  if (!right)
    throw InvalidArgument("new: '", name,
                          "' is no name of a project: it begins with a letter, and has "
                          "letters, digits, _ and - alone");
  return name;
}

std::string with_name(std::string text, const std::string& name) {
  const std::string place = "PROJECT_NAME";
  for (std::size_t at = text.find(place); at != text.npos; at = text.find(place, at + name.size()))
    text.replace(at, place.size(), name);
  return text;
}

int make_project(const NewOptions& options) {
  const std::string name = project_name(options.folder);
  std::error_code problem;
  if (std::filesystem::exists(options.folder, problem))
    throw InvalidArgument("new: ", options.folder, " is there already: nothing is written");
  std::filesystem::create_directories(options.folder, problem);
  if (problem) throw FileError(options.folder, ": cannot be made: ", problem.message());
  const Files files = options.python
                          ? Files{{"README.md", kPythonReadme}, {"train.py", kPythonTrain}}
                          : Files{{"CMakeLists.txt", kCmakeLists},
                                  {"README.md", kCmakeReadme},
                                  {"run.yaml", kCmakeRun},
                                  {"train.cpp", kCmakeTrain}};
  for (const auto& [file, text] : files) {
    const std::string path = concat(options.folder, "/", file);
    std::ofstream out(path, std::ios::binary);
    out << with_name(text, name);
    out.close();
    if (!out) throw FileError(path, ": cannot be written");
  }
  std::cout << "a project is in " << options.folder << "; its README.md has the commands\n";
  return 0;
}

}  // namespace

Command add_new(CLI::App& program) {
  const auto options = std::make_shared<NewOptions>();
  CLI::App* parser = program.add_subcommand("new", "Make a project that configures and trains");
  parser->add_option("folder", options->folder, "Its folder, which gives it its name")->required();
  CLI::Option* cmake = parser->add_flag("--cmake", options->cmake, "In C++, by CMake (default)");
  parser->add_flag("--python", options->python, "In Python")->excludes(cmake);
  return {parser, [options] { return make_project(*options); }};
}

}  // namespace tessera::app
