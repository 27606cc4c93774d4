#include "waves.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

namespace pillar {
namespace {

using State = std::array<double, fields>;

// Through a face whose normal is as long as it.
State rusanov(const State& left, const State& right, const std::array<double, 2>& normal) {
  const double length = std::hypot(normal[0], normal[1]);
  const auto through = [&](const State& s) {
    return (s[1] * normal[0] + s[2] * normal[1]) / s[0];  // volume of a unit of height
  };
  const auto flux = [&](const State& s) {
    const double q = through(s), pressure = 0.5 * s[0] * s[0];
    return State{s[0] * q, s[1] * q + pressure * normal[0], s[2] * q + pressure * normal[1]};
  };
  const auto fastest = [&](const State& s) {
    return std::abs(through(s)) + std::sqrt(s[0]) * length;
  };
  const double speed = std::max(fastest(left), fastest(right));
  const State a = flux(left), b = flux(right);
  State f{};
  for (int i = 0; i < fields; ++i) f[i] = 0.5 * (a[i] + b[i]) - 0.5 * speed * (right[i] - left[i]);
  return f;
}

State mirrored(const State& s, const std::array<double, 2>& normal) {
  const double twice =
      2 * (s[1] * normal[0] + s[2] * normal[1]) / (normal[0] * normal[0] + normal[1] * normal[1]);
  return {s[0], s[1] - twice * normal[0], s[2] - twice * normal[1]};
}

}  // namespace

Waves::Waves(MPI_Comm comm, const Cells& cells, const std::vector<int>& owner) : comm_(comm) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  if (owner.size() != cells.area.size() ||
      std::ranges::any_of(owner, [&](int o) { return o < 0 || o >= size; }))
    throw std::invalid_argument("each cell is owned by a rank of the communicator");
  for (std::int64_t c = 0; c < cells.size(); ++c)
    if (owner[c] == rank) owned_.push_back(c);
  // By peer: what it needs of this rank's cells, and this rank of its.
  std::map<int, std::array<std::set<std::int64_t>, 2>> needed;
  for (const Face& face : cells.faces)
    for (const auto& [here, there] :
         {std::pair(face.left, face.right), std::pair(face.right, face.left)})
      if (face.right >= 0 && owner[here] == rank && owner[there] != rank) {
        needed[owner[there]][0].insert(here);
        needed[owner[there]][1].insert(there);
      }
  std::map<std::int64_t, std::int64_t> local;
  for (const std::int64_t c : owned_) local.emplace(c, local.size());
  for (const auto& [peer, both] : needed) {
    for (const std::int64_t c : both[1]) local.emplace(c, local.size());
    Peer& p = peers_.emplace_back(Peer{peer, {}, {}});
    for (const std::int64_t c : both[0]) p.sent.push_back(local.at(c));
    for (const std::int64_t c : both[1]) p.received.push_back(local.at(c));
  }
  double least = 1e300;  // of area over perimeter, of all cells
  std::vector<double> perimeter(cells.area.size());
  for (const Face& face : cells.faces) {
    const double length = std::hypot(face.normal[0], face.normal[1]);
    perimeter[face.left] += length;
    if (face.right >= 0) perimeter[face.right] += length;
    const auto left = local.find(face.left);
    const auto right = face.right < 0 ? left : local.find(face.right);
    if (left == local.end() || right == local.end()) continue;
    faces_.push_back({left->second, face.right < 0 ? -1 : right->second, face.normal});
  }
  for (std::size_t c = 0; c < perimeter.size(); ++c)
    least = std::min(least, cells.area[c] / perimeter[c]);
  time_step_ = 0.5 * least;  // waves are slower than 2
  all_.resize(fields * local.size());
  const double hills[2][3] = {{0.25, 0.5, 0.25}, {1.6, 0.3, 0.2}};  // across, down, height
  for (const std::int64_t c : owned_) {
    double h = 1;
    for (const auto& hill : hills)
      h += hill[2] * std::exp(-(std::pow(cells.centre[c][0] - hill[0], 2) +
                                std::pow(cells.centre[c][1] - hill[1], 2)) /
                              0.015);
    area_.push_back(cells.area[c]);
    state_.insert(state_.end(), {h, 0, 0});
  }
}

void Waves::exchange() {
  std::copy(state_.begin(), state_.end(), all_.begin());
  std::vector<MPI_Request> requests(2 * peers_.size());
  std::vector<std::vector<double>> out(peers_.size()), in(peers_.size());
  for (std::size_t p = 0; p < peers_.size(); ++p) {
    for (const std::int64_t c : peers_[p].sent)
      out[p].insert(out[p].end(), &all_[fields * c], &all_[fields * c] + fields);
    in[p].resize(fields * peers_[p].received.size());
    MPI_Irecv(in[p].data(), static_cast<int>(in[p].size()), MPI_DOUBLE, peers_[p].rank, 7, comm_,
              &requests[2 * p]);
    MPI_Isend(out[p].data(), static_cast<int>(out[p].size()), MPI_DOUBLE, peers_[p].rank, 7, comm_,
              &requests[2 * p + 1]);
  }
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  for (std::size_t p = 0; p < peers_.size(); ++p)
    for (std::size_t i = 0; i < peers_[p].received.size(); ++i)
      std::copy_n(&in[p][fields * i], fields, &all_[fields * peers_[p].received[i]]);
}

void Waves::step() {
  exchange();
  const auto cells = static_cast<std::int64_t>(owned_.size());
  const auto at = [&](std::int64_t c) {
    return State{all_[fields * c], all_[fields * c + 1], all_[fields * c + 2]};
  };
  for (const Face& face : faces_) {
    const State left = at(face.left),
                right = face.right < 0 ? mirrored(left, face.normal) : at(face.right);
    const State f = rusanov(left, right, face.normal);
    for (int i = 0; i < fields; ++i) {
      if (face.left < cells) state_[fields * face.left + i] -= time_step_ / area_[face.left] * f[i];
      if (face.right >= 0 && face.right < cells)
        state_[fields * face.right + i] += time_step_ / area_[face.right] * f[i];
    }
  }
}

double Waves::mass() const {
  double mine = 0, all = 0;
  for (std::size_t c = 0; c < area_.size(); ++c) mine += area_[c] * state_[fields * c];
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_SUM, comm_);
  return all;
}

}  // namespace pillar
