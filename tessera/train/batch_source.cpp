#include "tessera/train/batch_source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

namespace {

std::uint64_t number_in(const std::string& text, const std::string& what) {
  const auto n = parse_number(text);
  if (!n) throw ConfigurationError("'", text.substr(0, 60), "' is no saved position of ", what);
  return *n;
}

class LoaderBatches final : public BatchSource {
 public:
  using Make = std::function<MicroBatch(LoadedBatch)>;
  LoaderBatches(Loader& loader, Make make)
      : loader_(loader), make_(std::move(make)), epoch_(loader.next_epoch()) {}
  std::optional<MicroBatch> next() override {
    if (loader_.next_epoch() != epoch_) return std::nullopt;
    LoadedBatch loaded = loader_.next();
    if (make_) return make_(std::move(loaded));
    return MicroBatch{std::move(loaded)};
  }
  void start_epoch(std::uint64_t) override { epoch_ = loader_.next_epoch(); }
  std::string state() const override { return concat(epoch_, "\n", loader_.state()); }
  void restore(const std::string& state) override {
    const auto line = state.find('\n');
    if (line == std::string::npos)
      throw ConfigurationError("a saved position of a loader without the epoch in its first line");
    const std::uint64_t epoch = number_in(state.substr(0, line), "a loader");
    loader_.restore(state.substr(line + 1));
    epoch_ = epoch;
  }
  bool ended() override { return loader_.next_epoch() != epoch_; }
  // Every rank computes the same order.
  bool ends_together() const override { return true; }
  bool shared_state() const override { return true; }
  void check(Strategy& strategy) override {
    if (const DistributedManager* manager = strategy.manager())
      loader_.require_agreement(manager->group(strategy.global_ranks()));
  }

 private:
  Loader& loader_;
  Make make_;
  std::uint64_t epoch_;
};

class StreamBatches final : public BatchSource {
 public:
  StreamBatches(StreamLoader& loader, bool replay) : loader_(loader), replay_(replay) {}
  std::optional<MicroBatch> next() override {
    auto loaded = loader_.next();
    if (!loaded) return std::nullopt;
    return MicroBatch{std::move(*loaded)};
  }
  void start_epoch(std::uint64_t epoch) override {
    if (epoch > 0)
      throw InvalidArgument("epoch ", epoch,
                            " of a stream, which has one end; limit the "
                            "epochs to 1, or count steps");
  }
  std::string state() const override { return loader_.state(); }
  void restore(const std::string& state) override { loader_.restore(state, replay_); }
  bool rewinds() const override { return replay_ || loader_.sharded(); }
  bool shared_state() const override { return loader_.sharded(); }
  bool ends_together() const override { return true; }

 private:
  StreamLoader& loader_;
  bool replay_;
};

class ListedBatches final : public BatchSource {
 public:
  explicit ListedBatches(std::vector<MicroBatch> batches) : batches_(std::move(batches)) {}
  std::optional<MicroBatch> next() override {
    if (at_ >= batches_.size()) return std::nullopt;
    return batches_[at_++];
  }
  void start_epoch(std::uint64_t) override { at_ = 0; }
  std::string state() const override { return concat(at_); }
  void restore(const std::string& state) override {
    const std::uint64_t at = number_in(state, "a list of batches");
    if (at > batches_.size())
      throw ConfigurationError("the saved position is batch ", at, " of a list of ",
                               batches_.size());
    at_ = at;
  }
  std::optional<std::uint64_t> remaining() const override { return batches_.size() - at_; }

