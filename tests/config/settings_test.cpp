// Settings: one table of keys, read from files, texts and the command line, and written again.

#include "tessera/config/settings.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "../support/folder.h"

namespace tessera {
namespace {

using testing::Folder;
using testing::put;
using testing::thrown;

enum class Colour { red, green };

struct Options {
  bool dropout = false;
  int depth = 3;
  std::int64_t steps = -1;
  double rate = 0.1, limit = std::numeric_limits<double>::infinity();
  std::string name = "net";
  std::chrono::milliseconds every{0};
  NamedNumbers mesh;
  NamedTexts plan;
  Colour colour = Colour::red;

  void add_to(Settings& settings) {
    settings.add("name", name, "Of the run.");
    settings.add("model.dropout", dropout, "Leaves out activations.");
    settings.add("model.depth", depth, "Layers.");
    settings.add_choice(
        "model.colour", colour,
        std::vector<std::pair<std::string, Colour>>{{"red", Colour::red}, {"green", Colour::green}},
        "Any.");
    settings.add("run.steps", steps, "Below 0: no limit.");
    settings.add("run.rate", rate, "Of learning.");
    settings.add("run.limit", limit, "Of what is clipped.");
    settings.add("run.every", every, "A time.");
    settings.add("mesh", mesh, "Axes.");
    settings.add("plan", plan, "Layers.");
  }
};

constexpr const char* kFile =
    "# a run\n"
    "name: 7\n"
    "model: {dropout: true, depth: -4, colour: green}\n"
    "run:\n"
    "  steps: 9000000000\n"
    "  rate: 1e-3\n"
    "  every: 20min\n"
    "mesh: {data: 2, domain: 4}\n"
    "plan:\n"
    "  \"*.up\": column\n"
    "  \"*.down\": row(8)\n";

std::string refusal(const std::string& text) {
  Options options;
  Settings settings;
  options.add_to(settings);
  return thrown<ConfigFileError>([&] { settings.read_text(text, "run.yaml"); });
}

TEST(Settings, AFileAndOverridesInTheirOrder) {
  const Folder folder;
  put(folder / "run.yaml", kFile);
  put(folder / "more.json", R"({"run": {"steps": 5}, "model": {"depth": null}})");
  Options options;
  Settings settings;
  options.add_to(settings);
  const std::string yaml = folder / "run.yaml", json = folder / "more.json";
  const char* arguments[] = {"program", "--set", "run.rate=0.5",    "--config", yaml.c_str(),
                             "left",    "--set", "mesh=data=8,b=1", "--config", json.c_str()};
  EXPECT_EQ(settings.read_arguments(10, arguments), std::vector<std::string>{"left"});
  EXPECT_EQ(options.name, "7");
  EXPECT_TRUE(options.dropout);
  EXPECT_EQ(options.depth, -4) << "null leaves it as it was";
  EXPECT_EQ(options.colour, Colour::green);
  EXPECT_EQ(options.steps, 5) << "the later file";
  EXPECT_EQ(options.rate, 0.5) << "an override counts wherever it stands";
  EXPECT_EQ(options.every, std::chrono::minutes(20));
  EXPECT_EQ(options.mesh, (NamedNumbers{{"data", 8}, {"b", 1}}));
  EXPECT_EQ(options.plan, (NamedTexts{{"*.up", "column"}, {"*.down", "row(8)"}}));
  settings.set("run.every=0");
  EXPECT_EQ(options.every.count(), 0);
  settings.set("mesh={}");
  EXPECT_TRUE(options.mesh.empty());
  EXPECT_THROW(settings.set("run.steps"), InvalidArgument);
  EXPECT_THROW(settings.read_arguments(2, arguments), InvalidArgument) << "--set without a value";
}

TEST(Settings, WhatIsWrongIsToldWithItsLineAndTheNearestKey) {
  EXPECT_EQ(refusal("run:\n  stesp: 3\n"),
            "run.yaml:2: there is no key 'run.stesp'; the nearest is 'run.steps'");
  EXPECT_EQ(refusal("name: a\nmodle:\n  depth: 3\n"),
            "run.yaml:2: there is no key 'modle'; the nearest is 'model'");
  EXPECT_EQ(refusal("\nmodel:\n  depth: 3.5\n"),
            "run.yaml:3: model.depth must be a whole number, but is 3.5");
  EXPECT_EQ(refusal("model:\n  depth: 3000000000"),
            "run.yaml:2: model.depth must be a whole number, but is 3000000000");
  EXPECT_EQ(refusal("model:\n  dropout: maybe"),
            "run.yaml:2: model.dropout must be true or false, but is \"maybe\"");
  EXPECT_EQ(refusal("model:\n  colour: blue"),
            "run.yaml:2: model.colour must be one of [red, green], but is \"blue\"");
  EXPECT_EQ(refusal("run:\n  rate: fast"),
            "run.yaml:2: run.rate must be a number, but is \"fast\"");
  EXPECT_EQ(refusal("run:\n  every: [1]"),
            "run.yaml:2: run.every must be a duration such as \"20min\", but is [1]");
  EXPECT_EQ(refusal("run:\n  every: -3"),
            "run.yaml:2: run.every must be a duration up to 10 years, but is -3");
  EXPECT_NE(
      refusal("run:\n  every: 3 weeks").find("run.yaml:2: run.every: '3 weeks' has the unknown"),
      std::string::npos);
  EXPECT_EQ(refusal("model: 3"),
            "run.yaml:1: model must be a section with keys of its own, but is 3");
  EXPECT_EQ(refusal("name: {a: 1}"), "run.yaml:1: name must be a text, but is {\"a\":1}");
  EXPECT_EQ(refusal("\nmesh: {data: x}"),
            "run.yaml:2: mesh.data must be a whole number, but is \"x\"");
  EXPECT_EQ(refusal("mesh: data"),
            "run.yaml:1: mesh must be names with values, as in a=1,b=2, but is \"data\"");
  EXPECT_EQ(refusal("mesh: 3"), "run.yaml:1: mesh must be names with values, but is 3");
  EXPECT_EQ(refusal("plan: {a: 1}"), "run.yaml:1: plan.a must be a text, but is 1");
  EXPECT_EQ(refusal("- a"), "run.yaml: the document must be sections with keys, but is [\"a\"]");
  EXPECT_NE(refusal("a: [").find("run.yaml:"), std::string::npos);
  Options options;
  Settings settings;
  options.add_to(settings);
  settings.read_text("# nothing is set\n", "run.yaml");
  EXPECT_EQ(thrown<ConfigFileError>([&] { settings.set("run.step=1"); }),
            "--set run.step=1: there is no key 'run.step'; the nearest is 'run.steps'");
  EXPECT_THROW(settings.read_file("absent.yaml"), ConfigFileError);
  for (const std::string key : {"run.rate", "run", "run.rate.more", ""})
    EXPECT_THROW(settings.add(key, options.rate, ""), InvalidArgument) << key;
}

TEST(Settings, TheResolvedTextGivesTheSame) {
  Options options, again;
  Settings settings, others;
  options.add_to(settings);
  again.add_to(others);
  settings.read_text(kFile, "run.yaml");
  const std::string text = settings.resolved();
  others.read_text(text, "resolved.yaml");
  EXPECT_EQ(others.resolved(), text);
  EXPECT_EQ(again.steps, 9000000000);
  EXPECT_EQ(again.every, std::chrono::minutes(20));
  EXPECT_EQ(again.mesh, options.mesh);
  EXPECT_EQ(again.plan, options.plan);
  EXPECT_EQ(again.colour, Colour::green);
  EXPECT_TRUE(std::isinf(again.limit)) << "no number of a file: it stays the default";
  EXPECT_EQ(again.name, "7") << "a text";
  const std::string table = settings.table();
  EXPECT_NE(table.find("| `model.colour` | `red`, `green` | `green` | Any. |\n"), std::string::npos)
      << table;
  EXPECT_NE(table.find("| `run.limit` | number |  | Of what is clipped. |\n"), std::string::npos);
}

}  // namespace
}  // namespace tessera
