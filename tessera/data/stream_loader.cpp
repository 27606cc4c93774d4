#include "tessera/data/stream_loader.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

#include "tessera/base/text.h"

namespace tessera {

UnevenDataError::~UnevenDataError() = default;

StreamLoader::StreamLoader(std::shared_ptr<IterableDataset> dataset, std::int64_t rows, Group group, UnevenData uneven, Sample example)
    : dataset_(std::move(dataset)), rows_(rows), group_(std::move(group)), uneven_(uneven), last_(std::move(example)) {
  if (!dataset_ || rows < 1) throw InvalidArgument(concat("a stream loader with batches of ", rows, " rows; it needs a dataset and at least 1 row"));
}

std::optional<StreamBatch> StreamLoader::next() {
  std::vector<Sample> samples;
  std::vector<at::Tensor> stacked;
  std::string failure;
  try {
    while (!ended_ && static_cast<std::int64_t>(samples.size()) < rows_) {
      auto sample = dataset_->next();
      if (!sample) {
        ended_ = true;
        break;
      }
      ++taken_;
      samples.push_back(std::move(*sample));
    }
    // Before the ranks agree, so that samples that make no batch are an error on all of them.
    for (std::size_t t = 0; !samples.empty() && t < samples.front().size(); ++t) {
      std::vector<at::Tensor> column;
      for (const Sample& s : samples) {
        if (s.size() != samples.front().size() || s[t].sizes() != samples.front()[t].sizes())
          throw InvalidArgument("the samples of a batch differ in their number of tensors or in a shape");
        column.push_back(s[t]);
      }
      stacked.push_back(at::stack(column));
    }
  } catch (const std::exception& e) {
    failure = e.what();
    if (failure.empty()) failure = "unknown";
  } catch (...) {
    failure = "an exception that is no std::exception";
  }

  // {samples, knows the shapes, failed, batch size}: everything that the ranks must agree on before the step.
  const auto n = static_cast<std::int64_t>(samples.size());
  const at::Tensor mine =
      at::tensor({n, static_cast<std::int64_t>(n > 0 || !last_.empty()), static_cast<std::int64_t>(!failure.empty()), rows_}, at::kLong);
  const at::Tensor all = at::empty({4 * group_.size()}, at::kLong);
  group_.all_gather(all, mine, {}, {.name = "stream_loader"});
  const auto* of = all.const_data_ptr<std::int64_t>();
  std::vector<int> empty, partial, shapeless, failed;
  std::int64_t total = 0;
  for (int r = 0; r < group_.size(); ++r, of += 4) {
    total += of[0];
    if (of[0] == 0) empty.push_back(group_.ranks()[r]);
    if (of[0] < of[3]) partial.push_back(group_.ranks()[r]);
    if (!of[1]) shapeless.push_back(group_.ranks()[r]);
    if (of[2]) failed.push_back(group_.ranks()[r]);
  }
  if (!failed.empty())
    throw SampleError(concat("the streams of ranks ", list(failed), " failed at step ", step_,
                             failure.empty() ? "" : concat("; this rank's, after ", taken_, " samples: ", failure)),
                      taken_);
  if (total == 0) return std::nullopt;
  if (!partial.empty()) {
    if (uneven_ == UnevenData::error && static_cast<int>(partial.size()) < group_.size())
      throw UnevenDataError(
          concat("at step ", step_, " ranks ", list(partial), " of group '", group_.name(),
                 "' have no full batch and others have; choose drop, pad or weight_zero, or give every rank the same number of samples"));
    if (uneven_ == UnevenData::error && static_cast<int>(empty.size()) > 0)
      throw UnevenDataError(concat("at step ", step_, " ranks ", list(empty), " of group '", group_.name(),
                                   "' have no sample and others have a few; choose drop, pad or weight_zero"));
    if (uneven_ == UnevenData::drop) {
      ended_ = true;
      return std::nullopt;
    }
    if ((uneven_ == UnevenData::pad || uneven_ == UnevenData::weight_zero) && !shapeless.empty())
      throw UnevenDataError(concat("the streams of ranks ", list(shapeless),
                                   " were empty from the start, so they do not know the shapes; give StreamLoader an example sample"));
  }

  StreamBatch batch;
  batch.step = step_++;
  batch.real = n;
  batch.global_real = total;
  if (!samples.empty()) last_ = samples.back();
  const bool pad = uneven_ == UnevenData::pad && n < rows_;
  batch.rows = pad ? rows_ : n;
  for (std::size_t t = 0; t < last_.size(); ++t) {
    std::vector<at::Tensor> parts;
    if (n > 0) parts.push_back(stacked[t]);
    for (std::int64_t i = n; i < batch.rows; ++i) parts.push_back(last_[t].unsqueeze(0));
    batch.tensors.push_back(parts.empty() ? last_[t].unsqueeze(0).narrow(0, 0, 0) : at::cat(parts));
  }
  if (pad) batch.mask = at::arange(batch.rows).lt(n);
  return batch;
}

std::string StreamLoader::state() const { return concat("tessera-stream-1 ", step_, ' ', taken_); }

void StreamLoader::restore(const std::string& state, bool replay) {
  std::istringstream in(state);
  std::string header;
  std::uint64_t step = 0, taken = 0;
  in >> header >> step >> taken;
  if (!in || header != "tessera-stream-1") throw ConfigurationError("this is no state of a stream loader, or it was cut off");
  if (!replay)
    throw NotAvailable(concat("a stream without positions cannot be resumed after ", taken,
                              " samples. Use a dataset with random access and Loader, or restore(state, replay = true), which reads them again"));
  TORCH_WARN("StreamLoader: reading ", taken, " samples again to come back to step ", step, "; this is right only if the stream repeats itself");
  for (std::uint64_t i = 0; i < taken; ++i)
    if (!dataset_->next()) throw ConfigurationError(concat("the stream ended after ", i, " samples, the state was saved after ", taken));
  step_ = step;
  taken_ = taken;
}

}  // namespace tessera
