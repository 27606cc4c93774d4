#pragma once
// A progress bar on standard error, where that is a terminal; nothing elsewhere.

#include <chrono>
#include <cstdint>
#include <string>

namespace winds {

class Progress {
 public:
  /// `columns`: width of the terminal; 0: show nothing. See terminal_columns().
  explicit Progress(int columns) : columns_(columns) {}
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// At most ten times a second, and at the end.
  void show(std::int64_t done, std::int64_t of, const std::string& note);

 private:
  int columns_;
  bool open_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now(), last_;
};

/// Of standard error: what `tessera run` says of the terminal behind its ranks
/// (TESSERA_TERMINAL_COLUMNS), else this process' own; 0: no terminal.
int terminal_columns();

}  // namespace winds
