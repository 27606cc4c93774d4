// ZarrSource against plain indexing of the numbers that were written, in both formats. (What the
// package zarr writes is read in tests/python/test_sources.py.)

#include "tessera/data/sources/zarr_source.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tessera/data/loader.h"
#include "tessera/data/sources/source_dataset.h"
#include "tessera/partition/partition.h"
#include "zarr_array.h"

namespace tessera::zarr_source_test {
namespace {

using testing::thrown;

TEST(ZarrSource, DrawnArraysEqualPlainIndexing) {
  std::mt19937_64 random(5);
  const auto upto = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n + 1));
  };
  std::vector<std::string> compressors{""};
#ifdef TESSERA_HAS_ZSTD
  compressors.emplace_back("zstd");
#endif
#ifdef TESSERA_HAS_BLOSC
  compressors.emplace_back("blosc");
#endif
#ifdef TESSERA_HAS_ZLIB
  compressors.insert(compressors.end(), {"gzip", "zlib"});
#endif
  torch::manual_seed(5);
  int sparse = 0;
  for (const std::string type : {"<f2", "<f4", ">f4", "<f8", ">f8", "|i1", "<i2", ">i2", "<i4",
                                 "<i8", ">i8", "|u1", "<u2", ">u4", "<u8", "|b1"})
    for (int n = 0; n < 24; ++n) {
      Layout as{.format = n % 2 + 2, .type = type};
      Sizes shape;
      for (std::int64_t d = upto(4); d > 0; --d) {
        shape.push_back(1 + upto(8));
        as.chunk.push_back(1 + upto(4));
      }
      as.compressor = compressors[random() % compressors.size()];
      if (as.format == 3 && as.compressor == "zlib") as.compressor = "gzip";
      as.separator = upto(1) == 0 ? "." : "/";
      as.column_major = as.format == 2 && upto(2) == 0;
      as.sparse = upto(1) == 0;
      at::Tensor data = torch::randint(0, type == "|b1" ? 2 : 100, shape, at::kDouble);
      if (as.sparse && !shape.empty()) data.narrow(0, 0, (shape[0] + 1) / 2).zero_();
      const Folder folder;
      write_array(folder / "x.zarr", "group/u", data, as);
      if (as.format == 3) write(folder / "x.zarr/group/zarr.json", R"({"node_type": "group"})");
      if (as.format == 2) write(folder / "x.zarr/group/.zgroup", "{}");
      // Of a kept size below one chunk, of some chunks and of all.
      const ZarrSource source(folder / "x.zarr", n % 3 == 0 ? 0 : n % 3 == 1 ? 200 : 64 << 20);
      EXPECT_EQ(source.variables(), (std::vector<std::string>{"group/u"}));
      EXPECT_EQ(source.info("group/u").shape, shape);
      EXPECT_EQ(source.chunk_shape("group/u"), as.chunk);
      for (int slabs = 0; slabs < 12; ++slabs) {
        Hyperslab slab;
        at::Tensor expected = data;
        for (std::size_t i = 0; i < shape.size(); ++i) {
          const auto d = static_cast<std::int64_t>(i);
          const std::int64_t start = upto(shape[i]), stride = 1 + upto(6);
          const std::int64_t most = start < shape[i] ? (shape[i] - 1 - start) / stride + 1 : 0;
          slab.start.push_back(start);
          slab.count.push_back(upto(most));
          slab.stride.push_back(stride);
          expected = expected.slice(d, start, std::nullopt, stride).narrow(d, 0, slab.count[i]);
        }
        const at::Tensor got = source.read("group/u", slab, {.dtype = at::kDouble});
        ASSERT_TRUE(got.equal(expected)) << metadata(shape, as) << " at " << list(slab.start)
                                         << list(slab.count) << list(slab.stride);
      }
      sparse += as.sparse;
    }
  EXPECT_GT(sparse, 50);
}

