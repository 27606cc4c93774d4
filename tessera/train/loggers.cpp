#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/internal/json_text.h"
#include "tessera/base/number.h"
#include "tessera/base/pinned.h"
#include "tessera/base/text.h"
#include "tessera/files/operations.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/logger.h"

namespace tessera {

namespace {

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void make_folders(const std::string& folder) {
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (problem) throw FileError(folder, ": cannot be made: ", problem.message());
}

// The file is nobody else's while the result lives: who cuts it sees whole lines, and cuts none
// that comes meanwhile. Waits no longer than a second, and not at all where there are no locks.
auto locked(int descriptor) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && (errno == EINTR || errno == EWOULDBLOCK) &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return c10::make_scope_exit([descriptor] { ::flock(descriptor, LOCK_UN); });
}

// A file that only grows, and where every flush() leaves whole lines.
class GrowingFile : Pinned {
 public:
  ~GrowingFile() { close(); }
  bool is_open() const { return descriptor_ >= 0; }
  void open(const std::string& path) {
    close();
    path_ = path;
    descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (descriptor_ < 0) fail("opened");
  }
  void add(const std::string& bytes) {
    waiting_ += bytes;
    if (waiting_.size() > (1 << 16)) write();
  }
  void write() {
    if (waiting_.empty()) return;
    const auto lock = locked(descriptor_);
    write_now();
  }
  /// Keeps the whole lines that `keeps` says, in the file that others may have open, too.
  void keep_lines(const std::function<bool(const std::string& line)>& keeps) {
    const auto lock = locked(descriptor_);
    std::string kept;
    std::optional<off_t> first;  // the first byte that goes
    off_t at = 0;
    for (const auto& [line, whole] : lines()) {
      if (whole && keeps(line))
        kept += first ? line + '\n' : "";
      else if (!first)
        first = at;
      at += static_cast<off_t>(line.size()) + 1;
    }
    if (!first) return;
    if (::ftruncate(descriptor_, *first) != 0) fail("truncated");
    // Lines of earlier steps behind the first that goes, as evaluations append them.
    kept.swap(waiting_);
    write_now();
    kept.swap(waiting_);
  }
  std::vector<std::pair<std::string, bool>> lines() const {
    std::vector<std::pair<std::string, bool>> all;
    std::ifstream in(path_, std::ios::binary);
    for (std::string line; std::getline(in, line);) all.emplace_back(line, !in.eof());
    return all;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw FileError(path_, ": cannot be ", what, ": ", std::strerror(errno));
  }
  void write_now() {
    std::size_t done = 0;
    while (done < waiting_.size()) {
      const ssize_t n = ::write(descriptor_, waiting_.data() + done, waiting_.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        waiting_.erase(0, done);
        fail("written");
      }
      done += static_cast<std::size_t>(n);
    }
    waiting_.clear();
  }
  void close() noexcept {
    if (descriptor_ < 0) return;
    try {
      write();
    } catch (...) {  // flush() is what tells
    }
    ::close(descriptor_);
    descriptor_ = -1;
  }
  std::string path_, waiting_;
  int descriptor_ = -1;
};

std::optional<std::int64_t> number_until(const std::string& line, std::size_t from) {
  std::size_t end = from;
  while (end < line.size() && is_digit(line[end])) ++end;
  const auto n = parse_number(std::string_view(line).substr(from, end - from));
  return n ? std::optional<std::int64_t>(static_cast<std::int64_t>(*n)) : std::nullopt;
}

std::string exact(double value) {
  TextStream out;
  out.precision(17);
  out << value;
  return out.str();
}

std::string quoted(const std::string& name) {
  if (name.find_first_of(",\"\n\r") == std::string::npos) return name;
  std::string out = "\"";
  for (const char c : name) {
    if (c == '"') out += '"';
    out += c == '\n' || c == '\r' ? ' ' : c;
  }
  return out + "\"";
}

// How a log is written in lines with a step in each.
struct LineFormat {
  const char* header;
  // Nothing: a line that has none, and stays.
  std::optional<std::int64_t> (*step_of)(const std::string& line);
  std::string (*lines)(const std::map<std::string, double>& values, std::int64_t step,
                       std::int64_t epoch, double seconds);
};

constexpr LineFormat kCsv{"step,epoch,seconds,name,value\n",
                          [](const std::string& line) { return number_until(line, 0); },
                          [](const std::map<std::string, double>& values, std::int64_t step,
                             std::int64_t epoch, double seconds) {
                            std::string all;
                            for (const auto& [name, value] : values)
                              all += concat(step, ",", epoch, ",", seconds, ",", quoted(name), ",",
                                            exact(value), "\n");
                            return all;
                          }};

constexpr LineFormat kJson{
    "",
    [](const std::string& line) -> std::optional<std::int64_t> {
      constexpr std::string_view start = "{\"step\": ";
      return line.starts_with(start) ? number_until(line, start.size()) : std::nullopt;
    },
    [](const std::map<std::string, double>& values, std::int64_t step, std::int64_t epoch,
       double seconds) {
      std::string line =
          concat("{\"step\": ", step, ", \"epoch\": ", epoch, ", \"seconds\": ", seconds);
      for (const auto& [name, value] : values)
        line += concat(", ", json_text(name), ": ", std::isfinite(value) ? exact(value) : "null");
      return line + "}\n";
    }};

// What an earlier run has of later steps, and a line that was cut short, goes when a run goes on.
class LineLogger final : public Logger {
 public:
  LineLogger(std::string path, const LineFormat& format) : path_(std::move(path)), format_(format) {
    if (path_.empty()) throw InvalidArgument("a logger was given no file");
  }
  void start(std::int64_t step) override {
    make_folders(folder_of(path_));
    const auto earlier = [&](const std::string& line) {
      return format_.step_of(line).value_or(0) <= step;
    };
    open();
    const auto there = file_.lines();
    if (step == 0 && std::ranges::any_of(there, [&](const auto& line) {
          return line.second && !earlier(line.first);
        })) {
      move_aside();
      open();
    } else {
      file_.keep_lines(earlier);
    }
    begin_line();
  }
  void append(std::int64_t) override { began_ = std::chrono::steady_clock::now(); }
  void log(const std::map<std::string, double>& values, std::int64_t step,
           std::int64_t epoch) override {
    if (!file_.is_open()) {
      make_folders(folder_of(path_));
      open();
      begin_line();
    }
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began_;
    file_.add(format_.lines(values, step, epoch, since.count()));
  }
  void flush() override { file_.write(); }

