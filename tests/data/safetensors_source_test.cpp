#include "tessera/data/sources/safetensors_source.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "slabs.h"
#include "tessera/base/text.h"

namespace tessera::safetensors_source_test {
namespace {

class Safetensors : public ::testing::Test {
 protected:
  void TearDown() override { std::remove(path.c_str()); }
  void write(const std::string& header, const std::string& data,
             std::optional<std::uint64_t> length = {}) const {
    std::ofstream out(path, std::ios::binary);
    const std::uint64_t n = length.value_or(header.size());
    for (int i = 0; i < 8; ++i) out.put(static_cast<char>(n >> (8 * i) & 0xff));
    out << header << data;
  }
  static std::string bytes(const at::Tensor& t) {
    return {static_cast<const char*>(t.const_data_ptr()), t.nbytes()};
  }

  const std::string path =
      concat(::testing::TempDir(), "tessera_test_", ::getpid(), ".safetensors");
};

TEST_F(Safetensors, RandomSlabsEqualPlainIndexing) {
  const auto f = torch::arange(120, torch::kFloat).view({4, 5, 6}) / 8,
             h = f.to(torch::kBFloat16).contiguous();
  const auto i = torch::arange(21, torch::kLong).view({3, 7}) - 5,
             one = torch::tensor({true, false});
  // With and without a header of a length that puts the numbers at odd addresses.
  for (const std::string fill : {"", " "}) {
    write(R"({"__metadata__":{"made":"here"},"i":{"dtype":"I64","shape":[3,7],)"
          R"("data_offsets":[480,648]},)"
          R"("f":{"dtype":"F32","shape":[4,5,6],"data_offsets":[0,480]},"h":{"dtype":"BF16",)"
          R"("shape":[4,5,6],"data_offsets":[648,888]},)"
          R"("b":{"dtype":"BOOL","shape":[2],"data_offsets":[888,890]},"s":{"dtype":"U8",)"
          R"("shape":[],"data_offsets":[890,891]},)"
          R"("e":{"dtype":"F64","shape":[0,3],"data_offsets":[891,891]}})" +
              fill,
          bytes(f) + bytes(i) + bytes(h) + bytes(one) + "\x07");
    const SafetensorsSource source(path);
    EXPECT_EQ(source.variables(), (std::vector<std::string>{"f", "i", "h", "b", "s", "e"}));
    EXPECT_EQ(source.metadata().at("made"), "here");
    EXPECT_EQ(source.info("h").stored, at::kBFloat16);
    testing::expect_slabs(source, "f", f, 100);
    testing::expect_slabs(source, "i", i, 50);
    testing::expect_slabs(source, "h", h, 50);
    testing::expect_slabs(source, "b", one, 10);
    EXPECT_EQ(source.read("s").item<float>(), 7);
    EXPECT_EQ(source.read("e").sizes(), (std::vector<std::int64_t>{0, 3}));
    EXPECT_THROW(source.info("x"), VariableError);
    EXPECT_THROW(source.read("f", {.start = {0}, .count = {5}}), RangeError);
  }
}

TEST_F(Safetensors, DamagedFilesAreRefused) {
  EXPECT_THROW(SafetensorsSource(path + ".absent"), FileError);
  const std::string data(16, 'x');
  const std::vector<std::string> headers{
      "",
      "nonsense",
      "[1]",
      R"({"a":1})",
      R"({"a":{"dtype":"F32","shape":[4]}})",
      R"({"a":{"dtype":"F33","shape":[4],"data_offsets":[0,16]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,20]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}})",
      R"({"a":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}})",
      R"({"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}})",
      R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16,20]}})",
      R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
      R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,10]}})",
      R"({"a":{"dtype":"F32","shape":"x","data_offsets":[0,16]}})",
      R"({"__metadata__":{"a":1}})"};
  for (const std::string& header : headers) {
    write(header, data);
    EXPECT_THROW(SafetensorsSource{path}, FileError) << header;
  }
  for (const std::uint64_t length : {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{1000},
                                     std::uint64_t{200'000'000}}) {
    write("{}", data, length);
    EXPECT_THROW(SafetensorsSource{path}, FileError) << length;
  }
  std::ofstream(path, std::ios::binary) << "1234";
  EXPECT_THROW(SafetensorsSource{path}, FileError);
  std::ofstream(path, std::ios::binary | std::ios::trunc).flush();
  EXPECT_THROW(SafetensorsSource{path}, FileError);
}

TEST_F(Safetensors, EveryDtypeOfTheFormatThatLibtorchHas) {
  const auto z = torch::complex(torch::arange(6, torch::kFloat), torch::ones({6})).view({2, 3});
  const auto u = torch::arange(6, torch::kLong).to(torch::kUInt16);
  const auto f8 = torch::arange(6, torch::kFloat).to(torch::kFloat8_e4m3fn);
  write(R"({"z":{"dtype":"C64","shape":[2,3],"data_offsets":[0,48]},)"
        R"("u":{"dtype":"U16","shape":[6],"data_offsets":[48,60]},)"
        R"("f8":{"dtype":"F8_E4M3","shape":[6],"data_offsets":[60,66]},)"
        R"("f6":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[66,69]}})",
        bytes(z) + bytes(u) + bytes(f8) + "123");
  const SafetensorsSource source(path);
  EXPECT_EQ(source.variables(), (std::vector<std::string>{"z", "u", "f8"}));
  EXPECT_TRUE(source.read("z", {.start = {1}, .count = {1}}, {.dtype = torch::kComplexFloat})
                  .equal(z.narrow(0, 1, 1)));
  EXPECT_TRUE(source.read("u", {.start = {1}, .count = {2}, .stride = {3}}, {.dtype = torch::kLong})
                  .equal(torch::tensor({1, 4})));
  EXPECT_TRUE(source.read("f8").equal(torch::arange(6, torch::kFloat)));
  try {
    source.read("f6");
    FAIL() << "libtorch has no such dtype";
  } catch (const FileError& e) {
    EXPECT_NE(std::string(e.what()).find("'f6'"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("F6_E2M3"), std::string::npos) << e.what();
  }
}

TEST_F(Safetensors, OverlapsHolesAndDuplicatesAreRefusedAndShrinkingIsSeen) {
  const std::string data(16, 'x');
  for (const char* header : {R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]},)"
                             R"("b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                             R"({"a":{"dtype":"U8","shape":[7],"data_offsets":[0,7]},)"
                             R"("b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})",
                             R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                             R"("a":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})"}) {
    write(header, data);
    EXPECT_THROW(SafetensorsSource{path}, FileError) << header;
  }
  write(R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})", data);
  const SafetensorsSource source(path);
  write(R"({"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}})", "");
  EXPECT_THROW(source.read("a"), FileError) << "another process has cut it short";
}

}  // namespace
}  // namespace tessera::safetensors_source_test
