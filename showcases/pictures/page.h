#pragma once
// A report: one HTML file that needs nothing beside it.

#include <string>

namespace pictures {

struct Page {
  std::string title;
  /// CSS beside that of all pages: text, cards (.card, .two), tables, charts and their legends.
  std::string style;
  /// From <h1> on.
  std::string body;
};

/// Throws tessera::FileError if the file cannot be written. Folders that are missing are made.
void write_page(const Page& page, const std::string& path);

}  // namespace pictures
