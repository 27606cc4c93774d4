#pragma once
// The report: one HTML file that needs nothing beside it.

#include <torch/torch.h>

#include <string>
#include <vector>

#include "record.h"

namespace relief {

struct Report {
  /// Fewest ranks first; at least one.
  std::vector<Record> records;
  /// Of look(): seen, interpolation, network, truth, [rows, columns] in m, rows from the south.
  std::vector<at::Tensor> look;
  /// Where that is.
  std::string place;
  /// Of the field.
  std::int64_t rows = 0, columns = 0;
  /// In words.
  std::string network;
};

/// Throws tessera::FileError if the file cannot be written. Folders that are missing are made.
void write_report(const Report& report, const std::string& path);

}  // namespace relief
