#include "tessera/partition/halo.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

const Sharding kRows({7, 4}, {3}, {{{0}, Partition({3, 0, 4})}, {}});

Box grown(int position) {
  Box box = kRows.box(position);
  if (volume(box) == 0) return {{0, 0}, {0, 0}};
  box[0] = {box[0].begin - 1, box[0].end + 1};
  return box;
}

TEST(HaloPicture, TextHasOneLinePerPiece) {
  EXPECT_EQ(to_string(halo_plan(kRows, {Edge::circular, Edge::zero}, grown, 0)),
            "needs [-1, 4) x [0, 4); sends 8 elements, receives 8\n"
            "  sends to 2: [2, 3) x [0, 4)\n"
            "  sends to 2: [0, 1) x [0, 4) as [7, 8) x [0, 4)\n"
            "  receives from 2: [6, 7) x [0, 4) as [-1, 0) x [0, 4)\n"
            "  receives from 2: [3, 4) x [0, 4)\n"
            "  copies: [0, 3) x [0, 4)\n");
}

TEST(HaloPicture, EveryPositionHasAPanelAndEveryPieceARectangle) {
  const std::string svg = visualize_halo(kRows, {Edge::reflect, Edge::zero}, grown);
  for (const char* part : {"<svg", "rank 0: 4 elements received, 4 sent",
                           "rank 1: 0 elements received", "rank 2: 4 elements received",
                           "from rank 2", "own: [1, 2) x [0, 4) as ~[-1, 0) x [0, 4)", "</svg>"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  for (const auto& [rows, columns] :
       std::vector<std::pair<int, int>>{{0, 2}, {2, 0}, {-1, 1}, {0, -2}, {1, 1}})
    EXPECT_THROW(visualize_halo(kRows, {Edge::zero, Edge::zero}, grown, rows, columns),
                 InvalidArgument);
}

TEST(Difference, CoversTheBoxWithoutTheCoreOnce) {
  const Box box{{0, 5}, {-2, 3}}, core{{1, 9}, {0, 2}};
  std::int64_t cells = 0;
  for (const Box& strip : difference(box, core)) {
    cells += volume(strip);
    EXPECT_EQ(volume(intersect(strip, core)), 0);
    EXPECT_EQ(intersect(strip, box), strip);
  }
  EXPECT_EQ(cells, 25 - 8);
  EXPECT_EQ(difference(box, {{7, 9}, {0, 1}}), std::vector<Box>{box});
  EXPECT_TRUE(difference(core, core).empty());
}

}  // namespace
}  // namespace tessera
