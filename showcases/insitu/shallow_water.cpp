#include "shallow_water.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace insitu {
namespace {

using Cell = std::array<double, fields>;

// Weights 1 + parts, parts, ..., 2: no two blocks alike, and none empty.
std::vector<std::int64_t> uneven(std::int64_t cells, int parts) {
  std::vector<std::int64_t> sizes(parts);
  const std::int64_t weights = static_cast<std::int64_t>(parts) * (parts + 3) / 2;
  for (int p = 0; p < parts; ++p) sizes[p] = cells * (parts + 1 - p) / weights;
  sizes[0] += cells - std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (*std::ranges::min_element(sizes) < 1)
    throw std::invalid_argument("too many ranks for " + std::to_string(cells) + " cells");
  return sizes;
}

// The flux across a face along one direction; `n` is the momentum that points through it, `t` the
// other one.
Cell rusanov(const Cell& left, const Cell& right, int n, int t) {
  const auto flux = [&](const Cell& s) {
    Cell f{};
    const double speed = s[n] / s[0];
    f[0] = s[n];
    f[n] = s[n] * speed + 0.5 * s[0] * s[0];
    f[t] = s[t] * speed;
    return f;
  };
  const auto fastest = [&](const Cell& s) { return std::abs(s[n] / s[0]) + std::sqrt(s[0]); };
  const double speed = std::max(fastest(left), fastest(right));
  const Cell a = flux(left), b = flux(right);
  Cell f{};
  for (int i = 0; i < fields; ++i) f[i] = 0.5 * (a[i] + b[i]) - 0.5 * speed * (right[i] - left[i]);
  return f;
}

}  // namespace

ShallowWater::ShallowWater(MPI_Comm comm, std::int64_t rows, std::int64_t columns) {
  int size = 1, rank = 0;
  MPI_Comm_size(comm, &size);
  MPI_Dims_create(size, 2, grid_.data());
  const int periods[2] = {1, 1};
  MPI_Cart_create(comm, 2, grid_.data(), periods, 0, &comm_);
  MPI_Comm_rank(comm_, &rank);
  MPI_Cart_coords(comm_, rank, 2, where_.data());
  block_rows_ = uneven(rows, grid_[0]);
  block_columns_ = uneven(columns, grid_[1]);
  state_.resize(static_cast<std::size_t>(fields * this->rows() * this->columns()));
  padded_.resize(static_cast<std::size_t>(fields * (this->rows() + 2) * (this->columns() + 2)));
  // Still water with three hills.
  const std::int64_t first_row =
      std::accumulate(block_rows_.begin(), block_rows_.begin() + where_[0], std::int64_t{0});
  const std::int64_t first_column =
      std::accumulate(block_columns_.begin(), block_columns_.begin() + where_[1], std::int64_t{0});
  // down, across, height
  const double hills[3][3] = {{0.3, 0.3, 0.3}, {0.7, 0.55, 0.2}, {0.2, 0.8, 0.25}};
  for (std::int64_t r = 0; r < this->rows(); ++r)
    for (std::int64_t c = 0; c < this->columns(); ++c) {
      double h = 1;
      for (const auto& hill : hills) {
        double dy =
            std::abs(static_cast<double>(first_row + r) / static_cast<double>(rows) - hill[0]);
        double dx = std::abs(static_cast<double>(first_column + c) / static_cast<double>(columns) -
                             hill[1]);
        dy = std::min(dy, 1 - dy);
        dx = std::min(dx, 1 - dx);
        h += hill[2] * std::exp(-(dx * dx + dy * dy) / 0.01);
      }
      state_[r * this->columns() + c] = h;
    }
}

ShallowWater::~ShallowWater() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Comm_free(&comm_);
}

// Rows to the ranks above and below, then columns, corners with them, to the left and right.
void ShallowWater::exchange_halos() {
  const std::int64_t nr = rows(), nc = columns();
  const auto swap = [&](int direction, std::int64_t count, auto&& at) {
    int before = 0, after = 0;
    MPI_Cart_shift(comm_, direction, 1, &before, &after);
    std::vector<double> out(static_cast<std::size_t>(fields * count)), in(out.size());
    for (const bool forward : {true, false}) {
      const std::int64_t last = direction == 0 ? nr : nc, from = forward ? last - 1 : 0,
                         to = forward ? -1 : last;
      for (int f = 0; f < fields; ++f)
        for (std::int64_t i = 0; i < count; ++i) out[f * count + i] = at(f, from, i);
      MPI_Sendrecv(out.data(), static_cast<int>(out.size()), MPI_DOUBLE, forward ? after : before,
                   7, in.data(), static_cast<int>(in.size()), MPI_DOUBLE, forward ? before : after,
                   7, comm_, MPI_STATUS_IGNORE);
      for (int f = 0; f < fields; ++f)
        for (std::int64_t i = 0; i < count; ++i) at(f, to, i) = in[f * count + i];
    }
  };
  swap(0, nc, [&](int f, std::int64_t r, std::int64_t i) -> double& { return padded(f, r, i); });
  swap(1, nr + 2,
       [&](int f, std::int64_t c, std::int64_t i) -> double& { return padded(f, i - 1, c); });
}

void ShallowWater::step() {
  const std::int64_t nr = rows(), nc = columns();
  for (int f = 0; f < fields; ++f)
    for (std::int64_t r = 0; r < nr; ++r)
      std::copy_n(&state_[(f * nr + r) * nc], nc, &padded(f, r, 0));
  exchange_halos();
  const auto cell = [&](std::int64_t r, std::int64_t c) {
    return Cell{padded(0, r, c), padded(1, r, c), padded(2, r, c)};
  };
  for (std::int64_t r = 0; r < nr; ++r)
    for (std::int64_t c = 0; c < nc; ++c) {
      const Cell here = cell(r, c);
      const Cell west = rusanov(cell(r, c - 1), here, 1, 2),
                 east = rusanov(here, cell(r, c + 1), 1, 2);
      const Cell north = rusanov(cell(r - 1, c), here, 2, 1),
                 south = rusanov(here, cell(r + 1, c), 2, 1);
      for (int f = 0; f < fields; ++f)
        state_[(f * nr + r) * nc + c] =
            here[f] - time_step_ * (east[f] - west[f] + south[f] - north[f]);
    }
  ++steps_;
}

double ShallowWater::mass() const {
  double mine = std::accumulate(state_.begin(), state_.begin() + rows() * columns(), 0.0), all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, comm_);
  return all;
}

}  // namespace insitu
