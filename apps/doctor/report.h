#pragma once
// The doctor's paper: sections of "name  value", and advice for what will not work.

#include <string>
#include <utility>
#include <vector>

namespace tessera::app {

class Report {
 public:
  void section(const std::string& title);
  void line(const std::string& name, const std::string& value);
  /// Something that will not work, or not well, and what to do about it; printed below the line it
  /// belongs to.
  void advice(const std::string& text);
  /// Advice about something that was asked for: the doctor's exit status becomes 1.
  void problem(const std::string& text);
  int problems() const { return problems_; }
  int advices() const { return advices_; }
  std::string text() const { return text_; }

 private:
  std::string text_;
  int problems_ = 0;
  int advices_ = 0;
};

/// This machine: cores, memory, limits, network addresses and ports.
void report_machine(Report& report);
/// libtorch, devices, and what each backend needs.
void report_libraries(Report& report);
/// Runs a short all-reduce on every backend that is there.
void report_check(Report& report);

/// The part of a check that runs in each rank: an all-reduce over `backend`, compared with the
/// right answer. Throws what goes wrong.
void check_rank(const std::string& backend);

}  // namespace tessera::app
