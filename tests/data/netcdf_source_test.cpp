// NetcdfSource against plain indexing of the numbers that were written, for generated files of
// several formats and types.
#include <gtest/gtest.h>
#include <netcdf.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/text.h"
#include "tessera/data/sources/netcdf_source.h"
#include "tessera/nn/deferred.h"

namespace tessera::netcdf_source_test {
namespace {

void ok(int status) {
  if (status != NC_NOERR) throw std::runtime_error(nc_strerror(status));
}

// A file under the test's folder that goes when the test ends.
struct TemporaryFile {
  std::string path = concat(::testing::TempDir(), "/tessera_netcdf_", getpid(), ".nc");
  ~TemporaryFile() { std::remove(path.c_str()); }
};

class Writer {
 public:
  Writer(const std::string& path, int format) {
    ok(nc_create(path.c_str(), NC_CLOBBER | format, &id_));
  }
  ~Writer() { nc_close(id_); }
  int variable(const std::string& name, nc_type type, const std::vector<std::int64_t>& shape) {
    std::vector<int> dims;
    for (std::size_t d = 0; d < shape.size(); ++d) {
      dims.emplace_back();
      ok(nc_def_dim(id_, concat(name, "_", d).c_str(), static_cast<std::size_t>(shape[d]),
                    &dims.back()));
    }
    int variable = 0;
    ok(nc_def_var(id_, name.c_str(), type, static_cast<int>(dims.size()), dims.data(), &variable));
    return variable;
  }
  void attribute(int variable, const char* name, nc_type type, const std::vector<double>& values) {
    ok(nc_put_att_double(id_, variable, name, type, values.size(), values.data()));
  }
  void text(int variable, const char* name, const std::string& value) {
    ok(nc_put_att_text(id_, variable, name, value.size(), value.data()));
  }
  void values(int variable, const at::Tensor& data) {
    nc_enddef(id_);
    const at::Tensor d = data.to(at::kDouble).contiguous();
    ok(nc_put_var_double(id_, variable, d.const_data_ptr<double>()));
  }
  int id() const { return id_; }

 private:
  int id_ = -1;
};

// Brute force: one slice with a step a dimension.
at::Tensor expected(at::Tensor data, const Hyperslab& slab) {
  for (std::size_t d = 0; d < slab.start.size(); ++d) {
    const std::int64_t stride = slab.stride.empty() ? 1 : slab.stride[d];
    data = data.slice(static_cast<std::int64_t>(d), slab.start[d],
                      slab.start[d] + slab.count[d] * stride, stride);
    data = data.slice(static_cast<std::int64_t>(d), 0, slab.count[d]);
  }
  return data.contiguous();
}

class Formats : public ::testing::TestWithParam<int> {};

TEST_P(Formats, RandomSlabsEqualPlainIndexing) {
  const bool netcdf4 = GetParam() == NC_NETCDF4;
  std::vector<nc_type> types{NC_BYTE, NC_SHORT, NC_INT, NC_FLOAT, NC_DOUBLE};
  if (netcdf4) types.insert(types.end(), {NC_UBYTE, NC_USHORT, NC_UINT, NC_INT64, NC_UINT64});
  std::mt19937_64 random(7);
  torch::manual_seed(7);
  const auto upto = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n + 1));
  };
  int read = 0;
  for (const nc_type type : types)
    for (int dims = 0; dims <= 4; ++dims) {
      const TemporaryFile file;
      std::vector<std::int64_t> shape;
      for (int d = 0; d < dims; ++d) shape.push_back(1 + upto(6));
      const at::Tensor data = torch::randint(0, 100, shape, at::kDouble);
      {
        Writer writer(file.path, GetParam());
        writer.values(writer.variable("u", type, shape), data);
      }
      const NetcdfSource source(file.path);
      EXPECT_EQ(source.info("u").shape, shape);
      EXPECT_TRUE(at::equal(source.read("u", {}, {.dtype = at::kDouble}), data));
      for (int n = 0; n < 40; ++n) {
        Hyperslab slab;
        for (int d = 0; d < upto(dims); ++d) {
          const std::int64_t start = upto(shape[d]), stride = 1 + upto(3);
          const std::int64_t most = start < shape[d] ? (shape[d] - 1 - start) / stride + 1 : 0;
          slab.start.push_back(start);
          slab.count.push_back(upto(most));
          slab.stride.push_back(stride);
        }
        if (n % 4 == 0) slab.stride.clear(), slab.count.clear(), slab.start.clear();
        for (const at::ScalarType dtype :
             {at::kFloat, at::kDouble, at::kInt, at::kLong, at::kBFloat16}) {
          const at::Tensor got = source.read("u", slab, {.dtype = dtype});
          const at::Tensor want = expected(data, slab).to(dtype);
          ASSERT_EQ(got.scalar_type(), dtype);
          ASSERT_EQ(got.sizes(), want.sizes());
          ASSERT_TRUE(got.is_contiguous());
          ASSERT_TRUE(at::equal(got, want))
              << concat("type ", type, " of ", list(shape), " at ", list(slab.start), " ",
                        list(slab.count), " ", list(slab.stride));
          ++read;
        }
      }
    }
  EXPECT_EQ(read, static_cast<int>(types.size()) * 5 * 40 * 5);
}
INSTANTIATE_TEST_SUITE_P(NetcdfSource, Formats, ::testing::Values(0, NC_64BIT_OFFSET, NC_NETCDF4));

