// Checkpoints on the disk: who writes what, the manifest, reading boxes, and what damage does.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <map>
#include <numeric>
#include <set>

#include "storage_support.h"
#include "tessera/files/internal/checksum.h"

namespace tessera {
namespace {

using testing::DrawnState;
using testing::Folder;
using testing::latest_checkpoint;

std::string file_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const FileError& e) {
    return e.what();
  }
  ADD_FAILURE() << "no FileError";
  return "";
}

TEST(WritePlan, EveryElementOnceByARankThatHoldsIt) {
  std::mt19937 engine(1);
  for (int i = 0; i < 500; ++i) {
    const int ranks = 1 + static_cast<int>(engine() % 5);
    const DrawnState state = testing::draw_state(engine, ranks, 1 + static_cast<int>(engine() % 6));
    const WritePlan plan = plan_writes(state.held, 1 + engine() % 40);
    std::map<std::size_t, std::vector<Box>> written;
    for (int r = 0; r < ranks; ++r) {
      for (const AssignedBox& a : plan.ranks[r]) {
        bool holds = false;
        for (const HeldShard& h : state.held[r])
          holds = holds || (h.info == plan.entries[a.entry] && intersect(h.box, a.box) == a.box);
        ASSERT_TRUE(holds);
        ASSERT_GT(volume(a.box), 0);
        written[a.entry].push_back(a.box);
      }
    }
    for (std::size_t e = 0; e < plan.entries.size(); ++e)
      ASSERT_NO_THROW(check_boxes(written[e], plan.entries[e], "plan"));
  }
}

TEST(WritePlan, ReplicasShareTheBytesEvenly) {
  std::mt19937 engine(2);
  for (int i = 0; i < 100; ++i) {
    const int ranks = 2 + static_cast<int>(engine() % 7);
    std::vector<std::vector<HeldShard>> held(ranks);
    std::uint64_t total = 0, row = 0;
    // Replicated on all, and a shard on each rank that is not more than its part of it.
    for (int t = 0; t < 5; ++t) {
      const std::int64_t rows = 200 + static_cast<std::int64_t>(engine() % 2000),
                         columns = 1 + static_cast<std::int64_t>(engine() % 9);
      const EntryInfo info{EntryKind::tensor, concat("t", t), 0, "F32", {rows, columns}, {}};
      for (auto& one : held) one.push_back({info, {{0, rows}, {0, columns}}});
      total += static_cast<std::uint64_t>(4 * rows * columns);
      row = std::max(row, static_cast<std::uint64_t>(4 * columns));
    }
    std::int64_t begin = 0;
    std::vector<std::int64_t> parts;
    for (int r = 0; r < ranks; ++r) parts.push_back(static_cast<std::int64_t>(engine() % 100));
    const std::int64_t all = std::accumulate(parts.begin(), parts.end(), std::int64_t{0});
    for (int r = 0; r < ranks; ++r) {
      held[r].push_back(
          {{EntryKind::tensor, "s", 0, "U8", {all}, {}}, {{begin, begin + parts[r]}}});
      begin += parts[r];
    }
    total += static_cast<std::uint64_t>(all);
    const WritePlan plan = plan_writes(held, 1);
    for (int r = 0; r < ranks; ++r) {
      std::uint64_t bytes = 0;
      for (const AssignedBox& a : plan.ranks[r])
        bytes +=
            static_cast<std::uint64_t>(volume(a.box)) * element_bytes(plan.entries[a.entry].dtype);
      ASSERT_LE(bytes, total / ranks + 8 * row) << r << " of " << ranks;
      ASSERT_GE(bytes + 8 * row, total / ranks) << r << " of " << ranks;
    }
  }
}