 private:
  std::vector<MicroBatch> batches_;
  std::size_t at_ = 0;
};

class MadeBatches final : public BatchSource {
 public:
  using Make = std::function<std::optional<MicroBatch>(std::uint64_t, std::uint64_t)>;
  explicit MadeBatches(Make make) : make_(std::move(make)) {}
  std::optional<MicroBatch> next() override {
    auto batch = ahead_ ? *std::exchange(ahead_, std::nullopt) : make_(epoch_, at_);
    if (batch) ++at_;
    return batch;
  }
  bool ended() override {
    if (!ahead_) ahead_ = make_(epoch_, at_);
    return !*ahead_;
  }
  void start_epoch(std::uint64_t epoch) override {
    epoch_ = epoch;
    at_ = 0;
    ahead_.reset();
  }
  std::string state() const override { return concat(epoch_, " ", at_); }
  void restore(const std::string& state) override {
    const auto space = state.find(' ');
    if (space == std::string::npos)
      throw ConfigurationError("a saved position of a function of batches without two numbers");
    const std::uint64_t epoch = number_in(state.substr(0, space), "a function of batches");
    at_ = number_in(state.substr(space + 1), "a function of batches");
    epoch_ = epoch;
    ahead_.reset();
  }

 private:
  Make make_;
  std::uint64_t epoch_ = 0, at_ = 0;
  /// What next() will give, if ended() had to ask.
  std::optional<std::optional<MicroBatch>> ahead_;
};

at::Tensor without_rows(const at::Tensor& t) {
  return t.dim() == 0 ? t : t.narrow(0, 0, 0).clone();
}

}  // namespace

BatchSource::~BatchSource() = default;

std::shared_ptr<BatchSource> batches_of(Loader& loader,
                                        std::function<MicroBatch(LoadedBatch)> make) {
  return std::make_shared<LoaderBatches>(loader, std::move(make));
}

std::shared_ptr<BatchSource> batches_of(StreamLoader& loader, bool replay) {
  return std::make_shared<StreamBatches>(loader, replay);
}

std::shared_ptr<BatchSource> batches_of(std::vector<MicroBatch> batches) {
  return std::make_shared<ListedBatches>(std::move(batches));
}

std::shared_ptr<BatchSource> batches_of(
    std::function<std::optional<MicroBatch>(std::uint64_t, std::uint64_t)> make) {
  if (!make) throw InvalidArgument("batches_of: the function is empty");
  return std::make_shared<MadeBatches>(std::move(make));
}

MicroBatch make_batch(std::vector<at::Tensor> tensors) {
  if (tensors.empty() || tensors[0].dim() == 0)
    throw InvalidArgument("make_batch: the first tensor has the rows in its first dim");
  MicroBatch batch;
  batch.rows = batch.real = tensors[0].size(0);
  batch.tensors = std::move(tensors);
  return batch;
}

AgreedBatches::AgreedBatches(std::shared_ptr<BatchSource> source, Strategy& strategy,
                             UnevenData uneven)
    : source_(std::move(source)), strategy_(strategy), uneven_(uneven) {
  if (!source_) throw InvalidArgument("batches from no source");
}

void AgreedBatches::start_epoch(std::uint64_t epoch) {
  source_->start_epoch(epoch);
  resume(epoch, 0);
}

void AgreedBatches::rewind() {
  if (!beginning_)
    beginning_ = source_->state();
  else if (source_->rewinds())
    source_->restore(*beginning_);
  start_epoch(0);
}

void AgreedBatches::resume(std::uint64_t epoch, std::uint64_t index) {
  epoch_ = epoch;
  index_ = index;
  if (!checked_) source_->check(strategy_);
  checked_ = true;
  agree_on_length();
}

void AgreedBatches::agree_on_length() {
  total_.reset();
  even_ = false;
  if (source_->ends_together() && strategy_.size() > 1) return;
  const auto mine = source_->remaining();
  if (strategy_.size() == 1) {
    if (mine) total_ = index_ + *mine;
    return;
  }
  // The most and the fewest; -1: not known.
  const auto known = mine ? static_cast<double>(*mine) : -1.0;
  const auto bounds = strategy_.reduced({known, -known}, ReduceOp::max);
  const double most = bounds[0], fewest = -bounds[1];
  if (fewest < 0) return;  // a rank that does not know: agreed before each batch
  even_ = most == fewest;
  if (!even_ && uneven_ == UnevenData::error) {
    refuse(concat("they have ", static_cast<std::uint64_t>(fewest), " to ",
                  static_cast<std::uint64_t>(most), " batches left, ", *mine, " here"));
  }
  total_ = index_ + static_cast<std::uint64_t>(uneven_ == UnevenData::drop ? fewest : most);
}