// Rows of every sample over ranks, uneven and not along the chunks, some without any.
TEST(ZarrSource, RanksReadTheirRows) {
  const Folder folder;
  torch::manual_seed(3);
  const at::Tensor data = torch::randn({9, 7, 5}, at::kDouble);
  write_array(folder.path(), "u", data, {.chunk = {4, 3, 2}});
  for (const Sizes& sizes : {Sizes{7}, Sizes{3, 4}, Sizes{5, 0, 2}, Sizes{1, 1, 4, 1}}) {
    const Mesh mesh({{"domain", static_cast<int>(sizes.size())}});
    auto order =
        std::make_shared<FixedOrder>(SampleOrderOptions{.samples = 9, .seed = 2}, BatchSchedule(4));
    std::vector<std::vector<at::Tensor>> parts(3);
    std::int64_t begin = 0;
    for (std::size_t rank = 0; rank < sizes.size(); begin += sizes[rank++]) {
      auto source = std::make_shared<ZarrSource>(folder.path());
      auto rows = std::make_shared<SourceDataset>(
          source,
          std::vector<SourceField>{
              {"u", {.start = {0, begin}, .count = {9, sizes[rank]}}, {.dtype = at::kDouble}}});
      Loader loader({rows}, order, batch_mapping(mesh, {}), static_cast<int>(rank), {.workers = 2});
      for (auto& step : parts) step.push_back(loader.next().tensors[0]);
    }
    auto whole = std::make_shared<TensorDataset>(std::vector<at::Tensor>{data});
    Loader one({whole}, order, batch_mapping(Mesh({{"domain", 1}}), {}), 0);
    for (const auto& step : parts) EXPECT_TRUE(at::cat(step, 1).equal(one.next().tensors[0]));
  }
}

TEST(ZarrSource, ThreadsReadAtOnce) {
  const Folder folder;
  const at::Tensor data = torch::arange(40 * 6, at::kDouble).view({40, 6});
  write_array(folder.path(), "u", data, {.chunk = {3, 4}});
  const ZarrSource source(folder.path(), 600);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::int64_t i = 0; i < 200; ++i)
        EXPECT_TRUE(source.read("u", {{(7 * i + t) % 40}, {1}}, {.dtype = at::kDouble})[0].equal(
            data[(7 * i + t) % 40]));
    });
  for (auto& thread : threads) thread.join();
}

TEST(ZarrSource, NamesAttributesAndDecodes) {
  const Folder folder;
  const at::Tensor stored = torch::tensor({-5, 0, 7, -999}, at::kDouble);
  const std::string scaled = R"("scale_factor": 0.5, "units": "m", "valid_range": [-10, 10])";
  const auto attributes = [&](const std::string& more) { return concat("{", scaled, more, "}"); };
  const std::string dims = R"(, "_ARRAY_DIMENSIONS": ["time"])";
  write_array(folder.path(), "bare", stored,
              {.chunk = {3}, .type = "<i2", .fill = "7", .attributes = attributes("")});
  write_array(folder.path(), "named", stored,
              {.chunk = {3}, .type = "<i2", .fill = "7", .attributes = attributes(dims)});
  write_array(
      folder.path(), "marked", stored,
      {.chunk = {3}, .type = "<i2", .attributes = attributes(dims + R"(, "_FillValue": -5)")});
  const ZarrSource source(folder.path());
  EXPECT_EQ(source.variables(), (std::vector<std::string>{"bare", "marked", "named"}));
  EXPECT_EQ(source.info("bare").dims[0], "dim0");
  EXPECT_EQ(source.info("named").dims[0], "time");
  EXPECT_EQ(source.text("named", "units"), "m");
  EXPECT_EQ(source.number("named", "scale_factor"), 0.5);
  const double nan = std::nan("");
  const auto expect = [&](const std::string& name, const std::vector<double>& values) {
    EXPECT_TRUE(at::allclose(source.read(name, {}, {.dtype = at::kDouble}),
                             torch::tensor(values, at::kDouble), 0, 0, /*equal_nan=*/true))
        << name;
  };
  expect("bare", {-2.5, 0, 3.5, nan});
  expect("named", {-2.5, 0, nan, nan});
  expect("marked", {nan, 0, 3.5, nan});
  EXPECT_TRUE(source.read("named", {}, {.dtype = at::kDouble, .decode = false}).equal(stored));
  // An array alone has its folder's name.
  EXPECT_EQ(ZarrSource(folder / "named").variables(), (std::vector<std::string>{"named"}));
}