TEST(NetcdfSource, ScaleOffsetAndMissing) {
  const TemporaryFile file;
  const at::Tensor stored = torch::tensor({-32768, -5, 0, 7, 100, 32767, -999, 250}, at::kDouble);
  {
    Writer writer(file.path, NC_NETCDF4);
    const int u = writer.variable("u", NC_SHORT, {8});
    writer.attribute(u, "_FillValue", NC_SHORT, {-32768});
    writer.attribute(u, "missing_value", NC_SHORT, {-999, 32767});
    writer.attribute(u, "scale_factor", NC_DOUBLE, {0.25});
    writer.attribute(u, "add_offset", NC_DOUBLE, {10});
    writer.attribute(u, "valid_max", NC_SHORT, {200});
    writer.text(u, "units", "m/s");
    writer.text(NC_GLOBAL, "title", "test");
    writer.values(u, stored);
  }
  const NetcdfSource source(file.path);
  const double nan = std::nan("");
  const at::Tensor want = torch::tensor({nan, 8.75, 10.0, 11.75, 35.0, nan, nan, nan}, at::kDouble);
  EXPECT_TRUE(
      at::allclose(source.read("u", {}, {.dtype = at::kDouble}), want, 0, 0, /*equal_nan=*/true));
  EXPECT_TRUE(at::allclose(source.read("u"), want.to(at::kFloat), 0, 0, true));
  EXPECT_TRUE(at::equal(source.read("u", {}, {.dtype = at::kShort, .decode = false}),
                        stored.to(at::kShort)));
  EXPECT_TRUE(at::equal(source.read("u", {}, {.dtype = at::kInt, .missing = -1}),
                        torch::tensor({-1, 8, 10, 11, 35, -1, -1, -1}, at::kInt)));
  // None missing there.
  EXPECT_TRUE(at::equal(source.read("u", {{1}, {4}}, {.dtype = at::kInt}),
                        torch::tensor({8, 10, 11, 35}, at::kInt)));
  EXPECT_THROW(source.read("u", {}, {.dtype = at::kInt}), VariableError);
  EXPECT_THROW(source.read("u", {}, {.dtype = at::kChar, .missing = 1000}), VariableError);
  EXPECT_EQ(source.text("u", "units"), "m/s");
  EXPECT_EQ(source.number("u", "add_offset"), 10);
  EXPECT_EQ(source.attributes().at("title"), Attribute("test"));
  EXPECT_THROW(source.number("u", "units"), VariableError);
  EXPECT_THROW(source.text("u", "scale_factor"), VariableError);
  EXPECT_THROW(source.number("u", "missing_value"), VariableError);  // Two numbers.
  EXPECT_THROW(source.number("u", "absent"), VariableError);
}

