// What a run says of itself, what its steps cost, and where numbers go: for a loop of Python's.

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "library.h"
#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/group/trace.h"
#include "tessera/nn/flop_counter.h"
#include "tessera/train/detail/run_meter.h"
#include "tessera/train/logger.h"
#include "tessera/train/progress.h"

namespace tessera::python {

namespace {

using detail::Pace;

// The order in which ranks send them to each other.
std::vector<double> numbers_of(const Pace& p) {
  return {p.steps, p.seconds, p.waited, p.weight, p.bytes, p.flop, p.memory};
}

std::vector<Pace> paces_of(const std::vector<std::vector<double>>& ranks) {
  std::vector<Pace> all;
  for (const auto& n : ranks)
    all.push_back({n.at(0), n.at(1), n.at(2), n.at(3), n.at(4), n.at(5), n.at(6)});
  if (all.empty()) throw InvalidArgument("the pace of no rank");
  return all;
}

/// It writes into a text, which Python writes: a notebook shows what goes through sys.stderr.
struct PyProgress : torch::CustomClassHolder {
  PyProgress(bool show, bool terminal, const std::string& unit, double line_seconds,
             const std::string& device)
      : meter(std::make_unique<detail::RunMeter>(c10::Device(device), nullptr)) {
    ProgressOptions options;
    options.show = show;
    options.out = &out;
    if (terminal) options.columns = terminal_columns();
    options.unit = unit;
    if (!(line_seconds >= 0 && line_seconds < 1e9))
      throw InvalidArgument("a line every ", line_seconds, " s: give 0 to 1e9");
    options.line_interval =
        std::chrono::milliseconds(static_cast<std::int64_t>(1e3 * line_seconds));
    progress = std::make_unique<Progress>(options);
  }
  std::string written() {
    std::string text = out.str();
    out.str({});
    return text;
  }

  std::ostringstream out;
  std::unique_ptr<Progress> progress;
  std::unique_ptr<detail::RunMeter> meter;
};
using ProgressPtr = c10::intrusive_ptr<PyProgress>;

template <class T>
struct Scope : torch::CustomClassHolder {
  T counter;
};

/// The logger of files of a kind, begun at a step.
struct PyLogger : torch::CustomClassHolder {
  PyLogger(const std::string& folder, const std::string& kind, std::int64_t step) {
    if (kind == "csv")
      logger = csv_logger(folder + "/metrics.csv");
    else if (kind == "json")
      logger = json_logger(folder + "/metrics.jsonl");
    else if (kind == "tensorboard")
      logger = tensorboard_logger(folder);
    else
      throw InvalidArgument("a logger of kind '", kind, "': csv, json or tensorboard");
    logger->start(step);
  }

  std::shared_ptr<Logger> logger;
};
using LoggerPtr = c10::intrusive_ptr<PyLogger>;

}  // namespace

void register_progress(Library& library) {
  library.class_<PyProgress>("Progress")
      .def(torch::init<bool, bool, const std::string&, double, const std::string&>())
      .def("start",
           [](const ProgressPtr& self, std::int64_t step, std::int64_t steps) {
             self->progress->start(step, steps);
             self->meter->begin_step();
             return self->written();
           })
      .def("step",
           [](const ProgressPtr& self, double weight, const std::string& note) {
             // A step's own share is taken as the same on each rank at each step.
             self->meter->batch({}, 1);
             self->meter->end_step(weight, 1);
             self->progress->step(weight, [&] { return note; });
             self->meter->begin_step();
             return self->written();
           })
      .def("say",
           [](const ProgressPtr& self, const std::string& line) {
             self->progress->say(line);
             return self->written();
           })
      .def("finish",
           [](const ProgressPtr& self, const std::string& note) {
             self->progress->finish([&] { return note; });
             return self->written();
           })
      .def("seconds", [](const ProgressPtr& self) { return self->progress->seconds(); })
      .def("pace",
           [](const ProgressPtr& self) {
             self->meter->take();
             return numbers_of(self->meter->total());
           })
      .def("close", [](const ProgressPtr& self) { self->meter.reset(); });
  library.def("pace_lines", [](const std::vector<std::vector<double>>& ranks, double peak,
                               double seconds, const std::string& unit) {
    return detail::pace_lines(paces_of(ranks), peak, seconds, unit);
  });
  library.def("pace_values", [](const std::vector<std::vector<double>>& ranks, double peak) {
    const auto values = detail::pace_values(paces_of(ranks), peak);
    c10::Dict<std::string, double> dictionary;
    for (const auto& [name, value] : values) dictionary.insert(name, value);
    return dictionary;
  });
  library.class_<Scope<FlopCounter>>("FlopCounter")
      .def(torch::init<>())
      .def("total", [](const c10::intrusive_ptr<Scope<FlopCounter>>& self) {
        return self->counter.total();
      });
  library.class_<Scope<WaitTime>>("WaitTime")
      .def(torch::init<>())
      .def("total", [](const c10::intrusive_ptr<Scope<WaitTime>>& self) {
        return std::chrono::duration<double>(self->counter.total()).count();
      });
  library.class_<PyLogger>("Logger")
      .def(torch::init<const std::string&, const std::string&, std::int64_t>())
      .def("log", [](const LoggerPtr& self, const Names& names, const std::vector<double>& values,
                     std::int64_t step) {
        std::map<std::string, double> numbers;
        for (std::size_t i = 0; i < names.size(); ++i) numbers[names[i]] = values.at(i);
        self->logger->log(numbers, step, 0);
        self->logger->flush();
      });
  library.def("measure_peak_flop", [](const std::string& device, at::ScalarType dtype) {
    return measure_peak_flop(c10::Device(device), dtype);
  });
}

}  // namespace tessera::python
