#include "report.h"

#include "tessera/base/text.h"

namespace tessera::app {

void Report::section(const std::string& title) {
  text_ += concat(text_.empty() ? "" : "\n", title, "\n");
}

void Report::line(const std::string& name, const std::string& value) {
  text_ +=
      concat("  ", name, std::string(name.size() < 18 ? 18 - name.size() : 1, ' '), value, "\n");
}

void Report::advice(const std::string& text) {
  ++advices_;
  text_ += concat("  -> ", text, "\n");
}

void Report::problem(const std::string& text) {
  ++problems_;
  advice(text);
}

}  // namespace tessera::app
