#pragma once
// Page: a report as one HTML file that needs nothing beside it, and no network.

#include <string>

namespace tessera {

struct Page {
  std::string title;
  /// CSS beside that of all pages: text, cards (.card, .two), tables, charts and their legends.
  std::string style;
  /// The body begins with its heading (`h1`).
  std::string body;
  /// The page is dark where its reader prefers that; its own style must use the colours of the
  /// common one: var(--text), var(--faint), var(--card), var(--edge).
  bool dark = false;
  /// The browser reads the file again after so many seconds; 0: never.
  int refresh = 0;
};

/// Writes the page, complete or not at all. Throws FileError. Folders that are missing are made.
void write_page(const Page& page, const std::string& path);

}  // namespace tessera
