#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tessera/base/text.h"

namespace winds {

Progress::~Progress() {
  if (open_) std::fputs("\n", stderr);
}

void Progress::show(std::int64_t done, std::int64_t of, const std::string& note) {
  const auto now = std::chrono::steady_clock::now();
  if (columns_ <= 0 || of <= 0 ||
      (done < of && open_ && now - last_ < std::chrono::milliseconds(100)))
    return;
  last_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const auto left = static_cast<std::int64_t>(
      done > 0 ? seconds * static_cast<double>(of - done) / static_cast<double>(done) : 0);
  const std::string text = tessera::concat(" ", 100 * done / of, "%  ", note, "  ",
                                           done < of ? left : static_cast<std::int64_t>(seconds),
                                           done < of ? " s left" : " s");
  // The launcher's prefix needs room as well.
  const int width = std::clamp(columns_ - static_cast<int>(text.size()) - 14, 4, 40);
  const int full = static_cast<int>(width * done / of);
  std::string bar;
  for (int i = 0; i < width; ++i) bar += i < full ? "━" : "─";
  std::fputs(tessera::concat("\r", bar, text, done < of ? "\r" : "\n").c_str(), stderr);
  std::fflush(stderr);
  open_ = done < of;
}

int terminal_columns() {
  if (const char* told = std::getenv("TESSERA_TERMINAL_COLUMNS")) return std::atoi(told);
  winsize size{};
  return isatty(STDERR_FILENO) && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace winds
