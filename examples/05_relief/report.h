#pragma once
// The report: one HTML file that needs nothing beside it.

#include <torch/torch.h>

#include <string>
#include <vector>

#include "record.h"

namespace relief {

struct Report {
  std::vector<Record> records;         ///< Fewest ranks first; at least one.
  std::vector<at::Tensor> look;        ///< Of look(): seen, interpolation, network, truth, [rows, columns] in m, rows from the south.
  std::string place;                   ///< Where that is.
  std::int64_t rows = 0, columns = 0;  ///< Of the field.
  std::string network;                 ///< In words.
};

/// Throws tessera::FileError if the file cannot be written. Folders that are missing are made.
void write_report(const Report& report, const std::string& path);

}  // namespace relief