void AgreedBatches::refuse(const std::string& which) const {
  throw UnevenDataError("epoch ", epoch_, ", batch ", index_,
                        ": the ranks have different numbers of batches: ", which,
                        "; choose drop, pad or weight_zero to go on");
}

bool AgreedBatches::ended() {
  if (total_ || strategy_.size() == 1 || source_->ends_together())
    return known_end() || (!total_ && source_->ended());
  return uneven_ == UnevenData::drop ? strategy_.any(source_->ended())
                                     : strategy_.all(source_->ended());
}

std::optional<MicroBatch> AgreedBatches::next() {
  if (known_end()) return std::nullopt;
  std::optional<MicroBatch> mine = source_->next();
  if (strategy_.size() > 1 && !source_->ends_together()) mine = filled(std::move(mine));
  if (!mine) return std::nullopt;
  mine->index = index_++;
  return mine;
}

std::optional<MicroBatch> AgreedBatches::filled(std::optional<MicroBatch> mine) {
  if (even_) return mine;
  const bool fills = uneven_ == UnevenData::pad || uneven_ == UnevenData::weight_zero;
  // Where the lengths are known, so is who lacks one: nobody if the rest is dropped. With `pad` and
  // `weight_zero` ranks still have to know whether one of them has no shape to go by.
  if (total_ && !fills) return mine;
  if (total_ && last_) {  // no rank has one without the others: it is set below, on all
    if (mine) last_ = *mine;
  } else {
    const auto all =
        strategy_.reduced({mine ? 1.0 : 0.0, !mine && !last_ ? 1.0 : 0.0}, ReduceOp::sum);
    const int have = static_cast<int>(all[0]);
    if (have == 0) return std::nullopt;
    if (have < strategy_.size() && !fills) {
      if (uneven_ == UnevenData::drop) return std::nullopt;
      std::vector<std::string> ended;
      const auto told = strategy_.all_gather(std::string(mine ? "1" : ""));
      for (std::size_t r = 0; r < told.size(); ++r)
        if (told[r].empty()) ended.push_back(concat(r));
      refuse(concat("ranks ", list(ended), " have ended"));
    }
    if (mine) last_ = *mine;
    if (all[1] > 0) learn_shape();
  }
  if (mine) return mine;
  MicroBatch batch = *last_;
  batch.real = 0;
  if (uneven_ == UnevenData::weight_zero) {
    for (at::Tensor& t : batch.tensors) t = without_rows(t);
    batch.rows = 0;
    batch.mask = at::Tensor();
  } else {
    batch.mask = at::zeros({batch.rows}, at::kBool);
  }
  return batch;
}

// A rank that has had no batch yet takes the shapes and names of the first one that has.
void AgreedBatches::learn_shape() {
  TextStream mine;
  if (last_) {
    mine << last_->tensors.size() << '\n';
    for (const at::Tensor& t : last_->tensors) {
      mine << static_cast<int>(t.scalar_type()) << ' ' << t.dim();
      for (const std::int64_t size : t.sizes()) mine << ' ' << size;
      mine << '\n';
    }
    for (const std::string& name : last_->names) mine << name << '\n';
  }
  const auto all = strategy_.all_gather(mine.str());
  if (last_) return;
  for (const std::string& text : all) {
    if (text.empty()) continue;
    MicroBatch batch;
    TextReader in(text);
    int type = 0;
    std::size_t tensors = 0, dims = 0;
    in >> tensors;
    while (batch.tensors.size() < tensors && in >> type >> dims) {
      std::vector<std::int64_t> sizes(dims);
      for (std::int64_t& size : sizes) in >> size;
      batch.tensors.push_back(at::zeros(sizes, static_cast<at::ScalarType>(type)));
    }
    std::string name;
    std::getline(in, name);  // the end of the last line of numbers
    while (std::getline(in, name)) batch.names.push_back(name);
    if (!batch.tensors.empty() && batch.tensors[0].dim() > 0) batch.rows = batch.tensors[0].size(0);
    last_ = std::move(batch);
    return;
  }
}

}  // namespace tessera
