#include "tessera/files/internal/safetensors.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <random>

#include "../support/folder.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using testing::Folder;
using testing::thrown;

std::string headed(const std::string& json) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(json.size() >> 8 * i & 0xff);
  return out + json;
}

std::string refusal(const std::string& bytes) {
  const Folder folder;
  const std::string path = folder / "x.safetensors";
  testing::put(path, bytes);
  const std::string why = thrown<FileError>([&] { read_safetensors_header(ReadFile(path)); });
  EXPECT_NE(why.find(path), std::string::npos) << why;
  return why;
}

std::string entry(const std::string& name, int begin, int end) {
  return concat('"', name, R"(":{"dtype":"U8","shape":[)", end - begin, R"(],"data_offsets":[)",
                begin, ",", end, "]}");
}

TEST(SafetensorsFormat, WhatIsWrittenIsRead) {
  std::mt19937 engine(4);
  const auto dtypes = safetensors_dtypes();
  for (int i = 0; i < 200; ++i) {
    std::vector<SafetensorsTensor> tensors;
    for (int n = static_cast<int>(engine() % 6); n > 0; --n) {
      SafetensorsTensor t;
      t.name = concat("name \"", n, "\" \xc3\xa9\n");
      t.dtype = dtypes[engine() % dtypes.size()].name;
      for (int d = static_cast<int>(engine() % 4); d > 0; --d) t.shape.push_back(engine() % 4);
      t.shape.push_back(4 * (engine() % 3));
      tensors.push_back(t);
    }
    const std::map<std::string, std::string> metadata{{"made", "here\n"}, {"\xc3\xa9", ""}};
    const std::string header =
        write_safetensors_header(tensors, i % 2 ? metadata : decltype(metadata){});
    EXPECT_EQ(header.size() % 8, 0u);
    std::uint64_t bytes = 0;
    for (const auto& t : tensors) {
      bytes += t.bytes();
      const int bits = find_safetensors_dtype(t.dtype)->bits;
      const bool aligned = t.begin * 8 % static_cast<unsigned>(bits == 6 ? 2 : bits) == 0;
      EXPECT_TRUE(aligned || t.bytes() == 0);
    }
    const Folder folder;
    testing::put(folder / "x", header + std::string(bytes, 'x'));
    const SafetensorsHeader read = read_safetensors_header(ReadFile(folder / "x"));
    EXPECT_EQ(read.data, header.size());
    EXPECT_EQ(read.data_bytes, bytes);
    EXPECT_EQ(read.metadata, i % 2 ? metadata : decltype(metadata){});
    ASSERT_EQ(read.tensors.size(), tensors.size());
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      EXPECT_EQ(read.tensors[k].name, tensors[k].name);
      EXPECT_EQ(read.tensors[k].dtype, tensors[k].dtype);
      EXPECT_EQ(read.tensors[k].shape, tensors[k].shape);
      EXPECT_EQ(read.tensors[k].begin, tensors[k].begin);
    }
  }
}

TEST(SafetensorsFormat, OverlapsHolesAndDuplicatesAreRefused) {
  const std::string data(8, 'x');
  const auto file = [&](const std::string& a, const std::string& b) {
    return headed('{' + a + ',' + b + '}') + data;
  };
  {
    const Folder folder;
    testing::put(folder / "good", file(entry("b", 4, 8), entry("a", 0, 4)));
    const auto header = read_safetensors_header(ReadFile(folder / "good"));
    EXPECT_EQ(header.tensors[0].name, "b") << "in the order of the header";
    EXPECT_EQ(safetensors_data_order(header.tensors), (std::vector<std::size_t>{1, 0}));
  }
  EXPECT_NE(refusal(file(entry("a", 0, 5), entry("b", 4, 8))).find("tensor 'b'"),
            std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 0, 8), entry("b", 0, 8))).find("inside tensor"),
            std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 0, 3), entry("b", 4, 8))).find("before tensor 'b'"),
            std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 0, 4), entry("b", 4, 7))).find("end at byte 7"),
            std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 1, 4), entry("b", 4, 8))).find("tensor 'a'"),
            std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 0, 4), entry("a", 4, 8))).find("twice"), std::string::npos);
  EXPECT_NE(refusal(file(entry("a", 0, 4), entry("\\u0061", 4, 8))).find("twice"),
            std::string::npos);
}

// Names of a file are quoted in errors, which are printed to terminals.
TEST(SafetensorsFormat, NamesWriteNothingOfTheirOwn) {
  for (const std::string name : {"a\\u001b[2J", "a\\nrank 0: all is well", "\\u0007"}) {
    const std::string why = refusal(headed('{' + entry(name, 0, 5) + '}') + std::string(4, 'x'));
    for (const char c : why) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20) << why;
    EXPECT_NE(why.find("\\x"), std::string::npos) << why;
  }
}

