#include "tessera/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

// The launcher's prefix stands on the line as well.
constexpr int kPrefix = 14;
constexpr int kShortestBar = 4, kLongestBar = 40;
// The pace of a bar is that of the last so many seconds, up to twice as many.
constexpr std::chrono::seconds kPaceOf{5};

double seconds_of(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// And no exponent of ten: what is larger is a whole number.
std::string two_digits(double value) {
  return value < 9.95 ? significant(value, 2) : concat(std::llround(value));
}

// Two units, of which the larger one is not 0.
std::string two_units(std::int64_t count, std::int64_t of, const char* large, const char* small) {
  const auto rest = count % of;
  return rest == 0 ? concat(count / of, " ", large)
                   : concat(count / of, " ", large, " ", rest, " ", small);
}

}  // namespace

int terminal_columns() {
  constexpr std::uint64_t kMost = 10000;
  if (const char* told = std::getenv("TESSERA_TERMINAL_COLUMNS"))
    return static_cast<int>(std::min(parse_number(told).value_or(0), kMost));
  winsize size{};
  return ::isatty(STDERR_FILENO) && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col
                                                                                   : 0;
}

std::string duration_text(double seconds) {
  constexpr double kLongest = 1e15;
  if (!(seconds < kLongest)) return "a long time";
  if (seconds > 0 && seconds < 0.9995e-3) return concat(two_digits(seconds * 1e6), " us");
  if (seconds > 0 && seconds < 0.9995) return concat(two_digits(seconds * 1e3), " ms");
  if (seconds < 9.95) return concat(two_digits(std::max(seconds, 0.0)), " s");
  const std::int64_t whole = std::llround(seconds);
  if (whole < 60) return concat(whole, " s");
  if (whole < 3600) return two_units(whole, 60, "min", "s");
  if (whole < 24 * 3600) return two_units(whole / 60, 60, "h", "min");
  return two_units(whole / 3600, 24, "d", "h");
}

std::string count_text(double value) {
  const char* letter = "";
  for (const char* next : {"k", "M", "G", "T", "P", "E"}) {
    if (!(std::abs(value) >= 999.5)) break;
    value /= 1000;
    letter = next;
  }
  return significant(value, 3) + letter;
}

Progress::Progress(ProgressOptions options)
    : options_(std::move(options)),
      out_(options_.out ? *options_.out : std::cerr),
      columns_(options_.columns.value_or(options_.out ? 0 : terminal_columns())) {
  start(0, -1);
}

Progress::~Progress() {
  if (open_ > 0) out_ << "\n" << std::flush;
}

Progress::Time Progress::now() const {
  return options_.clock ? options_.clock() : std::chrono::steady_clock::now();
}

double Progress::seconds() const { return seconds_of(now() - start_.time); }

void Progress::start(std::int64_t step, std::int64_t steps) {
  steps_ = steps;
  start_ = now_ = recent_ = older_ = {now(), step, 0};
  shown_at_ = start_.time;
  shown_step_ = step;
}

void Progress::step(double weight, const std::function<std::string()>& note) {
  now_.step += 1;
  now_.weight += weight;
  if (!options_.show) return;
  const Time at = now();
  if (at - shown_at_ >= (columns_ > 0 ? options_.bar_interval : options_.line_interval))
    show(note, at, '\r');
}

void Progress::finish(const std::function<std::string()>& note) {
  if (options_.show && (open_ > 0 || now_.step > shown_step_)) show(note, now(), '\n');
}

void Progress::show(const std::function<std::string()>& note, Time at, char end) {
  now_.time = at;
  const std::string line = text(note, at);
  const auto keep = columns_ > 0 ? std::chrono::steady_clock::duration(kPaceOf)
                                 : std::chrono::steady_clock::duration::zero();
  if (at - recent_.time >= keep) older_ = std::exchange(recent_, now_);
  shown_at_ = at;
  shown_step_ = now_.step;
  write(line, end);
}

void Progress::say(const std::string& line) {
  if (options_.show) write(line, '\n');
}

void Progress::write(const std::string& line, char end) {
  if (columns_ <= 0) {
    out_ << line + "\n" << std::flush;
    return;
  }
  // Of a character of several bytes all but the first begin with the bits 10.
  const auto columns = static_cast<std::size_t>(
      std::ranges::count_if(line, [](char c) { return (c & 0xc0) != 0x80; }));
  // What a longer line before it has left is written over. A return at the end lets a launcher pass
  // the line on before the next one comes.
  const std::size_t rest = open_ > columns ? open_ - columns : 0;
  out_ << "\r" + line + std::string(rest, ' ') + end << std::flush;
  open_ = end == '\r' ? columns : 0;
}

std::string Progress::text(const std::function<std::string()>& note, Time at) const {
  std::vector<std::string> parts;
  const bool known = steps_ > 0 && steps_ >= now_.step;
  const bool bar = columns_ > 0;
  if (known) {
    const auto percent = 100 * now_.step / steps_;
    parts.push_back(bar ? concat(percent, "%  ", now_.step, "/", steps_)
                        : concat("step ", now_.step, " of ", steps_, " (", percent, "%)"));
  } else {
    parts.push_back(concat("step ", now_.step));
  }
  const double seconds = seconds_of(at - older_.time);
  const auto done = static_cast<double>(now_.step - older_.step);
  if (seconds > 0 && done > 0) {
    parts.push_back(concat(count_text(done / seconds), " steps/s"));
    const double weight = now_.weight - older_.weight;
    if (weight > 0) parts.push_back(concat(count_text(weight / seconds), " ", options_.unit, "/s"));
  }
  if (note)
    if (std::string said = note(); !said.empty()) parts.push_back(std::move(said));
  if (known && now_.step < steps_ && seconds > 0 && done > 0)
    parts.push_back(
        concat(duration_text(static_cast<double>(steps_ - now_.step) * seconds / done), " left"));
  std::string line;
  for (const std::string& part : parts) line += concat(line.empty() ? "" : bar ? "  " : ", ", part);
  if (!known || !bar) return line;
  const int width =
      std::clamp(columns_ - static_cast<int>(line.size()) - 2 - kPrefix, kShortestBar, kLongestBar);
  const auto full = width * now_.step / steps_;
  std::string drawn;
  for (int i = 0; i < width; ++i) drawn += i < full ? "━" : "─";
  return concat(drawn, "  ", line);
}

}  // namespace tessera
