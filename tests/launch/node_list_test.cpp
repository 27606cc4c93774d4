#include "tessera/launch/internal/node_list.h"

#include <gtest/gtest.h>

#include <random>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera {
namespace {

using Hosts = std::vector<std::string>;

TEST(NodeList, Recorded) {
  const std::vector<std::pair<std::string, std::string>> first_hosts{
      {"alpha,beta,gamma", "alpha"},    {"alpha beta", "alpha"},
      {"1.2.3.[100-110]", "1.2.3.100"}, {"1.2.3.[089, 100-110]", "1.2.3.089"},
      {"host[22]", "host22"},           {"host[1,5-9]", "host1"},
      {"host[5-9,1]", "host5"},         {"alpha, host[5-9], gamma", "alpha"},
      {"alpha[3,1], beta", "alpha3"}};
  for (const auto& [text, first] : first_hosts)
    EXPECT_EQ(expand_node_list(text).front(), first) << text;
}

TEST(NodeList, Expanded) {
  EXPECT_EQ(expand_node_list("alpha[3,1],beta"), (Hosts{"alpha3", "alpha1", "beta"}));
  EXPECT_EQ(expand_node_list("1.2.3.[089, 100-102]"),
            (Hosts{"1.2.3.089", "1.2.3.100", "1.2.3.101", "1.2.3.102"}));
  EXPECT_EQ(expand_node_list("n[08-11]"), (Hosts{"n08", "n09", "n10", "n11"}));
  EXPECT_EQ(expand_node_list("n[9-10]"), (Hosts{"n9", "n10"}));
  EXPECT_EQ(expand_node_list("n[098-101]"), (Hosts{"n098", "n099", "n100", "n101"}));
  EXPECT_EQ(expand_node_list("r[1-2]n[08-09]-ib"),
            (Hosts{"r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"}));
  EXPECT_EQ(expand_node_list("r[1][2]-[3-4][5]n[6,7]x[8]"),
            (Hosts{"r12-35n6x8", "r12-35n7x8", "r12-45n6x8", "r12-45n7x8"}));
  EXPECT_EQ(expand_node_list("  a ,\tb  c "), (Hosts{"a", "b", "c"}));
  EXPECT_EQ(expand_node_list("node-a.x_y"), (Hosts{"node-a.x_y"}));
}

TEST(NodeList, Refused) {
  for (const char* text : {"",
                           " ",
                           ",",
                           "a,",
                           ",a",
                           "a,,b",
                           "n[",
                           "n[1",
                           "n[1-",
                           "n[1-2",
                           "n[]",
                           "n[a]",
                           "n[2-1]",
                           "n[1,]",
                           "n[,1]",
                           "n[1-2-3]",
                           "n]",
                           "n[1]]",
                           "n[[1]]",
                           "n(1)",
                           "n[-1]",
                           "n[1-99999999999999999999999]",
                           "n[0-9999999]",
                           "n[1-1000]m[1-1000]o[1-1000]"}) {
    EXPECT_THROW(expand_node_list(text), ConfigurationError) << text;
  }
}

TEST(NodeList, ListsThatNameGigabytesAreRefusedWhileTheyGrow) {
  std::string ranges = "n[0-1048575";
  for (int i = 0; i < 400; ++i) ranges += ",0-1048575";
  const std::string padded = "n[" + std::string(100'000, '0') + "1-1000000]";
  std::string brackets = "n";
  for (int i = 0; i < 100'000; ++i) brackets += "[1]";
  for (const std::string& text :
       {ranges + "]", padded, "n[1-1000000]" + std::string(100'000, 'x'),
        std::string(100'000, 'x') + "[1-1000000]", brackets,
        "n[1-1000]" + std::string(900, 'x') + "[1-1000]", std::string("a\x1b[2Jb")}) {
    try {
      expand_node_list(text);
      FAIL() << text.substr(0, 40);
    } catch (const ConfigurationError& error) {
      EXPECT_LT(std::string(error.what()).size(), 1000u);
      EXPECT_EQ(std::string(error.what()).find('\x1b'), std::string::npos);
    }
  }
  EXPECT_EQ(expand_node_list("node[0000001-1000000]").size(), 1'000'000u);
}

TEST(NodeList, ErrorsNameTheListAndThePlace) {
  try {
    expand_node_list("good,n[3-x]");
    FAIL();
  } catch (const ConfigurationError& error) {
    EXPECT_NE(std::string(error.what()).find("'good,n[3-x]', character 10"), std::string::npos)
        << error.what();
  }
}

// A list made up together with its expansion, by a generator that knows nothing of the reader.
struct Made {
  std::string text;
  Hosts hosts;
};

Made make_entry(std::mt19937& random) {
  auto upto = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const Hosts stems{"n", "host-", "10.0.0.", "a1b", "x_"};
  Made made;
  made.text = stems[upto(5)];
  made.hosts = {made.text};
  for (int brackets = upto(3); brackets > 0; --brackets) {
    Hosts numbers;
    std::string inside;
    for (int items = 1 + upto(3); items > 0; --items) {
      const int from = upto(120);
      const int length = upto(2) ? 0 : 1 + upto(12);
      const int width = upto(2) ? 0 : 1 + upto(5);
      auto padded = [&](int value) {
        std::string text = std::to_string(value);
        while (static_cast<int>(text.size()) < width) text = concat("0", text);
        return text;
      };
      if (!inside.empty()) inside += upto(2) ? "," : ", ";
      inside += padded(from);
      if (length) inside += concat("-", padded(from + length));
      const std::size_t least = padded(from).size();
      for (int value = from; value <= from + length; ++value) {
        std::string text = std::to_string(value);
        while (text.size() < least) text = concat("0", text);
        numbers.push_back(text);
      }
    }
    made.text += concat("[", inside, "]");
    const std::string tail = upto(2) ? "" : "-ib";
    made.text += tail;
    Hosts longer;
    for (const auto& host : made.hosts) {
      for (const auto& number : numbers) longer.push_back(concat(host, number, tail));
    }
    made.hosts = longer;
  }
  return made;
}

TEST(NodeList, GeneratedListsRoundTrip) {
  std::mt19937 random(20240607);
  for (int trial = 0; trial < 2000; ++trial) {
    Made all;
    for (int entries = 1 + static_cast<int>(random() % 4); entries > 0; --entries) {
      const Made entry = make_entry(random);
      if (!all.text.empty()) all.text += random() % 3 == 0 ? " " : random() % 2 == 0 ? ", " : ",";
      all.text += entry.text;
      all.hosts.insert(all.hosts.end(), entry.hosts.begin(), entry.hosts.end());
    }
    ASSERT_EQ(expand_node_list(all.text), all.hosts) << all.text;
  }
}

TEST(NodeList, AnyTruncatedListIsReadOrRefused) {
  std::mt19937 random(7);
  const std::string alphabet = "an12[]-,() x.0";
  for (int trial = 0; trial < 20000; ++trial) {
    std::string text;
    for (int n = static_cast<int>(random() % 12); n > 0; --n)
      text += alphabet[random() % alphabet.size()];
    try {
      for (const auto& host : expand_node_list(text)) ASSERT_FALSE(host.empty()) << text;
    } catch (const ConfigurationError&) {
    }
    try {
      expand_task_counts(text);
    } catch (const ConfigurationError&) {
    }
  }
}

TEST(TaskCounts, Recorded) {
  EXPECT_EQ(expand_task_counts("1(x2),3,4(x3)"), (std::vector<int>{1, 1, 3, 4, 4, 4}));
  EXPECT_EQ(expand_task_counts("8"), (std::vector<int>{8}));
  EXPECT_EQ(expand_task_counts("2(x2), 1"), (std::vector<int>{2, 2, 1}));
}

TEST(TaskCounts, Refused) {
  for (const char* text : {"", ",", "1,", ",1", "x", "1(2)", "1(x)", "1(x2", "1(x0)", "1x2", "-1",
                           "1(x99999999)", "99999999999999999999", "1 2"}) {
    EXPECT_THROW(expand_task_counts(text), ConfigurationError) << text;
  }
}

TEST(TaskCounts, GeneratedCountsRoundTrip) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    std::vector<int> counts;
    for (int groups = 1 + static_cast<int>(random() % 5); groups > 0; --groups) {
      const int tasks = static_cast<int>(random() % 130);
      const int times = 1 + static_cast<int>(random() % 6);
      if (!text.empty()) text += ',';
      text += times == 1 && random() % 2 ? concat(tasks) : concat(tasks, "(x", times, ")");
      counts.insert(counts.end(), static_cast<std::size_t>(times), tasks);
    }
    ASSERT_EQ(expand_task_counts(text), counts) << text;
  }
}

}  // namespace
}  // namespace tessera
