#pragma once
// Documents of unequal lengths, packed one after the other into rows of tokens, and where to cut
// such rows over ranks so that attention inside the documents costs each rank the same.
//
//   // a row of 8 tokens on 2 ranks, causal: 1 + 2, then 1 + 2 + 3 + 4 + 5 + 6 pairs
//   cut_documents({{2, 6}}, 2, {.causal = true}).sizes -> {6, 2}, of 13 and 11 pairs

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The documents' lengths, one list for each row, or one that holds for all rows. What is left of a
/// row after its last document is padding. A document may be empty.
using DocumentLengths = std::vector<std::vector<std::int64_t>>;

/// Where each document of a row of `tokens` begins, and where the last one ends: {3, 0, 2} ->
/// {0, 3, 3, 5}. Throws InvalidArgument for a negative length, and for documents longer than the
/// row.
std::vector<std::int64_t> document_bounds(std::span<const std::int64_t> lengths,
                                          std::int64_t tokens);

struct DocumentCutOptions {
  /// A token attends to those before it in its document and to itself; else to all of its document.
  bool causal = false;
  /// What a token costs besides, where a pair of query and key costs 1. Of a transformer's layer
  /// of `width` channels with an inner width of 4 * width: 6 * width, for its products do 24 *
  /// width^2 operations a token, and 4 * width a pair.
  double token_cost = 0;
  /// Length of the rows; 0: that of the longest row's documents together.
  std::int64_t tokens = 0;
  /// The most tokens of a part, for its memory; 0: no limit.
  std::int64_t most_tokens = 0;
};

struct DocumentCut {
  /// Tokens of each part, in order: sizes of a ShardSpec's dim of tokens. They may be 0.
  std::vector<std::int64_t> sizes;
  /// The largest cost of a part over the mean; 1 where nothing costs anything. `imbalance_of_even`:
  /// what parts of equally many tokens would have.
  double imbalance = 1, imbalance_of_even = 1;
};

/// The cut into `parts` consecutive parts of which the dearest is as cheap as can be, to the
/// rounding of doubles; all rows are cut at the same tokens, and their costs are added. O(rows *
/// tokens). Throws as document_bounds(), and InvalidArgument for fewer than one part or row, a
/// token cost that is negative or not finite, and parts of `most_tokens` that do not hold the row.
DocumentCut cut_documents(const DocumentLengths& rows, int parts,
                          const DocumentCutOptions& options = {});

}  // namespace tessera