TEST(SafetensorsFormat, DamagedHeadersAreRefused) {
  const std::string data(16, 'x');
  for (const std::string about :
       {"1",
        "null",
        "[]",
        R"({"dtype":"F32","shape":[4]})",
        R"({"shape":[4],"data_offsets":[0,16]})",
        R"({"dtype":"F33","shape":[4],"data_offsets":[0,16]})",
        R"({"dtype":4,"shape":[4],"data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":[4],"data_offsets":[0,20]})",
        R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})",
        R"({"dtype":"F32","shape":[5],"data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":[4.0],"data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":"x","data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":[4],"data_offsets":[0,16,20]})",
        R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})",
        R"({"dtype":"F32","shape":[9223372036854775807,4,0],"data_offsets":[0,0]})",
        R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,16]})",
        R"({"dtype":"F4","shape":[33],"data_offsets":[0,16]})",
        R"({"dtype":"C128","shape":[1],"data_offsets":[0,16]})",
        R"({"dtype":"F32","shape":[4],"data_offsets":[0,16],"shape":[4]})"}) {
    const std::string why = refusal(headed("{\"the one\":" + about + "}") + data);
    EXPECT_TRUE(why.find("'the one'") != std::string::npos ||
                why.find("twice") != std::string::npos)
        << why;
  }
  for (const std::string json : {"", "nonsense", "[1]", "{", R"({"__metadata__":{"a":1}})",
                                 R"({"__metadata__":[]})", "{\"\xff\":{}}"})
    refusal(headed(json) + data);
  refusal("");
  refusal("1234567");
  refusal(std::string(8, '\x7f'));
  refusal(std::string(8, '\xff') + "{}");
  std::string long_header = "{}" + std::string(kLongestSafetensorsHeader, ' ');
  refusal(headed(long_header));
  refusal(headed(std::string(1000, '[')) + data);
}

TEST(SafetensorsFormat, TruncatedAnywhereIsRefused) {
  std::vector<SafetensorsTensor> tensors{{"a", "F32", {5}, 0, 0}, {"b", "U8", {3}, 0, 0}};
  const std::string full = write_safetensors_header(tensors) + std::string(23, 'x');
  for (std::size_t n = 0; n < full.size(); ++n) refusal(full.substr(0, n));
  refusal(full + "x");
}

TEST(SafetensorsFormat, WhatCannotBeWrittenIsRefused) {
  const auto write = [](std::vector<SafetensorsTensor> tensors,
                        const std::map<std::string, std::string>& metadata = {}) {
    return thrown<InvalidArgument>([&] { write_safetensors_header(tensors, metadata); });
  };
  EXPECT_NE(write({{"a", "F32", {}, 0, 0}, {"a", "F32", {}, 0, 0}}).find("'a'"), std::string::npos);
  write({{"__metadata__", "F32", {}, 0, 0}});
  write({{"\xff", "F32", {}, 0, 0}});
  write({{"a", "F99", {}, 0, 0}});
  write({{"a", "F32", {-1}, 0, 0}});
  write({{"a", "F32", {std::int64_t{1} << 62, 4}, 0, 0}});
  write({{"a", "F4", {3}, 0, 0}});
  write({}, {{"a", "\x80"}});
  write({}, {{"a", std::string(kLongestSafetensorsHeader, 'x')}});
}

TEST(ReadFile, BoxesEqualPlainIndexing) {
  std::mt19937 engine(5);
  const Folder folder;
  for (int i = 0; i < 400; ++i) {
    const std::size_t element = std::size_t{1} << engine() % 3;
    std::vector<std::int64_t> shape;
    std::vector<ReadFile::Range> box;
    std::int64_t all = 1, picked = 1;
    for (int d = static_cast<int>(engine() % 4); d > 0; --d) {
      const std::int64_t n = 1 + engine() % 6, stride = engine() % 3 ? 1 : 1 + engine() % 3,
                         begin = engine() % n,
                         count = 1 + engine() % ((n - 1 - begin) / stride + 1);
      shape.push_back(n);
      box.push_back(engine() % 3 ? ReadFile::Range{begin, count, stride}
                                 : ReadFile::Range{0, n, 1});
      all *= n;
      picked *= box.back().count;
    }
    std::string data(7 + all * element, '\0');
    for (char& c : data) c = static_cast<char>(engine());
    testing::put(folder / "x", data);
    std::string expected;
    for (std::int64_t k = 0; k < picked; ++k) {
      std::int64_t rest = k, at = 0, stride = 1, place = 0;
      (void)at;
      for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d]) {
        place += (box[d].begin + rest % box[d].count * box[d].stride) * stride;
        rest /= box[d].count;
      }
      expected += data.substr(7 + place * element, element);
    }
    for (const double ratio : {1.0, 3.0, 1e9}) {
      const ReadFile file(folder / "x");
      std::string got(expected.size(), '\0');
      file.read_box(got.data(), element, 7, shape, box, ratio);
      ASSERT_EQ(got, expected);
      ASSERT_LE(static_cast<double>(file.bytes_read()), ratio * expected.size() + 1e-9);
    }
  }
  const ReadFile file(folder / "x");
  char none;
  file.read_box(&none, 4, 0, {5, 0, 3}, {{0, 5}, {0, 0}, {0, 3}});
  EXPECT_EQ(file.bytes_read(), 0u);
}

TEST(ReadFile, RefusesWhatIsNoFileAtOnceAndSeesThatItShrank) {
  const Folder folder;
  EXPECT_NE(thrown<FileError>([&] { ReadFile(folder / "absent"); }).find("absent"),
            std::string::npos);
  thrown<FileError>([&] { ReadFile(folder.path()); });
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  thrown<FileError>([&] { ReadFile(folder / "pipe"); });
  testing::put(folder / "x", std::string(1 << 20, 'x'));
  const ReadFile file(folder / "x");
  std::filesystem::resize_file(folder / "x", 1000);
  std::string out(4000, '\0');
  file.read(out.data(), 1000, 0);
  EXPECT_NE(thrown<FileError>([&] { file.read(out.data(), 4000, 0); }).find("was truncated"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