TEST(WritePlan, PlainTensorsThatDifferAreWrittenByTheirFirstHolder) {
  const std::vector<std::int64_t> shape{4000, 10};
  const auto held_as = [&](const std::string& name, const std::string& layout, const Box& box) {
    return HeldShard{{EntryKind::tensor, name, 0, "F32", shape, layout}, box};
  };
  const Box full{{0, 4000}, {0, 10}}, low{{0, 2000}, {0, 10}}, high{{2000, 4000}, {0, 10}};
  std::vector<std::vector<HeldShard>> held;
  for (int r = 0; r < 4; ++r)
    held.push_back({held_as("plain", "", full), held_as("hand", "", r % 2 == 0 ? low : high),
                    held_as("sharded", "{}", full)});
  // The number of ranks that write each entry.
  const auto writers = [&](const std::vector<PlainSums>& sums) {
    std::vector<int> count(3, 0);
    const WritePlan plan = plan_writes(held, 1, sums);
    for (const auto& rank : plan.ranks) {
      std::set<std::size_t> entries;
      for (const AssignedBox& a : rank) entries.insert(a.entry);
      for (const std::size_t e : entries) ++count[e];
    }
    return count;
  };
  const std::vector<PlainSums> same{{1, 5}, {1, 6}, {1, 5}, {1, 6}},
      other{{1, 5}, {1, 6}, {2, 5}, {1, 6}}, hand{{1, 5}, {1, 6}, {1, 7}, {1, 6}};
  EXPECT_EQ(writers(same), writers({}));
  EXPECT_GT(writers(same)[0], 1);
  EXPECT_EQ(writers(same)[1], 4);
  EXPECT_EQ(writers(other)[0], 1);
  EXPECT_GT(writers(other)[1], 2);
  EXPECT_GT(writers(other)[2], 1) << "its layout says that it is replicated";
  EXPECT_GT(writers(hand)[0], 1);
  EXPECT_EQ(writers(hand)[1], 3) << "rank 0 writes all of its box";
  const WritePlan plan = plan_writes(held, 1, other);
  for (const int r : {1, 2, 3})
    for (const AssignedBox& a : plan.ranks[r]) EXPECT_NE(a.entry, 0u);
}