 private:
  void open() {
    file_.open(path_);
    began_ = std::chrono::steady_clock::now();
  }
  // Behind the header, and behind a line that a process that was killed has left truncated.
  void begin_line() {
    const auto there = file_.lines();
    file_.add(there.empty() ? format_.header : there.back().second ? "" : "\n");
    file_.write();
  }
  // Who has it open goes on in it.
  void move_aside() const {
    std::error_code problem;
    int n = 1;
    while (std::filesystem::exists(concat(path_, ".", n), problem)) ++n;
    std::filesystem::rename(path_, concat(path_, ".", n), problem);
    if (problem) throw FileError(path_, ": cannot be moved aside: ", problem.message());
  }
  std::string path_;
  LineFormat format_;
  GrowingFile file_;
  std::chrono::steady_clock::time_point began_;
};

class TensorboardLogger final : public Logger {
 public:
  explicit TensorboardLogger(std::string folder) : folder_(std::move(folder)) {
    if (folder_.empty()) throw InvalidArgument("a logger was given no folder");
  }
  void append(std::int64_t) override {}
  void log(const std::map<std::string, double>& values, std::int64_t step, std::int64_t) override {
    if (!file_.is_open()) start(0);
    file_.add(scalars_event(wall_seconds(), step, values));
  }
  void start(std::int64_t step) override {
    make_folders(folder_);
    const double now = wall_seconds();
    char host[256] = "host";
    ::gethostname(host, sizeof host - 1);
    TextStream seconds;
    seconds.width(10);
    seconds.fill('0');
    seconds << static_cast<std::int64_t>(now);
    file_.open(concat(folder_, "/events.out.tfevents.", seconds.str(), ".", host, ".", ::getpid(),
                      ".", make_nonce()));
    file_.add(version_event(now));
    if (step > 0) file_.add(restart_event(now, step + 1));
    file_.write();
  }
  void flush() override { file_.write(); }

 private:
  std::string folder_;
  GrowingFile file_;
};

}  // namespace

std::shared_ptr<Logger> csv_logger(const std::string& file) {
  return std::make_shared<LineLogger>(file, kCsv);
}

std::shared_ptr<Logger> json_logger(const std::string& file) {
  return std::make_shared<LineLogger>(file, kJson);
}

std::shared_ptr<Logger> tensorboard_logger(const std::string& folder) {
  return std::make_shared<TensorboardLogger>(folder);
}

}  // namespace tessera
