// Loggers: what is in the files, also after a run was interrupted and went on.

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "support.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/logger.h"

namespace tessera::test {

using ::tessera::testing::contents;
using ::tessera::testing::put;

namespace {

std::string bytes_of_hex(const std::string& hex) {
  std::string out;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

}  // namespace

// The bytes that TensorFlow's record format and protocol buffers ask for: written down once by
// TensorBoard's own writer (EventFileWriter, tensorboard 2.21) from the same events.
TEST(EventFile, BytesOfTensorBoardsOwnWriter) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(
      version_event(1.5),
      bytes_of_hex("1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28"
                   "646c"));
  EXPECT_EQ(
      scalars_event(2.5, 300, {{"train/loss", 0.25}}),
      bytes_of_hex("2100000000000000017becf609000000000000044010ac022a130a110a0a747261696e2f6c6f"
                   "7373150000803e3cc9cac5"));
  EXPECT_EQ(restart_event(3.5, 301),
            bytes_of_hex("100000000000000095fbfe18090000000000000c4010ad023a020801fa9eaf8a"));
}

TEST(Loggers, LinesAreWholeAndGoOn) {
  const Folder folder;
  const std::string csv = folder / "logs/a/metrics.csv", json = folder / "logs/metrics.jsonl";
  {
    const auto a = csv_logger(csv), b = json_logger(json);
    for (const auto& logger : {a, b}) {
      logger->start(0);
      logger->log({{"train/loss", 0.1}, {"odd, \"name\"", 1}}, 10, 0);
      logger->log({{"train/loss", std::nan("")}, {"big", HUGE_VAL}}, 20, 1);
      logger->log({{"train/loss", 1.0 / 3}}, 30, 1);
      logger->flush();
    }
  }
  put(csv, contents(csv) + "40,1,0.5,cut");  // a process that was killed
  put(json, contents(json) + "{\"step\": 40, \"ep");
  for (const bool again : {false, true}) {
    const auto a = csv_logger(csv), b = json_logger(json);
    for (const auto& logger : {a, b}) {
      logger->start(20);
      logger->log({{"train/loss", 0.5}}, again ? 32 : 31, 1);
      logger->flush();
    }
  }
  // Without the times, which are the third field.
  const auto timeless = [](const std::string& text) {
    std::string out, line;
    std::istringstream in(text);
    while (std::getline(in, line)) {
      const auto second = line.find(',', line.find(',') + 1);
      const auto third = line.find(',', second + 1);
      out += line.substr(0, second) + line.substr(third) + "\n";
    }
    return out;
  };
  EXPECT_EQ(timeless(contents(csv)),
            "step,epoch,name,value\n10,0,\"odd, \"\"name\"\"\",1\n10,0,train/loss,"
            "0.10000000000000001\n20,1,big,inf\n20,1,train/loss,nan\n32,1,train/loss,0.5\n");
  EXPECT_EQ(timeless(contents(json)),
            "{\"step\": 10, \"epoch\": 0, \"odd, \\\"name\\\"\": 1, \"train/loss\": "
            "0.10000000000000001}\n{\"step\": 20, \"epoch\": 1, \"big\": null, \"train/loss\": "
            "null}\n{\"step\": 32, \"epoch\": 1, \"train/loss\": 0.5}\n");
  EXPECT_THROW(csv_logger(""), InvalidArgument);
  put(folder / "file", "x");
  EXPECT_THROW(csv_logger(folder / "file/a.csv")->start(0), FileError);
}

TEST(Loggers, OnlyTheFirstRankWrites) {
  const Folder folder;
  on_threads(3, [&](DistributedManager& manager) {
    Regression task;
    TrainerOptions options;
    options.strategy = std::make_shared<DDPStrategy>(manager);
    options.session.signals = false;
    options.log_every_steps = 2;
    const std::string own = folder / std::to_string(manager.rank());
    options.loggers = {csv_logger(own + "/m.csv"), json_logger(own + "/m.jsonl"),
                       tensorboard_logger(own + "/tb")};
    Trainer(options).fit(task, ragged_batches(manager.rank(), 4),
                         ragged_batches(manager.rank(), 1));
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "1"));
  EXPECT_FALSE(std::filesystem::exists(folder / "2"));
  const std::string csv = contents(folder / "0/m.csv");
  for (const std::string name :
       {"train/loss", "train/mse", "train/loss_epoch", "val/loss", "val/rows"})
    EXPECT_NE(csv.find("," + name + ","), std::string::npos) << csv;
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "0/tb")) {
    ++files;
    // Records that fit together.
    const std::string bytes = contents(entry.path().string());
    std::size_t at = 0, records = 0;
    while (at < bytes.size()) {
      std::uint64_t length = 0;
      ASSERT_GE(bytes.size() - at, 12u);
      std::memcpy(&length, bytes.data() + at, 8);
      ASSERT_GE(bytes.size() - at, 16 + length);
      EXPECT_EQ(event_record(bytes.substr(at + 12, length)), bytes.substr(at, 16 + length));
      at += 16 + length;
      ++records;
    }
    // The version, two of the training, and of its pace, validation, epoch.
    EXPECT_EQ(records, 1u + 2 * 2 + 2);
  }
  EXPECT_EQ(files, 1);
}

}  // namespace tessera::test