TEST(ZarrSource, WhatCannotBeReadIsNamed) {
  const Folder folder;
  const at::Tensor data = torch::arange(8, at::kDouble);
  const Layout second{.chunk = {3}}, third{.format = 3, .chunk = {3}, .separator = "/"};
  // An array whose metadata has `to` in the place of `from`.
  const auto altered = [&](const Layout& as, const std::string& from, const std::string& to) {
    std::filesystem::remove_all(folder / "x");
    write_array(folder / "x", "u", data, as);
    std::string text = metadata({8}, as);
    EXPECT_NE(text.find(from), std::string::npos);
    write(folder / (as.format == 2 ? "x/u/.zarray" : "x/u/zarr.json"),
          text.replace(text.find(from), from.size(), to));
    return folder / "x";
  };
  const auto read = [](const std::string& path) { ZarrSource(path).read("u"); };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const auto unknown = [&](const Layout& as, const std::string& from, const std::string& to) {
    const std::string path = altered(as, from, to);
    EXPECT_EQ(ZarrSource(path).info("u").shape, Sizes{8});
    return thrown<NotAvailable>([&] { read(path); });
  };
  const auto broken = [&](const Layout& as, const std::string& from, const std::string& to) {
    const std::string path = altered(as, from, to);
    return thrown<FileError>([&] { read(path); });
  };
  has(unknown(second, R"("compressor": null)", R"("compressor": {"id": "lz4", "acceleration": 1})"),
      "compressor 'lz4', which ZarrSource cannot read: write the array with zlib, gzip, zstd, "
      "blosc "
      "or no compressor, or read it in Python by the package zarr");
  has(unknown(second, R"("filters": null)", R"("filters": [{"id": "delta"}])"), "filter 'delta'");
  has(unknown(third, R"("codecs": [)", R"("codecs": [{"name": "sharding_indexed"}, )"),
      "codec 'sharding_indexed'");
  has(unknown(third, R"("name": "regular")", R"("name": "uneven")"), "chunk grid 'uneven'");
  has(broken(third, R"("fill_value": 0)", R"("fill_value": "0x7fc0")"), "a fill value '0x7fc0'");
  has(broken(second, "[3]", "[3, 2]"), "chunks of [3, 2] and a shape of [8]");
  has(broken(second, "[3]", "[0]"), "a size of 0");
  has(broken(second, "}", ""), "x/u/.zarray: ");
  // Chunks that are cut off, or gone where nothing stands for them.
  const std::string path = altered(second, R"("fill_value": 0)", R"("fill_value": null)");
  std::filesystem::resize_file(path + "/u/1", 20);
  std::filesystem::remove(path + "/u/2");
  const ZarrSource source(path);
  const auto reads = [&](std::int64_t at) { return source.read("u", {{at}, {2}}); };
  EXPECT_EQ(reads(0)[1].item<double>(), 1);
  has(thrown<FileError>([&] { reads(2); }), "x/u/1: this chunk of 20 bytes is damaged or cut off");
  has(thrown<FileError>([&] { reads(6); }), "x/u/2: this chunk is not there, and the array has no");
  has(thrown<RangeError>([&] { reads(7); }), "8 indices");
  has(thrown<VariableError>([&] { source.info("v"); }), "it has [u]");
  has(thrown<FileError>([&] { read(folder / "nothing"); }), "is no Zarr group or array");
  // Values that no tensor of signed numbers holds.
  write_array(folder / "n", "u", torch::full({4}, -1, at::kDouble), {.chunk = {3}, .type = "<u8"});
  has(thrown<FileError>([&] { read(folder / "n"); }), "2^63 - 1");
}

// What is cut off, is followed by more, holds another size or is of another compressor.
TEST(ZarrSource, CompressedChunksThatAreDamagedAreToldOf) {
  const auto data = torch::arange(64, at::kDouble);
  std::map<std::string, std::string> built{
      {"zlib", "zlib1g-dev"}, {"zstd", "libzstd-dev"}, {"blosc", "libblosc-dev"}};
#ifdef TESSERA_HAS_ZLIB
  built["zlib"] = "";
#endif
#ifdef TESSERA_HAS_ZSTD
  built["zstd"] = "";
#endif
#ifdef TESSERA_HAS_BLOSC
  built["blosc"] = "";
#endif
  for (const auto& [codec, package] : built) {
    const Folder folder;
    Layout as{.chunk = {32}};
    if (!package.empty()) {
      write_array(folder / "x", "u", data, as);
      std::ifstream file(folder / "x/u/.zarray");
      std::string text{std::istreambuf_iterator<char>(file), {}};
      const std::string none = "\"compressor\": null";
      text.replace(text.find(none), none.size(), "\"compressor\": {\"id\": \"" + codec + "\"}");
      write(folder / "x/u/.zarray", text);
      const auto why =
          thrown<NotAvailable>([&] { ZarrSource(folder / "x").read("u", {{0}, {64}}); });
      EXPECT_NE(why.find(package), std::string::npos) << why;
      continue;
    }
    as.compressor = codec;
    write_array(folder / "x", "u", data, as);
    std::ifstream file(folder / "x/u/0", std::ios::binary);
    const std::string whole{std::istreambuf_iterator<char>(file), {}};
    const std::string other = packed(std::string(8, 'a'), codec);
    for (const std::string& chunk :
         {whole.substr(0, whole.size() - 3), whole.substr(0, 5), std::string(), whole + "more",
          other, packed(std::string(1000, 'a'), codec), std::string(40, '\xff')}) {
      write(folder / "x/u/0", chunk);
      const auto why = thrown<FileError>([&] { ZarrSource(folder / "x").read("u", {{0}, {64}}); });
      EXPECT_NE(why.find("out of " + codec), std::string::npos) << why;
    }
    // Any byte of it: another value or an error, and never memory beyond.
    std::mt19937 random(3);
    for (int n = 0; n < 200; ++n) {
      std::string chunk = whole;
      for (int changes = 0; changes <= n % 4; ++changes)
        chunk[random() % chunk.size()] = static_cast<char>(random());
      write(folder / "x/u/0", chunk);
      try {
        EXPECT_EQ(ZarrSource(folder / "x").read("u", {{0}, {64}}).numel(), 64);
      } catch (const FileError&) {
      }
    }
  }
}