TEST(NetcdfSource, WhatWasNeverWrittenIsMissing) {
  const TemporaryFile file;
  {
    Writer writer(file.path, NC_NETCDF4);
    for (const auto& [name, type] : std::vector<std::pair<const char*, nc_type>>{
             {"i", NC_INT}, {"l", NC_INT64}, {"f", NC_FLOAT}, {"b", NC_BYTE}}) {
      const int v = writer.variable(name, type, {3});
      const std::size_t second = 1;
      const double value = 4;
      nc_enddef(writer.id());
      ok(nc_put_var1_double(writer.id(), v, &second, &value));
    }
  }
  const NetcdfSource source(file.path);
  for (const char* name : {"i", "l", "f"}) {
    const at::Tensor got = source.read(name);
    EXPECT_TRUE(std::isnan(got[0].item<float>()) && std::isnan(got[2].item<float>()))
        << name << got;
    EXPECT_EQ(got[1].item<float>(), 4) << name;
  }
  EXPECT_EQ(source.read("b")[0].item<float>(), NC_FILL_BYTE);  // A byte has no value to spare.
}

TEST(NetcdfSource, NumbersBesideTheFillValueAreData) {
  const TemporaryFile file;
  const at::Tensor data =
      torch::tensor({NC_FILL_INT, NC_FILL_INT + 1, NC_FILL_INT + 2, 2147483647}, at::kLong);
  {
    Writer writer(file.path, 0);
    writer.values(writer.variable("i", NC_INT, {4}), data);
  }
  const at::Tensor got = NetcdfSource(file.path).read("i", {}, {.dtype = at::kLong, .missing = 0});
  EXPECT_TRUE(
      at::equal(got, torch::tensor({0, NC_FILL_INT + 1, NC_FILL_INT + 2, 2147483647}, at::kLong)))
      << got;
}

TEST(NetcdfSource, OpensWhileConstructionIsDeferred) {
  const TemporaryFile file;
  {
    Writer writer(file.path, 0);
    writer.values(writer.variable("i", NC_INT, {2}), torch::ones({2}));
  }
  const DeferredScope scope;
  EXPECT_EQ(NetcdfSource(file.path).info("i").shape, std::vector<std::int64_t>{2});
}

TEST(NetcdfSource, Errors) {
  const TemporaryFile file;
  EXPECT_THROW(NetcdfSource("/nowhere/absent.nc"), FileError);
  std::ofstream(file.path) << "this is no netCDF file, although its name says so";
  EXPECT_THROW(NetcdfSource{file.path}, FileError);
  {
    Writer writer(file.path, NC_NETCDF4);
    writer.variable("label", NC_CHAR, {5});
    const int u = writer.variable("u", NC_BYTE, {4, 3});
    writer.text(u, "_Unsigned", "true");
    writer.values(u, torch::zeros({4, 3}));
  }
  const NetcdfSource source(file.path);
  EXPECT_EQ(source.variables(), std::vector<std::string>{"u"});
  try {
    source.read("v");
    FAIL();
  } catch (const VariableError& error) {
    EXPECT_NE(std::string(error.what()).find("no numeric variable v; it has [u]"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(source.read("label"), VariableError);
  EXPECT_THROW(source.read("u"), VariableError);  // _Unsigned
  EXPECT_NO_THROW(source.read("u", {}, {.decode = false}));
  EXPECT_THROW(source.read("u", {{2}, {3}}), RangeError);
  EXPECT_THROW(source.read("u", {{-1}, {1}}), RangeError);
  EXPECT_THROW(source.read("u", {{0, 0, 0}, {1, 1, 1}}), InvalidArgument);
  EXPECT_EQ(source.read("u", {{4}, {0}}).sizes(), (std::vector<std::int64_t>{0, 3}));
}

TEST(NetcdfSource, ThreadsMayShareIt) {
  const TemporaryFile file;
  torch::manual_seed(3);
  const at::Tensor data = torch::randn({40, 9, 11}, at::kDouble);
  {
    Writer writer(file.path, NC_NETCDF4);
    writer.values(writer.variable("u", NC_DOUBLE, {40, 9, 11}), data);
  }
  const NetcdfSource shared(file.path);
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      const NetcdfSource own(file.path);
      for (std::int64_t i = 0; i < 40; ++i)
        for (const NetcdfSource* source : {&shared, &own})
          wrong[t] += !at::equal(source->read("u", {{i}, {1}}, {.dtype = at::kDouble})[0], data[i]);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace tessera::netcdf_source_test
