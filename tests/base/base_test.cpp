#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <clocale>
#include <fstream>
#include <functional>
#include <limits>
#include <locale>
#include <set>
#include <thread>

#include "tessera/base/deadline.h"
#include "tessera/base/error.h"
#include "tessera/base/hash.h"
#include "tessera/base/internal/file.h"
#include "tessera/base/internal/name.h"
#include "tessera/base/internal/vector.h"
#include "tessera/base/number.h"
#include "tessera/base/text.h"

namespace tessera {

TEST(Hash, IsTheSameEverywhere) {
  // Computed once from the published definitions of FNV-1a and the MurmurHash3 finaliser.
  EXPECT_EQ(Hash().value(), Hash().value());
  EXPECT_NE(Hash().text("ab").text("c").value(), Hash().text("a").text("bc").value());
  EXPECT_NE(Hash().number(1).number(2).value(), Hash().number(2).number(1).value());
}

TEST(Hash, SpreadsConsecutiveNumbers) {
  std::set<std::uint64_t> low_bits;
  for (std::uint64_t i = 0; i < 4096; ++i) low_bits.insert(Hash().number(i).value() & 0xffff);
  EXPECT_GT(low_bits.size(), 3800u);
}

TEST(Deadline, Saturates) {
  using namespace std::chrono;
  const auto now = steady_clock::now();
  const auto days_away = [&](Deadline deadline) {
    return duration_cast<hours>(deadline - now).count() / 24;
  };
  EXPECT_EQ(days_away(deadline_after(milliseconds::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(hours::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(nanoseconds::max(), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(milliseconds(1'000'000'000'000'000), now)), 3650);
  EXPECT_EQ(days_away(deadline_after(duration<double>(1e300), now)), 3650);
  EXPECT_EQ(deadline_after(milliseconds(250), now) - now, milliseconds(250));
  EXPECT_EQ(deadline_after(microseconds(1), now) - now, milliseconds(1));
  for (const auto none : {milliseconds(0), milliseconds(-5), milliseconds::min()}) {
    EXPECT_EQ(deadline_after(none, now), now);
    EXPECT_EQ(bounded_limit(none), milliseconds(0));
  }
  EXPECT_EQ(deadline_after(hours(1), Deadline::max()), Deadline::max());
  EXPECT_GT(time_left(Deadline::max()), hours(24 * 365 * 100));
  EXPECT_EQ(time_left(Deadline::min()), milliseconds(0));
  EXPECT_EQ(poll_milliseconds(deadline_after(milliseconds::max())),
            std::numeric_limits<int>::max());
}

TEST(Text, ListsAndTruncation) {
  EXPECT_EQ(concat("rank ", 3, " of ", 4), "rank 3 of 4");
  EXPECT_EQ(list(std::vector<int>{1, 2}), "[1, 2]");
  EXPECT_EQ(list(std::vector<int>(5, 7), 2), "[7, 7, ... (5 in all)]");
}

TEST(Text, JoinsItems) {
  EXPECT_EQ(joined(std::vector<int>{}, ", "), "");
  EXPECT_EQ(joined(std::vector<int>{1, 2, 3}, "-"), "1-2-3");
  EXPECT_EQ(joined(std::vector<std::string>{"", ""}, ","), ",");
  EXPECT_EQ(joined(std::vector<int>{1, 2}, " ", [](int n) { return concat("rank ", n); }),
            "rank 1 rank 2");
}

TEST(Name, StandsBehindThePathOfItsOwners) {
  EXPECT_EQ(dotted("", "weight"), "weight");
  EXPECT_EQ(dotted("net.0", "weight"), "net.0.weight");
}

TEST(Vector, IsMadeOfNumbersAndOfOtherRanges) {
  EXPECT_EQ(numbers_below(3), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(numbers_below<std::int64_t>(0), std::vector<std::int64_t>());
  EXPECT_EQ(numbers_below(6, [](int n) { return n % 2 == 1; }), (std::vector<int>{1, 3, 5}));
  const std::vector<std::pair<std::string, int>> pairs{{"a", 1}, {"b", 2}};
  EXPECT_EQ(mapped(pairs, &std::pair<std::string, int>::second), (std::vector<int>{1, 2}));
  EXPECT_EQ(mapped(pairs, [](const auto& pair) { return pair.second > 1; }),
            (std::vector<bool>{false, true}));
  EXPECT_EQ(keys_of(pairs), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(filtered(pairs, [](const auto& pair) { return pair.second > 1; }),
            (std::vector<std::pair<std::string, int>>{{"b", 2}}));
}

// What an application may set for its own texts: 1.234.567,5.
struct Grouped : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class OtherLocale {
 public:
  OtherLocale() { std::locale::global(std::locale(std::locale::classic(), new Grouped)); }
  ~OtherLocale() {
    std::locale::global(before_);
    std::setlocale(LC_ALL, "C");
  }

 private:
  std::locale before_;
};

TEST(Text, IsTheSameInEveryLocale) {
  const OtherLocale german;
  std::ostringstream plain;
  plain << 12345;
  ASSERT_EQ(plain.str(), "12.345") << "the locale is set";
  EXPECT_EQ(concat("port ", 39649, " after ", 1.5, " s"), "port 39649 after 1.5 s");
  EXPECT_EQ(list(std::vector<double>{1234.5, 2}), "[1234.5, 2]");
  int number = 0;
  double real = 0;
  EXPECT_TRUE(TextReader("1234 1.5") >> number >> real);
  EXPECT_EQ(number, 1234);
  EXPECT_EQ(real, 1.5);
}

TEST(Number, IsReadAndWrittenTheSameInEveryLocale) {
  for (const char* name : {"C", "de_DE.UTF-8", "de_DE", "fr_FR.UTF-8"}) {
    if (!std::setlocale(LC_ALL, name)) continue;
    EXPECT_EQ(parse_real("1.5e3"), 1500.0) << name;
    EXPECT_EQ(parse_real("+.5"), 0.5);
    EXPECT_EQ(parse_real("2."), 2.0);
    EXPECT_EQ(parse_hex_real("-0x1.8p+1"), -3.0);
    EXPECT_EQ(fixed(2.25, 1), "2.2");
    EXPECT_EQ(fixed(1234.5, 2), "1234.50");
    EXPECT_EQ(significant(0.00012345, 3), "0.000123");
    EXPECT_EQ(significant(1e20, 3), "1e+20");
  }
  std::setlocale(LC_ALL, "C");
}

TEST(Number, OtherTextIsNone) {
  for (const char* text : {"", " 1", "1 ", "1,5", "1.5x", "inf", "nan", "0x10", "--1", "+-1", "+",
                           "-", ".", "e5", "1e", "1e999", "1.5.2"})
    EXPECT_EQ(parse_real(text), std::nullopt) << text;
  for (const char* text :
       {"", "1.5", "0x", "0x1.8p+1 ", "0x1.8", "0x1.8p", "0x1.8q", "--0x1p+0", "0x-1p+0", "0xnan"})
    EXPECT_EQ(parse_hex_real(text), std::nullopt) << text;
  for (const char* text : {"", "-1", "+1", " 1", "1 ", "1.", "18446744073709551616"})
    EXPECT_EQ(parse_number(text), std::nullopt) << text;
  EXPECT_EQ(parse_number("18446744073709551615"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(parse_number("0007"), 7u);
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const FileError& error) {
    return error.what();
  }
  return "no error";
}

TEST(File, AFileThatShrinksIsAnErrorAndNoSignal) {
  const std::string path = testing::TempDir() + concat("tessera_file_", getpid());
  std::ofstream(path) << std::string(100'000, 'x');
  const RandomAccessFile file(path);
  EXPECT_EQ(file.size(), 100'000u);
  std::string bytes(10, ' ');
  file.read(99'990, bytes.data(), bytes.size());
  EXPECT_EQ(bytes, "xxxxxxxxxx");
  ASSERT_EQ(truncate(path.c_str(), 50'000), 0);
  EXPECT_NE(
      message_of([&] { file.read(99'990, bytes.data(), 10); }).find("was truncated or replaced"),
      std::string::npos);
  file.read(49'990, bytes.data(), 10);
  unlink(path.c_str());
}

TEST(File, WhatIsNoRegularFileDoesNotBlock) {
  const std::string pipe = testing::TempDir() + concat("tessera_pipe_", getpid());
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(message_of([&] { RandomAccessFile{pipe}; }).find("no regular file"), std::string::npos);
  EXPECT_EQ(read_whole_file(pipe), "") << "no process writes";
  // As long as it is open, a write does not fail between two reads.
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  std::thread writer([&] { std::ofstream(pipe) << "text"; });
  // Until the writer is there, a pipe reads as empty.
  std::string text;
  while (text.empty()) text = read_whole_file(pipe);
  writer.join();
  close(reader);
  EXPECT_EQ(text, "text");
  unlink(pipe.c_str());
  EXPECT_NE(message_of([] { RandomAccessFile{"/"}; }).find("no regular file"), std::string::npos);
  EXPECT_NE(message_of([] { read_whole_file("/"); }), "no error");
  EXPECT_NE(message_of([] { read_whole_file("/no/such"); }), "no error");
  EXPECT_NE(message_of([] { read_whole_file("/dev/zero", 1000); }).find("more than 1000"),
            std::string::npos);
}

TEST(Name, BlanksAndControlCharactersAreFaults) {
  for (const char* name : {"host-1.a_b", "n\xc3\xa4me", "10.0.0.1"})
    EXPECT_EQ(name_fault(name), std::nullopt) << name;
  for (const char* name : {"", "a b", "a\nb", "a\tb", "\x1b[2J", "a\x7f"})
    EXPECT_TRUE(name_fault(name)) << name;
  EXPECT_EQ(name_fault("a b", true), std::nullopt);
  EXPECT_EQ(printable("a\x1b\nb"), "a\\x1b\\x0ab");
  EXPECT_EQ(printable("abcdef", 3), "abc... (6 bytes in all)");
}

TEST(MarkupText, HasNoMarkup) {
  EXPECT_EQ(markup_text("<a href=\"x\">&\n\t\u00e9"), "&lt;a href=&quot;x&quot;&gt;&amp;\u00e9");
}

TEST(Error, CanBeCaughtByItsBase) {
  EXPECT_THROW(throw InvalidArgument("x"), Error);
  EXPECT_THROW(throw NotAvailable("x"), std::runtime_error);
}

}  // namespace tessera