TEST(WritePlan, DisagreementIsRefusedWithTheNames) {
  const EntryInfo info{EntryKind::tensor, "w", 0, "F32", {4, 2}, {}};
  const auto why = [&](const std::vector<std::vector<HeldShard>>& held) {
    try {
      plan_writes(held);
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  EntryInfo other = info;
  other.dtype = "F64";
  const Box full{{0, 4}, {0, 2}};
  EXPECT_NE(why({{{info, full}}, {{other, full}}}).find("rank 1 has F64"), std::string::npos);
  EXPECT_NE(why({{{info, {{0, 3}, {0, 2}}}}, {{info, {{2, 4}, {0, 2}}}}}).find("overlap"),
            std::string::npos);
  EXPECT_NE(why({{{info, {{0, 2}, {0, 2}}}}, {{info, {{3, 4}, {0, 2}}}}}).find("'w'"),
            std::string::npos);
  EXPECT_NE(why({{{info, full}, {info, full}}}).find("twice"), std::string::npos);
  EXPECT_NE(why({{{info, {{0, 5}, {0, 2}}}}}).find("leaves"), std::string::npos);
}

TEST(Manifest, ComesBackAndAnyChangeIsSeen) {
  Manifest manifest;
  manifest.sequence = 7;
  manifest.ranks = 2;
  manifest.files = {{shard_name(0, 2, "0123456789abcdef"), 100},
                    {shard_name(1, 2, "0123456789abcdef"), 90}};
  manifest.entries = {{{EntryKind::tensor, "w \"\xc3\xa9\"", 0, "F32", {3, 2}, "{}"},
                       {{{{0, 1}, {0, 2}}, 0, 8, 8, 5}, {{{1, 3}, {0, 2}}, 1, 0, 16, ~0ull}}},
                      {{EntryKind::value, "step", 0, "U8", {3}, {}}, {{{{0, 3}}, 0, 16, 3, 1}}},
                      {{EntryKind::rank_value, "rng", 1, "U8", {0}, {}}, {}}};
  const std::string text = to_json(manifest);
  EXPECT_EQ(parse_manifest(text, "x"), manifest);
  for (std::size_t n = 0; n < text.size(); ++n)
    EXPECT_NE(file_error([&] { parse_manifest(text.substr(0, n), "the path"); }).find("the path"),
              std::string::npos);
  for (std::size_t n = 0; n < text.size(); ++n) {
    std::string changed = text;
    changed[n] = static_cast<char>(changed[n] ^ 1 << n % 7);
    file_error([&] { parse_manifest(changed, "x"); });
  }
}

// Names of a manifest are quoted in errors, which are printed to terminals.
TEST(Manifest, NamesWriteNothingOfTheirOwn) {
  Manifest manifest;
  manifest.sequence = 7;
  manifest.ranks = 1;
  manifest.files = {{shard_name(0, 1, "0123456789abcdef"), 100}};
  // Half of it is missing.
  manifest.entries = {{{EntryKind::tensor, "w\x1b[2J\nrank 0: all is well", 0, "F32", {4}, "{}"},
                       {{{{0, 2}}, 0, 8, 8, 5}}}};
  const std::string text = to_json(manifest);
  const std::string why = file_error([&] { parse_manifest(text, "x"); });
  for (const char c : why) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20) << why;
  EXPECT_NE(why.find("w\\x1b[2J"), std::string::npos) << why;
}

TEST(Manifest, RecordsLieInFilesThatAreThere) {
  Manifest manifest;
  manifest.ranks = 1;
  manifest.files = {{shard_name(0, 1, "0123456789abcdef"), 100}};
  manifest.entries = {{{EntryKind::tensor, "w", 0, "F32", {4}, "{}"}, {{{{0, 4}}, 1, 8, 16, 5}}}};
  const std::string why = file_error([&] { parse_manifest(to_json(manifest), "x"); });
  EXPECT_NE(why.find("a record in a file that is not there"), std::string::npos) << why;
}

// As it was written before manifests named their digest; and one of a digest that is not known.
TEST(Manifest, EarlierOnesAreReadAndUnknownDigestsRefused) {
  const std::string body =
      R"({"format":"tessera-checkpoint","version":1,"sequence":3,"ranks":1,"files":)"
      R"([["shard-00000-of-00001.0123456789abcdef.safetensors",96]],"entries":[)"
      "\n"
      R"({"kind":"tensor","name":"w","rank":0,"dtype":"F32","shape":[2,2],"records":)"
      R"([[0,80,16,"00000000000000ff",[0,2,0,2]]]})"
      "\n]}";
  const std::string old = R"({"checksum":"1a9ce82747a32cf7","body":)" + body + "}\n";
  const Manifest manifest = parse_manifest(old, "x");
  EXPECT_EQ(manifest.sequence, 3u);
  ASSERT_EQ(manifest.entries.size(), 1u);
  EXPECT_EQ(manifest.entries[0].records, (std::vector<Record>{{{{0, 2}, {0, 2}}, 0, 80, 16, 255}}));
  const std::string now = to_json(manifest);
  EXPECT_EQ(parse_manifest(now, "x"), manifest);
  std::string other = now.substr(now.find(R"("body":)") + 7);
  other.resize(other.size() - 2);
  const auto digest = other.find("xxh64");
  ASSERT_NE(digest, std::string::npos);
  other.replace(digest, 5, "xxh99");
  EXPECT_NE(file_error([&] {
              parse_manifest(concat(R"({"checksum":")", to_hex(Checksum().add(other).value()),
                                    R"(","body":)", other, "}\n"),
                             "the path");
            }).find("xxh99"),
            std::string::npos);
}

