#include "field.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/tensor/shard_tensor.h"

namespace relief {

at::Tensor pad_globe(const at::Tensor& field, std::int64_t width) {
  namespace F = torch::nn::functional;
  const at::Tensor round =
      F::pad(field, F::PadFuncOptions({width, width, 0, 0}).mode(torch::kCircular));
  return F::pad(round, F::PadFuncOptions({0, 0, width, width}).mode(torch::kReplicate));
}

Field::Field(const tessera::Source& source, const std::string& variable,
             const tessera::DeviceMesh& mesh, at::ScalarType dtype)
    : mesh_(mesh), cut_({0}) {
  const auto& shape = source.info(variable).shape;
  if (shape.size() != 2 || shape[0] % factor != 1 || shape[1] % factor != 0)
    throw tessera::InvalidArgument(tessera::concat(
        variable, " of ", source.name(), " has shape ", tessera::list(shape), "; a multiple of ",
        factor, " and one more rows, and a multiple of ", factor, " columns are meant"));
  tessera::Sizes sizes =
      tessera::Partition::even((shape[0] - 1) / factor + 1, mesh.mesh().size("domain")).sizes();
  std::int64_t left = shape[0];
  for (std::int64_t& rows : sizes) {
    rows = std::min(factor * rows, left);
    left -= rows;
  }
  cut_ = tessera::Partition(sizes);
  const tessera::Interval own = cut_.interval(mesh.coordinate()[0]);
  const at::Tensor rows = source.read(
      variable, {.start = {own.begin, 0}, .count = {own.size(), shape[1]}}, {.dtype = dtype});
  values_read_ = rows.numel();
  fine_ = tessera::from_local(
      rows.div_(1000).view({1, 1, own.size(), shape[1]}),
      tessera::ShardSpec(mesh, {1, 1, shape[0], shape[1]}, {tessera::Shard(2)}, {{2, sizes}}));
}

}  // namespace relief
