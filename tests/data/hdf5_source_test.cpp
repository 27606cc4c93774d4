#include "tessera/data/sources/hdf5_source.h"

#include <gtest/gtest.h>
#include <hdf5.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <thread>

#include "slabs.h"
#include "tessera/base/text.h"
#include "tessera/data/sources/source_dataset.h"

namespace tessera::hdf5_source_test {
namespace {

// A file with datasets of every kind; written with the C library itself.
class Hdf5 : public ::testing::Test {
 protected:
  void SetUp() override {
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t group = H5Gcreate2(file, "inner", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Gclose(group);
    put(file, "f64", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, f64);
    put(file, "inner/f32", H5T_IEEE_F32BE, H5T_NATIVE_DOUBLE, f64);  // the other byte order
    put(file, "i16", H5T_STD_I16LE, H5T_NATIVE_INT64, i64);
    put(file, "u8", H5T_STD_U8LE, H5T_NATIVE_INT64, i64.abs() % 256);
    put(file, "u32", H5T_STD_U32BE, H5T_NATIVE_INT64, i64.abs() + 3'000'000'000);
    put(file, "u64", H5T_STD_U64LE, H5T_NATIVE_INT64, i64);  // negative ones are written as 0
    put(file, "scalar", H5T_NATIVE_DOUBLE, H5T_NATIVE_DOUBLE, torch::tensor(2.5, torch::kDouble));
    put(file, "empty", H5T_NATIVE_DOUBLE, H5T_NATIVE_DOUBLE, torch::zeros({0, 3}, torch::kDouble));
    const hsize_t one = 1;
    const hid_t space = H5Screate_simple(1, &one, nullptr), text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, 4);
    const hid_t names =
        H5Dcreate2(file, "names", text, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dclose(names);
    const hid_t huge =
        H5Dcreate2(file, "huge", H5T_STD_U64LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    const unsigned long long beyond = 1ull << 63;
    H5Dwrite(huge, H5T_NATIVE_ULLONG, H5S_ALL, H5S_ALL, H5P_DEFAULT, &beyond);
    H5Dclose(huge);
    H5Tclose(text);
    H5Sclose(space);
    H5Fclose(file);
  }
  void TearDown() override { std::remove(path.c_str()); }

  static void put(hid_t file, const char* name, hid_t stored, hid_t memory, const at::Tensor& t) {
    std::vector<hsize_t> shape(t.sizes().begin(), t.sizes().end());
    const hid_t space =
        shape.empty() ? H5Screate(H5S_SCALAR)
                      : H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr);
    const hid_t set = H5Dcreate2(file, name, stored, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    ASSERT_GE(set, 0);
    if (t.numel() > 0) {
      ASSERT_GE(
          H5Dwrite(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, t.contiguous().const_data_ptr()), 0);
    }
    const hid_t scalar = H5Screate(H5S_SCALAR), text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, 3);
    const hid_t units = H5Acreate2(set, "units", text, scalar, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(units, text, "m/s");
    const hid_t scale = H5Acreate2(set, "scale", H5T_NATIVE_INT, scalar, H5P_DEFAULT, H5P_DEFAULT);
    const int three = 3;
    H5Awrite(scale, H5T_NATIVE_INT, &three);
    H5Aclose(units);
    H5Aclose(scale);
    H5Tclose(text);
    H5Sclose(scalar);
    H5Dclose(set);
    H5Sclose(space);
  }

  const std::string path = concat(::testing::TempDir(), "tessera_hdf5_", ::getpid(), ".h5");
  const at::Tensor f64 = torch::arange(210, torch::kDouble).view({5, 7, 6}) * 0.5 - 20;
  const at::Tensor i64 = (torch::arange(210, torch::kLong).view({5, 7, 6}) - 100) * 7;
};

TEST_F(Hdf5, RandomSlabsEqualPlainIndexing) {
  const Hdf5Source source(path);
  EXPECT_EQ(source.variables(),
            (std::vector<std::string>{"empty", "f64", "huge", "i16", "inner/f32", "scalar", "u32",
                                      "u64", "u8"}));
  testing::expect_slabs(source, "f64", f64, 200);
  testing::expect_slabs(source, "inner/f32", f64, 50);
  testing::expect_slabs(source, "i16", i64, 50);
  testing::expect_slabs(source, "u8", i64.abs() % 256, 50);
  testing::expect_slabs(source, "u32", i64.abs() + 3'000'000'000, 50);
  testing::expect_slabs(source, "u64", i64.clamp_min(0), 50);
  EXPECT_EQ(source.read("scalar").item<float>(), 2.5f);
  EXPECT_EQ(source.read("empty").sizes(), (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(source.info("inner/f32").stored, at::kFloat);
  EXPECT_EQ(source.info("f64").dims, (std::vector<std::string>{"dim0", "dim1", "dim2"}));
  EXPECT_EQ(source.text("f64", "units"), "m/s");
  EXPECT_EQ(source.number("f64", "scale"), 3);
}

TEST_F(Hdf5, ErrorsSayWhatIsWrong) {
  const Hdf5Source source(path);
  EXPECT_THROW(source.info("names"), VariableError);
  EXPECT_THROW(source.read("f64", {.start = {0}, .count = {6}}), RangeError);
  EXPECT_THROW(source.read("huge"), FileError);
  EXPECT_THROW(Hdf5Source(path + ".absent"), FileError);
  const std::string other = path + ".txt";
  std::ofstream(other) << "no HDF5 file";
  try {
    Hdf5Source wrong(other);
    FAIL();
  } catch (const FileError& e) {
    EXPECT_NE(std::string(e.what()).find(other), std::string::npos);
  }
  // Cut off in the middle.
  {
    std::ifstream in(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), {});
    std::ofstream(other, std::ios::binary) << bytes.substr(0, bytes.size() / 2);
  }
  EXPECT_THROW(Hdf5Source cut(other), FileError);
  std::remove(other.c_str());
}

TEST_F(Hdf5, ThreadsMayShareIt) {
  const auto source = std::make_shared<Hdf5Source>(path);
  const SourceDataset samples(source, {{"f64", {}, {.dtype = at::kDouble}}});
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 50; ++i)
        wrong[t] +=
            !at::equal(samples.get((i + t) % 5)[0], f64[static_cast<std::int64_t>((i + t) % 5)]);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace tessera::hdf5_source_test