TEST(Manifest, NamesOfFiles) {
  EXPECT_TRUE(is_checkpoint_file(shard_name(3, 4, make_nonce())));
  EXPECT_TRUE(
      is_checkpoint_file(shard_name(123456, 200000, make_nonce()) + ".tmp-" + make_nonce()));
  EXPECT_TRUE(is_checkpoint_file("manifest.json"));
  EXPECT_TRUE(is_checkpoint_file("manifest.json.tmp-0123456789abcdef"));
  for (const char* foreign : {"model.safetensors", "shard-x.safetensors", "notes.txt", "..",
                              "shard-00000-of-00001.0123456789abcdef.txt", "manifest.json.bak"})
    EXPECT_FALSE(is_checkpoint_file(foreign)) << foreign;
}

// Saved by any number of ranks, any box reads the right values and not one byte more.
TEST(SavedCheckpoint, AnyBoxOfAnyLayoutReadsOnlyItsBytes) {
  std::mt19937 engine(3);
  for (int i = 0; i < 60; ++i) {
    const Folder folder;
    const DrawnState state = testing::draw_state(engine, 1 + static_cast<int>(engine() % 4), 4);
    testing::save_drawn(state, folder.path(), "c", 1, FileOperations::system(), 1 + engine() % 30);
    testing::expect_drawn(state, folder.path(), "c");
    for (int k = 0; k < 20; ++k) {
      const SavedCheckpoint saved(local_folder(folder.path()), "c");
      const std::size_t t = engine() % state.shapes.size();
      Box box;
      for (const std::int64_t n : state.shapes[t]) {
        const auto a = static_cast<std::int64_t>(engine() % (n + 1)),
                   b = static_cast<std::int64_t>(engine() % (n + 1));
        box.push_back({std::min(a, b), std::max(a, b)});
      }
      std::vector<std::uint32_t> got(static_cast<std::size_t>(volume(box)));
      saved.read(*saved.manifest().find(EntryKind::tensor, concat("t", t)), box, got.data());
      ASSERT_EQ(got, testing::numbers(state.shapes[t], box, state.bases[t]));
      ASSERT_EQ(saved.bytes_read(), 4 * got.size()) << "an over-read of 1.00";
    }
  }
}

