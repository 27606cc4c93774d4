#pragma once
// Settings: a program's options from one table of keys: a YAML or JSON file, overrides on the
// command line, a page of help, and the file of what holds in the end.
//
//   std::int64_t width = 64;
//   bool dropout = false;
//   Settings settings;
//   settings.add("model.width", width, "Features of a hidden layer.");
//   settings.add("model.dropout", dropout, "Leaves out activations at random.");
//   // program --config run.yaml --set model.width=128
//   const std::vector<std::string> others = settings.read_arguments(argc, argv);
//
// with run.yaml
//
//   model:
//     width: 96
//     dropout: true
//
// What is wrong is told with its place and what was meant: "run.yaml:2: there is no key
// 'model.widht'; the nearest is 'model.width'". For the options of a trainer:
// tessera/train/run_settings.h.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/pinned.h"
#include "tessera/config/errors.h"

namespace tessera {

/// Names with whole numbers, in their order: {data: 2, domain: 4}, or as text "data=2,domain=4".
using NamedNumbers = std::vector<std::pair<std::string, int>>;
/// Names with texts: {"*.up": column, "*.down": row}.
using NamedTexts = std::vector<std::pair<std::string, std::string>>;

class Settings : Pinned {
 public:
  /// A key that sets `target`, which holds its default until then and must stay as long as this.
  /// Keys have a dot between levels. Durations are written with their unit ("20min"), and numbers
  /// without one are milliseconds. Throws InvalidArgument for a key that is there already, or that
  /// another one lies within.
  template <class T>
  void add(const std::string& key, T& target, const std::string& help) {
    add_setting({key, help, &target, {}});
  }
  /// One of several names, each of which stands for a value.
  template <class E>
  void add_choice(const std::string& key, E& target, std::vector<std::pair<std::string, E>> names,
                  const std::string& help) {
    Choice choice;
    for (const auto& [name, value] : names) choice.names.push_back(name);
    choice.set = [&target, names](std::size_t i) { target = names[i].second; };
    choice.get = [&target, names]() {
      for (std::size_t i = 0; i < names.size(); ++i)
        if (names[i].second == target) return i;
      return names.size();
    };
    add_setting({key, help, nullptr, std::move(choice)});
  }

  /// Reads a file that ends in .yaml, .yml or .json; what it does not name stays as it is. Throws
  /// ConfigFileError with file and line (JSON: the key) for what cannot be read, unknown keys, and
  /// values of another kind or out of range; what stands before that has been set then.
  void read_file(const std::string& path);
  /// The same of a text in YAML; errors begin with `source`.
  void read_text(const std::string& text, const std::string& source);
  /// Sets one key: "model.width=128".
  void set(const std::string& assignment);
  /// Takes `--config FILE` and `--set KEY=VALUE`, each as often as wished (overrides come after all
  /// files), and returns what is left. Throws InvalidArgument where the value is missing.
  std::vector<std::string> read_arguments(int argc, const char* const* argv);

  /// All keys with the values they have now, as a YAML text that gives the same when it is read.
  /// Throws InvalidArgument for a text that YAML cannot hold, as one that is no valid UTF-8.
  std::string resolved() const;
  /// The keys as a table in Markdown: key, kind, value now, help.
  std::string table() const;

 private:
  struct Choice {
    std::vector<std::string> names;
    std::function<void(std::size_t)> set;
    std::function<std::size_t()> get;
  };
  using Target = std::variant<std::nullptr_t, bool*, int*, std::int64_t*, double*, std::string*,
                              std::chrono::milliseconds*, NamedNumbers*, NamedTexts*>;
  struct Setting {
    std::string key, help;
    Target target;
    Choice choice;
  };
  struct Reader;
  void add_setting(Setting setting);
  std::vector<Setting> settings_;
};

}  // namespace tessera
