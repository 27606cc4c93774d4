#pragma once
// Rows under drawn ids and owners, and drawn graphs on them, for tests of ghosts: the same on every
// rank that draws them.

#include <algorithm>

#include "../support/folder.h"
#include "fields.h"
#include "tessera/ops/ghosts/ghost_plan.h"

namespace tessera::test {

using ::tessera::testing::thrown;
using Ids = std::vector<std::int64_t>;

inline at::Tensor index_of(const Ids& ids) { return torch::tensor(ids, at::kLong); }

// Rows 0 .. n - 1 under drawn ids and owners, the same on every rank that draws it.
struct Cut {
  Ids id;                          // of each row
  std::vector<Ids> owned, ghosts;  // of each rank, as rows of the whole

  Cut(Draw& draw, int ranks, int most_rows = 14, int most_ghosts = 12)
      : owned(ranks), ghosts(ranks) {
    const int n = draw.below(most_rows);
    const std::int64_t first = draw.chance(50) ? 0 : (std::int64_t{1} << 33) + draw.below(100);
    for (int i = 0; i < n; ++i) id.push_back(first + 7 * i);
    for (int i = n; i > 1; --i) std::swap(id[i - 1], id[draw.below(i)]);
    std::vector<int> owner(n);
    const int without = draw.chance(40) ? draw.below(ranks) : -1;
    for (int i = 0; i < n; ++i) {
      do owner[i] = draw.below(ranks);
      while (owner[i] == without && ranks > 1);
      owned[owner[i]].push_back(i);
    }
    for (int r = 0; r < ranks; ++r) {
      for (int k = n == 0 ? 0 : draw.below(most_ghosts); k > 0; --k) {
        const int i = draw.below(n);
        if (owner[i] != r) ghosts[r].push_back(i);  // some of them again
      }
    }
  }
  Ids ids(const Ids& rows) const {
    Ids all;
    for (const auto i : rows) all.push_back(id[i]);
    return all;
  }
  // Owned rows, then ghosts, as rows of the whole.
  Ids local(int rank) const {
    Ids rows = owned[rank];
    rows.insert(rows.end(), ghosts[rank].begin(), ghosts[rank].end());
    return rows;
  }
  // How many ranks hold each row, with what multiplicity.
  at::Tensor copies(at::ScalarType type) const {
    at::Tensor all = at::zeros({static_cast<std::int64_t>(id.size())}, type);
    for (int r = 0; r < static_cast<int>(owned.size()); ++r) {
      const at::Tensor rows = index_of(local(r));
      all.index_add_(0, rows, at::ones(rows.sizes(), type));
    }
    return all;
  }
  GhostPlan plan(const DeviceMesh& mesh) const {
    const int me = mesh.all().rank();
    return {mesh, ids(owned[me]), ids(ghosts[me])};
  }
};

inline Shape with_rows(std::int64_t rows, Shape row) {
  row.insert(row.begin(), rows);
  return row;
}

inline Shape draw_row(Draw& draw) {
  const std::vector<Shape> rows{{}, {1}, {3}, {2, 3}, {0}, {4, 1, 2}};
  return draw.of(rows);
}

// Edges of a drawn graph: loops, and edges that come again.
struct Graph {
  Ids source, target;  // rows of the whole
  Graph(Draw& draw, std::int64_t nodes) {
    for (int e = nodes == 0 ? 0 : draw.below(40); e > 0; --e) {
      source.push_back(draw.below(static_cast<int>(nodes)));
      target.push_back(draw.chance(10) ? source.back() : draw.below(static_cast<int>(nodes)));
      if (draw.chance(10)) {  // the edge again
        source.push_back(source.back());
        target.push_back(target.back());
      }
    }
  }
};

}  // namespace tessera::test
