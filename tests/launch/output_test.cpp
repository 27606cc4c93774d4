#include "tessera/launch/detail/output.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

namespace tessera::detail {
namespace {

std::string join(const std::vector<LineSplitter::Line>& lines) {
  std::string text;
  for (const auto& line : lines) text += line.text + line.end;
  return text;
}

TEST(LineSplitter, AnySplitOfTheBytesGivesTheSameLines) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 500; ++trial) {
    std::string bytes;
    for (int n = static_cast<int>(random() % 60); n > 0; --n) bytes += "ab\n\0c"[random() % 5];
    LineSplitter splitter;
    std::string joined;
    for (std::size_t at = 0; at < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(1 + random() % 7, bytes.size() - at);
      joined += join(splitter.add({bytes.data() + at, size}));
      at += size;
    }
    joined += join(splitter.finish());
    const std::string whole = bytes.empty() || bytes.back() == '\n' ? bytes : bytes + '\n';
    ASSERT_EQ(joined, whole);
  }
}

TEST(LineSplitter, LongLinesComeInPiecesAndNothingIsLost) {
  for (std::size_t length : {0u, 1u, 9u, 10u, 11u, 20u, 25u}) {
    LineSplitter splitter(false, 10);
    const auto lines = splitter.add(std::string(length, 'x') + "\nnext\n");
    std::string all;
    for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
      EXPECT_LE(lines[i].text.size(), 10u);
      all += lines[i].text;
    }
    EXPECT_EQ(all, std::string(length, 'x'));
    EXPECT_EQ(lines.back().text, "next");
  }
}

TEST(LineSplitter, CarriageReturnsAreBarsOnTerminalsOnly) {
  EXPECT_EQ(join(LineSplitter(true).add("\r10%\r20%\r\ndone\r\n")), "10%\r20%\r\ndone\r\n");
  EXPECT_EQ(join(LineSplitter(false).add("\r10%\r20%\r\ndone\r\n")), "\r10%\r20%\ndone\n");
}

TEST(OutputStream, NeverBlocksOnASlowReaderAndLosesNothing) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  OutputStream stream(ends[1]);
  std::string expected;
  for (int i = 0; i < 20000; ++i) {
    stream.put("[0] ", std::to_string(i));
    expected += "[0] " + std::to_string(i) + "\n";
  }
  stream.flush();  // Nobody reads: returns with the pipe full.
  EXPECT_TRUE(stream.pending());
  std::string got;
  char buffer[5000];
  while (got.size() < expected.size()) {
    const ssize_t size = read(ends[0], buffer, sizeof buffer);
    ASSERT_GT(size, 0);
    got.append(buffer, static_cast<std::size_t>(size));
    stream.flush();
  }
  EXPECT_EQ(got, expected);
  EXPECT_FALSE(stream.pending());
  close(ends[0]);
  close(ends[1]);
}

TEST(OutputStream, ASteadilySlowReaderCostsLittleMemory) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  OutputStream stream(ends[1]);
  const std::string line(4000, 'x');
  char buffer[4005];
  std::size_t put = 0, got = 0;
  // The reader is always a megabyte behind.
  while (got < 40u << 20) {
    while (put < got + (1u << 20)) {
      stream.put("[0] ", line);
      put += line.size() + 5;
    }
    stream.flush();
    const ssize_t size = read(ends[0], buffer, sizeof buffer);
    ASSERT_GT(size, 0);
    got += static_cast<std::size_t>(size);
  }
  EXPECT_TRUE(stream.pending());
  EXPECT_LT(stream.held(), 8u << 20);
  close(ends[0]);
  close(ends[1]);
}

TEST(OutputStream, AFullDiskIsNoReaderThatWentAway) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (full < 0) GTEST_SKIP() << "no /dev/full here";
  OutputStream stream(full);
  stream.put("[0] ", "lost");
  EXPECT_FALSE(stream.flush());
  EXPECT_FALSE(stream.broken());
  EXPECT_FALSE(stream.pending());
  EXPECT_EQ(stream.lost(), 9u);
  EXPECT_EQ(stream.failure(), ENOSPC);
  stream.put("[0] ", "lost too");
  EXPECT_EQ(stream.lost(), 22u) << "not tried again at once";
  close(full);
}

TEST(OutputStream, AClosedDescriptorIsNoEndlessWait) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  OutputStream stream(ends[1]);
  close(ends[0]);
  close(ends[1]);
  stream.put("", "text");
  stream.flush();
  EXPECT_TRUE(stream.broken());
  EXPECT_FALSE(stream.pending());
}

TEST(LineSpool, FirstInFirstOutWhilstWriting) {
  std::mt19937 random(3);
  LineSpool spool;
  int next_in = 0, next_out = 0;
  auto text = [](int i) {
    return std::string(static_cast<std::size_t>(i % 50), static_cast<char>('a' + i % 26)) +
           std::to_string(i);
  };
  LineSpool::Item item;
  while (next_out < 3000) {
    if (next_in < 3000 && random() % 3) {
      ASSERT_TRUE(spool.put(next_in % 2, text(next_in)));
      ++next_in;
    } else if (spool.get(&item)) {
      ASSERT_EQ(item.text, text(next_out));
      ASSERT_EQ(item.channel, next_out % 2);
      ++next_out;
    } else {
      ASSERT_EQ(next_in, next_out);
    }
  }
  EXPECT_TRUE(spool.empty());
}

}  // namespace
}  // namespace tessera::detail
