#pragma once
// The report: one HTML file that needs nothing beside it.

#include <string>
#include <utility>
#include <vector>

#include "training.h"

namespace gpt {

/// `facts`: what ran, where. `text`: what was read, as part of a sentence ("the book of Genesis");
/// `prompt`: Options::prompt. Throws tessera::FileError if the file cannot be written. Folders that
/// are missing are made.
void write_report(const Result& result,
                  const std::vector<std::pair<std::string, std::string>>& facts,
                  const std::string& text, const std::string& prompt, const std::string& path);

}  // namespace gpt