TEST(ZarrSource, MarksOfMissingValuesAreExact) {
  const double nan = std::nan("");
  const auto expect = [&](const Altered& array, const std::vector<double>& values) {
    const at::Tensor got = array.read();
    EXPECT_TRUE(at::allclose(got, torch::tensor(values, at::kDouble), 0, 0, true)) << got;
  };
  const at::Tensor data = torch::tensor({-9999.0, 0.0, 3.0}, at::kDouble);
  const Layout third{.format = 3, .chunk = {3}, .type = "<f4", .separator = "/"};
  // As xarray writes them: a double in base64, and words that JSON has not.
  Layout as = third;
  as.attributes = R"({"_FillValue": "AAAAAICHw8A="})";
  expect({data, as}, {nan, 0, 3});
  as.attributes = R"({"_FillValue": NaN, "a": "NaN \" NaN"})";
  expect({torch::tensor({nan, 0.0, 3.0}, at::kDouble), as}, {nan, 0, 3});
  as.attributes = R"({"missing_value": NaN, "valid_max": Infinity})";
  expect({data, as}, {-9999, 0, 3});
  for (const char* other : {R"("nothing")", "[1, 2]", R"("AAAA")"}) {
    as.attributes = concat(R"({"_FillValue": )", other, "}");
    const Altered array(data, as);
    EXPECT_THROW(array.read(), VariableError) << other;
    EXPECT_TRUE(array.read({.dtype = at::kDouble, .decode = false}).equal(data));
  }
  // Of integers: one that no double has, and ones that they cannot be.
  const std::int64_t last = -9223372036854775806;
  const at::Tensor wide = torch::tensor({last, last - 1, std::int64_t{3}}, at::kLong);
  Altered longs(wide, {.chunk = {3}, .type = "<i8"});
  write(longs.folder / "u/.zattrs", concat(R"({"_FillValue": )", last, "}"));
  const at::Tensor of_longs = longs.read({.dtype = at::kLong, .missing = 7});
  EXPECT_TRUE(of_longs.equal(torch::tensor({std::int64_t{7}, last - 1, std::int64_t{3}})));
  for (const char* none : {"1e20", "0.5", "300"})
    expect({torch::tensor({0.0, 44.0, 3.0}, at::kDouble),
            {.chunk = {3}, .type = "|i1", .attributes = concat(R"({"_FillValue": )", none, "}")}},
           {0, 44, 3});
  // As netCDF's: unsigned numbers in a signed type are not decoded.
  const Altered bytes(data.clamp(-5, 5),
                      {.chunk = {3}, .type = "|i1", .attributes = R"({"_Unsigned": "true"})"});
  EXPECT_THROW(bytes.read(), VariableError);
  // An integer holds no NaN.
  const Altered nans(torch::tensor({nan, 1.0}, at::kDouble), {.chunk = {2}});
  EXPECT_THROW(nans.read({.dtype = at::kInt}), VariableError);
}

