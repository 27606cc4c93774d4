#include "beside.h"

#include <errno.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::app {

void become(const std::string& name, const std::string& target,
            const std::vector<std::string>& arguments) {
  const std::string path =
      (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
  std::vector<std::string> words{path};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execv(path.c_str(), pointers.data());
  throw NotAvailable("cannot start ", path, ": ", std::strerror(errno), "; build the target ",
                     target, ", or install it beside tessera");
}

}  // namespace tessera::app
