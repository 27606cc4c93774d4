#include "report_log.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/internal/file.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"
#include "tessera/files/json.h"
#include "tessera/files/operations.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostBytes = std::size_t{1} << 30;

// What loggers write for a number that is not finite stays one.
std::optional<double> number_of(const std::string& text) {
  if (const auto value = parse_real(text)) return value;
  if (text == "nan" || text == "-nan" || text == "NaN" || text == "inf" || text == "-inf")
    return std::numeric_limits<double>::quiet_NaN();
  return std::nullopt;
}

// The fields of a line, without the quotes that some are in.
std::vector<std::string> fields_of(std::string_view line) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (c == '"' && quoted && i + 1 < line.size() && line[i + 1] == '"') {
      fields.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      fields.emplace_back();
    } else if (c != '\r') {
      fields.back() += c;
    }
  }
  return fields;
}

void add(RunLog& run, const std::string& name, double step, double seconds, double value) {
  Series& series = run.series[name];
  series.steps.push_back(step);
  series.seconds.push_back(seconds);
  series.values.push_back(value);
}

// Whole lines: the last one may still be written.
template <class Line>
void each_line(const std::string& text, Line&& call) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    if (end == std::string::npos) return;
    call(std::string_view(text).substr(at, end - at));
    at = end + 1;
  }
}

void read_csv(RunLog& run, const std::string& text) {
  std::vector<std::string> header;
  std::ptrdiff_t step = -1, seconds = -1, name = -1, value = -1;
  each_line(text, [&](std::string_view line) {
    const std::vector<std::string> fields = fields_of(line);
    const auto column = [&](const char* title) {
      const auto found = std::ranges::find(header, title);
      return found == header.end() ? std::ptrdiff_t{-1} : found - header.begin();
    };
    if (header.empty()) {
      header = fields;
      step = column("step"), seconds = column("seconds");
      name = column("name"), value = column("value");
      return;
    }
    if (step < 0 || fields.size() != header.size()) return;
    const auto at = [&](std::ptrdiff_t i) {
      return i < 0 ? std::nullopt : number_of(fields[static_cast<std::size_t>(i)]);
    };
    const auto n = at(step);
    if (!n) return;
    const double when = at(seconds).value_or(0);
    if (name >= 0 && value >= 0) {
      if (const auto v = at(value)) add(run, fields[static_cast<std::size_t>(name)], *n, when, *v);
      return;
    }
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const auto column_at = static_cast<std::ptrdiff_t>(i);
      if (column_at == step || column_at == seconds || header[i] == "epoch") continue;
      if (const auto v = number_of(fields[i])) add(run, header[i], *n, when, *v);
    }
  });
}

// Numbers of one object on a line, as JSON writes them: Json keeps whole ones alone.
void read_json_lines(RunLog& run, const std::string& text) {
  each_line(text, [&](std::string_view line) {
    std::vector<std::pair<std::string, double>> found;
    double step = std::numeric_limits<double>::quiet_NaN(), seconds = 0;
    try {
      const Json json = Json::parse(line);
      if (!json.is(Json::Kind::object)) return;
      for (const auto& [name, value] : json.members()) {
        double v = std::numeric_limits<double>::quiet_NaN();
        if (value.is(Json::Kind::number))
          v = value.real();
        else if (!value.is(Json::Kind::null))
          continue;
        if (name == "step")
          step = v;
        else if (name == "seconds")
          seconds = v;
        else if (name != "epoch")
          found.emplace_back(name, v);
      }
    } catch (const InvalidArgument&) {
      return;  // a line that a killed process has left, or no JSON
    }
    if (!std::isfinite(step)) return;
    for (const auto& [name, v] : found) add(run, name, step, seconds, v);
  });
}

bool ends_with(const fs::path& path, const char* extension) {
  return path.extension() == extension;
}

void read_log(RunLog& run, const fs::path& path) {
  try {
    const std::string text = read_whole_file(path.string(), kMostBytes);
    const auto before = run.series.size();
    ends_with(path, ".csv") ? read_csv(run, text) : read_json_lines(run, text);
    if (run.series.size() > before) run.files.push_back(path.filename().string());
  } catch (const Error& e) {
    run.problems.emplace_back(e.what());
  }
}

// "step-100" -> 100.
std::optional<double> step_in(const std::string& name) {
  std::size_t begin = name.size();
  while (begin > 0 && is_digit(name[begin - 1])) --begin;
  const auto n = parse_number(std::string_view(name).substr(begin));
  return n ? std::optional(static_cast<double>(*n)) : std::nullopt;
}

void look_for_checkpoint(RunLog& run, const fs::path& folder) {
  std::error_code gone;  // an old checkpoint may be removed at this moment
  SavedStep saved{folder.filename().string(), step_in(folder.filename().string()).value_or(0)};
  bool shards = false;
  for (const auto& entry : fs::directory_iterator(folder, gone)) {
    if (!entry.is_regular_file(gone)) continue;
    saved.bytes += static_cast<std::uint64_t>(entry.file_size(gone));
    saved.complete |= entry.path().filename() == "manifest.json";
    shards |= ends_with(entry.path(), ".safetensors");
  }
  if (shards || saved.complete) run.checkpoints.push_back(saved);
}

void read_folder(RunLog& run, const fs::path& folder, int depth) {
  for (const std::string& name : names_in(folder.string())) {
    const fs::path path = folder / name;
    std::error_code gone;
    if (fs::is_directory(path, gone)) {
      look_for_checkpoint(run, path);
      if (depth > 0) read_folder(run, path, depth - 1);
    } else if (depth > 0 && (ends_with(path, ".csv") || ends_with(path, ".jsonl"))) {
      read_log(run, path);
    }
  }
}

}  // namespace

RunLog read_run(const std::string& path) {
  RunLog run;
  fs::path clean = fs::path(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  run.name = clean.filename().string();
  std::error_code absent;
  if (fs::is_directory(path, absent)) {
    read_folder(run, path, 1);
  } else if (fs::exists(path, absent)) {
    read_log(run, path);
  } else {
    throw InvalidArgument(path, ": there is no such file or folder");
  }
  std::ranges::sort(run.checkpoints, [](const SavedStep& a, const SavedStep& b) {
    return a.step != b.step ? a.step < b.step : a.name < b.name;
  });
  // Two files may hold one series, or a run that went on from an earlier step.
  for (auto& [name, series] : run.series) {
    std::vector<std::size_t> order(series.steps.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::stable_sort(
        order, [&](std::size_t a, std::size_t b) { return series.steps[a] < series.steps[b]; });
    Series sorted;
    for (const std::size_t i : order) {
      if (!sorted.steps.empty() && sorted.steps.back() == series.steps[i]) {
        sorted.seconds.back() = series.seconds[i];
        sorted.values.back() = series.values[i];
        continue;
      }
      sorted.steps.push_back(series.steps[i]);
      sorted.seconds.push_back(series.seconds[i]);
      sorted.values.push_back(series.values[i]);
    }
    series = std::move(sorted);
  }
  return run;
}

}  // namespace tessera::app