TEST(ZarrSource, FillValuesAreExact) {
  const at::Tensor one = torch::zeros({3}, at::kDouble);
  const Layout of_longs{.chunk = {3}, .type = "<i8", .sparse = true};
  const Altered low(one, of_longs, R"("fill_value": 0)", R"("fill_value": -9223372036854775806)");
  EXPECT_EQ(low.read({.dtype = at::kLong})[1].item<std::int64_t>(), -9223372036854775806);
  const Altered high(one, {.chunk = {3}, .type = "<u8", .sparse = true}, R"("fill_value": 0)",
                     R"("fill_value": 18446744073709551614)");
  EXPECT_THROW(high.read(), FileError);
  EXPECT_THROW(
      Altered(one, {.chunk = {3}, .type = "|i1"}, R"("fill_value": 0)", R"("fill_value": 300)")
          .read(),
      FileError);
  const Layout third{.format = 3, .chunk = {3}, .type = "<f4", .separator = "/", .sparse = true};
  const Altered bits(one, third, R"("fill_value": 0)", R"("fill_value": "0x40490000")");
  EXPECT_EQ(bits.read()[2].item<double>(), 3.140625);
  // A chunk that is not there takes no memory, whatever its size.
  const Altered large(one, third, R"("chunk_shape": [3])", R"("chunk_shape": [68719476736])");
  EXPECT_TRUE(large.read().equal(one));
  EXPECT_THROW(
      Altered(one, third, R"("chunk_shape": [3])", R"("chunk_shape": [9223372036854775807])")
          .read(),
      FileError);
  // A byte of a bool may be any.
  Altered flags(torch::tensor({1.0, 0.0}, at::kDouble), {.chunk = {2}, .type = "|b1"});
  write(flags.folder / "u/0", std::string("\x02\x00", 2));
  EXPECT_TRUE(flags.read().equal(torch::tensor({1.0, 0.0}, at::kDouble)));
}

// What would read as an array of fill values.
TEST(ZarrSource, ChunksThatCannotBeFoundAreNoFillValues) {
  const at::Tensor data = torch::arange(8, at::kDouble);
  const Layout second{.chunk = {3}}, third{.format = 3, .chunk = {3}, .separator = "/"};
  EXPECT_THROW(Altered(data, third, R"("name": "default")", R"("name": "suffixed")").read(),
               NotAvailable);
  EXPECT_THROW(Altered(data, third, R"("fill_value")",
                       R"("storage_transformers": [{"name": "x"}], "fill_value")")
                   .read(),
               NotAvailable);
  EXPECT_THROW(Altered(data, third, R"("separator": "/")", R"("separator": "/../x/")").read(),
               FileError);
  EXPECT_THROW(Altered(data, third, R"("zarr_format": 3)", R"("zarr_format": 4)").read(),
               FileError);
  const Altered gone(data, second);
  const ZarrSource source(gone.folder.path());
  EXPECT_EQ(source.read("u", {{1}, {1}}).item<double>(), 1);
  std::filesystem::rename(gone.folder / "u", gone.folder / "elsewhere");
  EXPECT_THROW(source.read("u", {{4}, {1}}), FileError);
  const Altered dangling(data, second);
  std::filesystem::remove(dangling.folder / "u/1");
  std::filesystem::create_symlink("nowhere", dangling.folder / "u/1");
  EXPECT_THROW(dangling.read(), FileError);
}

// Arrays that are not numbers, and a loop of links, beside one that is.
TEST(ZarrSource, OddNeighboursAreLeftOut) {
  const Altered good(torch::arange(3, at::kDouble), {.format = 3, .chunk = {3}});
  for (const char* type : {"bytes", "string", "float8_e4m3", "complex64", "r16"}) {
    const Altered odd(torch::arange(3, at::kDouble), {.format = 3, .chunk = {3}},
                      R"("data_type": "float64")", concat(R"("data_type": ")", type, '"'));
    std::filesystem::copy(odd.folder / "u", good.folder / type,
                          std::filesystem::copy_options::recursive);
  }
  std::filesystem::create_symlink("loop", good.folder / "loop");
  const Altered empty(torch::zeros({0}, at::kDouble), {.format = 3, .chunk = {1}},
                      R"("chunk_shape": [1])", R"("chunk_shape": [0])");
  std::filesystem::copy(empty.folder / "u", good.folder / "none",
                        std::filesystem::copy_options::recursive);
  const ZarrSource source(good.folder.path());
  EXPECT_EQ(source.variables(), (std::vector<std::string>{"none", "u"}));
  EXPECT_EQ(source.read("none").numel(), 0);
  EXPECT_EQ(source.read("u", {{2}, {1}}).item<double>(), 2);
}

}  // namespace
}  // namespace tessera::zarr_source_test