// More files than the process may have open at once.
TEST(SavedCheckpoint, KeepsAFewOfItsFilesOpen) {
  constexpr std::int64_t ranks = 70;
  const Folder folder;
  DrawnState state;
  state.shapes = {{ranks}};
  state.bases = {11};
  const EntryInfo info{EntryKind::tensor, "t0", 0, "U32", {ranks}, {}};
  for (std::int64_t r = 0; r < ranks; ++r) state.held.push_back({{info, {{r, r + 1}}}});
  testing::save_drawn(state, folder.path(), "c", 1, FileOperations::system());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 50;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(SavedCheckpoint::most_open(), 12u);
  std::string why;
  std::uint64_t read = 0;
  try {
    testing::expect_drawn(state, folder.path(), "c");
    const SavedCheckpoint saved(local_folder(folder.path()), "c");
    const Entry& entry = *saved.manifest().find(EntryKind::tensor, "t0");
    std::vector<char> scratch;
    for (std::size_t i = 0; i < entry.records.size(); ++i) saved.verify(entry, i, scratch);
    read = saved.bytes_read();
  } catch (const FileError& e) {
    why = e.what();
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(why, "");
  EXPECT_EQ(read, 4u * ranks) << "also of those that were closed";
}

TEST(SavedCheckpoint, EveryBitFlipAndEveryTruncationIsFoundAndNamed) {
  std::mt19937 engine(4);
  const Folder folder;
  const DrawnState old = testing::draw_state(engine, 2, 3),
                   state = testing::draw_state(engine, 3, 5);
  testing::save_drawn(old, folder.path(), "old", 1, FileOperations::system());
  testing::save_drawn(state, folder.path(), "new", 2, FileOperations::system());
  EXPECT_EQ(latest_checkpoint(folder.path()), "new");
  for (const std::string& name : names_in(folder / "new")) {
    const std::string path = folder / "new/" + name, good = testing::contents(path);
    const std::uint64_t header =
        name == kManifestName
            ? 0
            : 8 + static_cast<unsigned char>(good[0]) + 256 * static_cast<unsigned char>(good[1]);
    for (std::size_t n = 0; n < good.size(); n += 1 + engine() % 7) {
      testing::put(path, good.substr(0, n));
      EXPECT_NE(file_error([&] { SavedCheckpoint(local_folder(folder.path()), "new"); }).find(name),
                std::string::npos);
      std::vector<std::string> problems;
      EXPECT_EQ(latest_checkpoint(folder.path(), &problems), "old");
      EXPECT_EQ(problems.size(), 1u);
    }
    testing::put(path, good + "x");
    EXPECT_NE(file_error([&] { SavedCheckpoint(local_folder(folder.path()), "new"); }).find(name),
              std::string::npos);
    for (std::size_t n = header; n < good.size(); n += 1 + engine() % 3) {
      std::string flipped = good;
      flipped[n] = static_cast<char>(flipped[n] ^ 1 << engine() % 8);
      testing::put(path, flipped);
      EXPECT_NE(file_error([&] { testing::expect_drawn(state, folder.path(), "new"); }).find(name),
                std::string::npos)
          << n;
    }
    testing::put(path, good);
    if (name != kManifestName) {
      std::filesystem::rename(path, path + "x");
      EXPECT_NE(file_error([&] { SavedCheckpoint(local_folder(folder.path()), "new"); }).find(name),
                std::string::npos);
      std::filesystem::rename(path + "x", path);
    }
  }
  testing::expect_drawn(state, folder.path(), "new");
  testing::expect_drawn(old, folder.path(), "old");
}

TEST(Catalogue, LatestRemovalAndForeignFiles) {
  std::mt19937 engine(5);
  const Folder folder;
  const auto operations = FileOperations::system();
  const DrawnState state = testing::draw_state(engine, 2, 3);
  EXPECT_EQ(latest_checkpoint(folder / "absent"), std::nullopt);
  for (int s = 1; s <= 3; ++s)
    testing::save_drawn(state, folder.path(), concat("z", 9 - s), s, operations);
  std::filesystem::create_directory(folder / "foreign");
  testing::put(folder / "foreign/model.safetensors", "x");
  testing::put(folder / "file", "x");
  std::filesystem::create_directory(folder / "partial");
  testing::put(folder / "partial/" + shard_name(0, 1, make_nonce()), "half");
  testing::put(folder / "z6/notes.txt", "mine");
  const auto all = list_checkpoints(folder.path());
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all.back().name, "z6");
  EXPECT_NE(file_error([&] { read_manifest(folder.path(), "partial"); }).find("never ended"),
            std::string::npos);
  EXPECT_NE(file_error([&] { read_manifest(folder.path(), "nothing"); }).find("nothing"),
            std::string::npos);
  for (const char* bad : {"", "..", "a/b", ".x"})
    EXPECT_THROW(check_checkpoint_name(bad), InvalidArgument);
  remove_incomplete(*local_folder(folder.path(), operations));
  EXPECT_FALSE(std::filesystem::exists(folder / "partial"));
  EXPECT_TRUE(std::filesystem::exists(folder / "foreign/model.safetensors"));
  remove_checkpoint(*local_folder(folder.path()), "z6");
  EXPECT_EQ(latest_checkpoint(folder.path()), "z7");
  EXPECT_EQ(names_in(folder / "z6"), std::vector<std::string>{"notes.txt"});
  remove_checkpoint(*local_folder(folder.path()), "z8");
  EXPECT_FALSE(std::filesystem::exists(folder / "z8"));
  // The same name again: the new one replaces the old, whose files go.
  const DrawnState other = testing::draw_state(engine, 3, 3);
  testing::save_drawn(other, folder.path(), "z7", 9, operations);
  testing::expect_drawn(other, folder.path(), "z7");
  EXPECT_EQ(names_in(folder / "z7").size(), read_manifest(folder.path(), "z7").files.size() + 1);
}

