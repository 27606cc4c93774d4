#pragma once
// `tessera plan --data`: who reads what of a global batch, as text, JSON or a picture.

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/mesh.h"
#include "tessera/sampling/batch_mapping.h"

namespace tessera::app {

struct DataPlan {
  /// Of the mesh, outermost first.
  std::vector<Axis> axes;
  /// Those that shard the batch, outermost first.
  std::vector<std::string> batch_axes;
  /// Of each device, row-major over the mesh.
  std::vector<int> processes;
  /// Samples of a global batch.
  std::int64_t batch = 0;
  BatchMapping mapping;
};

/// `processes`: empty: each device is a process, numbered as its rank. `batch`: 0: two samples for
/// each batch coordinate. Throws InvalidArgument, and what BatchMapping throws.
DataPlan make_data_plan(const Mesh& mesh, const std::vector<std::string>& batch_axes,
                        const std::vector<int>& processes, std::int64_t batch);

std::string data_plan_text(const DataPlan& plan, int most_processes);
std::string data_plan_json(const DataPlan& plan);
/// Devices as a grid, coloured by batch coordinate, and beside it the part of the batch that each
/// process reads. Throws InvalidArgument above 4096 devices or 128 processes, where nothing could
/// be read any more.
std::string data_plan_svg(const DataPlan& plan);
/// The same in a page where pointing at a device or a process shows all that reads the same.
std::string data_plan_html(const DataPlan& plan);

}  // namespace tessera::app
