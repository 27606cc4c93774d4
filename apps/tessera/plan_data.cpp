#include "plan_data.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/internal/colour.h"
#include "tessera/base/text.h"

namespace tessera::app {
namespace {

using Json = nlohmann::json;

std::string slice_colour(int coordinate) {
  return numbered_colour(coordinate, 62, coordinate % 2 ? 68 : 78);
}

std::string shape_text(const DataPlan& plan) {
  std::string text;
  for (const Axis& axis : plan.axes)
    text += concat(text.empty() ? "" : " x ", axis.name, " ", axis.size);
  return text;
}

std::string axes_text(const DataPlan& plan) {
  std::string text;
  for (const auto& name : plan.batch_axes) text += concat(text.empty() ? "" : ", ", name);
  return text.empty() ? "none (every device gets the whole batch)" : text;
}

/// Why there is no two-function form; empty if there is one.
std::string refusal(const DataPlan& plan) {
  try {
    plan.mapping.process_mesh_mapping();
    return "";
  } catch (const InvalidArgument& e) {
    return e.what();
  }
}

std::string draw(const DataPlan& plan) {
  const auto& mapping = plan.mapping;
  const int devices = static_cast<int>(plan.processes.size()),
            processes = static_cast<int>(mapping.processes().size());
  if (devices > 4096 || processes > 128)
    throw InvalidArgument("a picture of ", devices, " devices and ", processes,
                          " processes; up to 4096 and 128 can be told apart. Use --json");
  const int columns = plan.axes.empty() ? 1 : plan.axes.back().size, rows = devices / columns;
  const int cell = std::clamp(640 / std::max(columns, rows), 8, 44), left = 24 + 150, top = 110;
  const int bars = left + columns * cell + 170, bar = 560, line = 26;
  const int width = bars + bar + 40,
            height = std::max(top + rows * cell, top + processes * line) + 60;
  TextStream out;
  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
      << "\" viewBox=\"0 0 " << width << ' ' << height
      << "\">\n<style>text{font-family:system-ui,'DejaVu "
         "Sans',Arial,sans-serif;fill:#1c2530;font-size:13px}.T{font-size:22px;font-weight:600}"
         ".k{fill:#4a5868}.d{text-anchor:middle;dominant-baseline:central}.c{stroke:#fff;stroke-"
         "width:1}.b{fill:#eef2f6;stroke:#c9d3dd}</style>\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"#f8fafc\"/>\n<text class=\"T\" x=\"24\" "
         "y=\"42\">Who reads what: "
      << markup_text(shape_text(plan))
      << "</text>\n<text class=\"k\" x=\"24\" y=\"66\">The batch is sharded by: "
      << markup_text(axes_text(plan)) << ". A global batch of " << plan.batch << " samples, "
      << mapping.coordinates() << " batch coordinates, one colour each.</text>\n"
      << "<text class=\"k\" x=\"" << left << "\" y=\"" << top - 12
      << "\">devices: the number is the process</text>\n"
      << "<text class=\"k\" x=\"" << bars << "\" y=\"" << top - 12
      << "\">what each process reads of samples 0 to " << plan.batch - 1 << "</text>\n";
  for (int device = 0; device < devices; ++device) {
    const int x = left + device % columns * cell, y = top + device / columns * cell,
              c = mapping.coordinate(device);
    out << "<rect class=\"c\" data-c=\"" << c << "\" data-p=\"" << plan.processes[device]
        << "\" x=\"" << x << "\" y=\"" << y << "\" width=\"" << cell << "\" height=\"" << cell
        << "\" fill=\"" << slice_colour(c) << "\"/>";
    if (cell >= 20)
      out << "<text class=\"d\" x=\"" << x + cell / 2.0 << "\" y=\"" << y + cell / 2.0
          << "\" pointer-events=\"none\">" << plan.processes[device] << "</text>";
    if (device % columns == 0 && cell >= 14) {
      // The coordinates of the outer axes.
      std::string label;
      for (int a = static_cast<int>(plan.axes.size()) - 2, left_over = device / columns; a >= 0;
           --a) {
        label = concat(plan.axes[a].name, " ", left_over % plan.axes[a].size,
                       label.empty() ? "" : ", ", label);
        left_over /= plan.axes[a].size;
      }
      out << "<text class=\"k\" x=\"24\" y=\"" << y + cell / 2.0 + 4 << "\">" << markup_text(label)
          << "</text>";
    }
    out << '\n';
  }
  if (!plan.axes.empty())
    out << "<text class=\"k\" x=\"" << left << "\" y=\"" << top + rows * cell + 20 << "\">"
        << markup_text(plan.axes.back().name) << " 0 to " << columns - 1 << "</text>\n";
  for (int i = 0; i < processes; ++i) {
    const int process = mapping.processes()[i], y = top + i * line;
    out << "<text x=\"" << bars - 90 << "\" y=\"" << y + 15 << "\">process " << process
        << "</text><rect class=\"b\" x=\"" << bars << "\" y=\"" << y << "\" width=\"" << bar
        << "\" height=\"" << line - 6 << "\"/>";
    for (const BatchSlice& slice : mapping.slices(process, plan.batch)) {
      if (slice.samples.empty()) continue;
      const double scale = static_cast<double>(bar) / static_cast<double>(plan.batch),
                   from = bars + scale * static_cast<double>(slice.samples.begin);
      const double long_ = scale * static_cast<double>(slice.samples.size());
      out << "<rect class=\"c\" data-c=\"" << slice.coordinate << "\" data-p=\"" << process
          << "\" x=\"" << from << "\" y=\"" << y << "\" width=\"" << long_ << "\" height=\""
          << line - 6 << "\" fill=\"" << slice_colour(slice.coordinate) << "\"/>";
      if (long_ > 44)
        out << "<text class=\"d\" x=\"" << from + long_ / 2 << "\" y=\"" << y + (line - 6) / 2.0
            << "\" pointer-events=\"none\">" << slice.samples.begin << "\u2013"
            << slice.samples.end - 1 << "</text>";
    }
    out << '\n';
  }
  out << "</svg>\n";
  return std::move(out).str();
}

}  // namespace

DataPlan make_data_plan(const Mesh& mesh, const std::vector<std::string>& batch_axes,
                        const std::vector<int>& processes, std::int64_t batch) {
  std::vector<int> sizes, axes;
  for (const Axis& axis : mesh.axes()) sizes.push_back(axis.size);
  for (const auto& name : batch_axes) axes.push_back(mesh.index(name));
  std::vector<int> table = processes;
  if (table.empty()) table.assign(mesh.ranks().begin(), mesh.ranks().end());
  BatchMapping mapping(sizes, table, axes);
  if (batch < 0) throw InvalidArgument("a global batch of ", batch, " samples; give at least 1");
  if (batch == 0) batch = 2 * std::int64_t{mapping.coordinates()};
  return {{mesh.axes().begin(), mesh.axes().end()},
          batch_axes,
          std::move(table),
          batch,
          std::move(mapping)};
}

std::string data_plan_text(const DataPlan& plan, int most_processes) {
  TextStream out;
  out << "mesh: " << shape_text(plan) << " (outermost first)\nbatch sharded by: " << axes_text(plan)
      << "\nglobal batch: " << plan.batch << " samples, " << plan.mapping.coordinates()
      << " batch coordinates\n";
  int shown = 0;
  for (const int process : plan.mapping.processes()) {
    if (shown++ == most_processes) {
      out << "... (" << plan.mapping.processes().size()
          << " processes in all; --show prints more)\n";
      break;
    }
    out << "process " << process << " reads";
    std::size_t slices = 0;
    for (const BatchSlice& slice : plan.mapping.slices(process, plan.batch)) {
      if (++slices > 16) {
        out << ", ...";
        break;
      }
      out << (slices > 1 ? ", [" : " [") << slice.samples.begin << ", " << slice.samples.end
          << ") of coordinate " << slice.coordinate << " at " << slice.slot;
    }
    out << '\n';
  }
  const std::string why = refusal(plan);
  out << (why.empty() ? "two-function form: process_mesh_mapping and local_device_mapping describe "
                        "it (see --json)"
                      : "no two-function form: " + why)
      << '\n';
  return std::move(out).str();
}

std::string data_plan_json(const DataPlan& plan) {
  Json json;
  json["axes"] = Json::array();
  for (const Axis& axis : plan.axes)
    json["axes"].push_back({{"name", axis.name}, {"size", axis.size}});
  json["batch_axes"] = plan.batch_axes;
  json["batch"] = plan.batch;
  json["coordinates"] = plan.mapping.coordinates();
  json["process_of_device"] = plan.processes;
  json["processes"] = Json::array();
  const std::string why = refusal(plan);
  for (const int process : plan.mapping.processes()) {
    Json one{{"process", process}, {"slices", Json::array()}};
    for (const BatchSlice& slice : plan.mapping.slices(process, plan.batch))
      one["slices"].push_back({{"coordinate", slice.coordinate},
                               {"begin", slice.samples.begin},
                               {"end", slice.samples.end},
                               {"slot", slice.slot}});
    if (why.empty())
      for (const auto& [coordinate, slot] : plan.mapping.local_device_mapping(process))
        one["local_device_mapping"][std::to_string(coordinate)] = slot;
    json["processes"].push_back(std::move(one));
  }
  if (why.empty())
    for (const auto& [process, shard] : plan.mapping.process_mesh_mapping())
      json["process_mesh_mapping"][std::to_string(process)] = shard;
  else
    json["no_two_function_form"] = why;
  return json.dump(1) + "\n";
}

std::string data_plan_svg(const DataPlan& plan) { return draw(plan); }

std::string data_plan_html(const DataPlan& plan) {
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Who reads "
      "what</title><style>body{margin:0;background:#f8fafc}"
      ".off{opacity:.2}</style></head><body>\n",
      draw(plan),
      "<script>\n"
      "// Pointing at a device or a part of the batch shows all that reads the same samples.\n"
      "const all=[...document.querySelectorAll('[data-c]')];\n"
      "document.addEventListener('mouseover',e=>{const c=e.target.dataset&&e.target.dataset.c;\n"
      " for(const r of all)r.classList.toggle('off',c!==undefined&&r.dataset.c!==c);});\n"
      "</script></body></html>\n");
}

}  // namespace tessera::app