// The system finds something there and does not say what, as with a disk error or a stale handle.
TEST(Catalogue, WhatCannotBeLookedAtIsNotAbsent) {
  const Folder folder;
  const auto operations = FileOperations::system();
  DrawnState state;
  state.shapes = {{6}};
  state.bases = {3};
  const EntryInfo info{EntryKind::tensor, "t0", 0, "U32", {6}, {}};
  state.held = {{{info, {{0, 2}}}}, {{info, {{2, 6}}}}};
  testing::save_drawn(state, folder.path(), "a", 4, operations);
  testing::save_drawn(state, folder.path(), "b", 7, operations);
  const std::string manifest = folder / "b/manifest.json";
  std::filesystem::rename(manifest, folder / "kept");
  std::filesystem::create_symlink("manifest.json", manifest);  // to itself
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto files = names_in(folder / "b");
  std::vector<DamagedCheckpoint> damaged;
  std::vector<std::string> unread;
  EXPECT_EQ(list_checkpoints(folder.path(), &damaged).size(), 1u);
  EXPECT_EQ(damaged.size(), 2u) << "b and loop";
  EXPECT_EQ(highest_sequence(*local_folder(folder.path()), unread), 4u);
  EXPECT_EQ(unread.size(), 2u);
  EXPECT_EQ(file_error([&] { read_manifest(folder.path(), "b"); }).find("never ended"),
            std::string::npos);
  EXPECT_EQ(remove_incomplete(*local_folder(folder.path(), operations)).size(), 2u);
  EXPECT_EQ(names_in(folder / "b"), files);
  const std::string nonce = files.back().substr(files.back().find('.') + 1, 16);
  discard_save(*local_folder(folder.path()), "b", nonce);
  EXPECT_EQ(names_in(folder / "b"), files) << "the manifest may name them";
  std::filesystem::remove(manifest);
  std::filesystem::rename(folder / "kept", manifest);
  testing::expect_drawn(state, folder.path(), "b");
  EXPECT_EQ(latest_checkpoint(folder.path()), "b");
}

TEST(Catalogue, OfALinkTheLinkAloneIsRemoved) {
  std::mt19937 engine(7);
  const Folder folder, elsewhere;
  const auto operations = FileOperations::system();
  const DrawnState state = testing::draw_state(engine, 2, 3);
  testing::save_drawn(state, elsewhere.path(), "good", 1, operations);
  std::filesystem::create_directory(elsewhere / "half");
  testing::put(elsewhere / "half/" + shard_name(0, 1, make_nonce()), "half");
  for (const char* name : {"good", "half"})
    std::filesystem::create_symlink(elsewhere / name, folder / name);
  EXPECT_EQ(latest_checkpoint(folder.path()), "good");
  EXPECT_TRUE(remove_incomplete(*local_folder(folder.path(), operations)).empty());
  remove_checkpoint(*local_folder(folder.path()), "good");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"half"});
  EXPECT_EQ(names_in(elsewhere / "half").size(), 1u);
  testing::expect_drawn(state, elsewhere.path(), "good");
}

TEST(Catalogue, NamesAreUtf8) {
  std::mt19937 engine(6);
  const Folder folder;
  const DrawnState state = testing::draw_state(engine, 2, 3);
  for (const char* name : {"caf\xc3\xa9", "caf\xe9"})
    testing::save_drawn(state, folder.path(), name, 1, FileOperations::system());
  EXPECT_THROW(check_checkpoint_name("caf\xe9"), InvalidArgument);
  std::vector<DamagedCheckpoint> damaged;
  const auto all = list_checkpoints(folder.path(), &damaged);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].name, "caf\xc3\xa9");
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_NE(damaged[0].damage.find("UTF-8"), std::string::npos) << damaged[0].damage;
}

}  // namespace
}  // namespace tessera
