#include "record.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tessera/base/text.h"
#include "tessera/data/sources/source.h"

namespace relief {

namespace {

// Names and members, once for writing and reading.
template <class RecordType, class Visit>
void each_list(RecordType& r, const Visit& visit) {
  visit("rows", r.rows);
  visit("values_read", r.values_read);
  visit("tensor_bytes", r.tensor_bytes);
  visit("resident_bytes", r.resident_bytes);
  visit("losses", r.losses);
}
template <class RecordType, class Visit>
void each_number(RecordType& r, const Visit& visit) {
  visit("interpolation", r.interpolation);
  visit("network", r.network);
  visit("seconds_a_step", r.seconds_a_step);
}

Record read_record(const std::filesystem::path& path) {
  Record record;
  std::ifstream file(path);
  std::string line;
  int found = 0;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    each_list(record, [&](const char* known, auto& list) {
      if (name != known) return;
      for (typename std::decay_t<decltype(list)>::value_type value; words >> value;)
        list.push_back(value);
      ++found;
    });
    each_number(record, [&](const char* known, double& number) {
      found += name == known && words >> number;
    });
  }
  if (found != 8 || record.rows.empty() || record.tensor_bytes.size() != record.rows.size() ||
      record.resident_bytes.size() != record.rows.size())
    throw tessera::FileError(
        tessera::concat(path.string(), " is not a record of a run: remove it and run again"));
  return record;
}

}  // namespace

void write_record(const Record& record, const std::string& folder) {
  std::error_code ignored;  // A folder that cannot be made shows when the file is opened.
  std::filesystem::create_directories(folder, ignored);
  const auto path =
      std::filesystem::path(folder) / tessera::concat("ranks-", record.ranks(), ".txt");
  std::ofstream file(path);
  file.precision(17);
  each_list(record, [&](const char* name, const auto& list) {
    file << name;
    for (const auto value : list) file << ' ' << value;
    file << '\n';
  });
  each_number(record,
              [&](const char* name, double number) { file << name << ' ' << number << '\n'; });
  file.close();
  if (!file)
    throw tessera::FileError(tessera::concat("the record cannot be written to ", path.string()));
}

std::vector<Record> read_records(const std::string& folder) {
  std::vector<Record> records;
  std::error_code none;  // A folder that is not there holds no record.
  for (const auto& entry : std::filesystem::directory_iterator(folder, none))
    if (entry.path().filename().string().rfind("ranks-", 0) == 0)
      records.push_back(read_record(entry.path()));
  std::ranges::sort(records,
                    [](const Record& a, const Record& b) { return a.ranks() < b.ranks(); });
  return records;
}

double distance(const Record& a, const Record& b) {
  if (a.losses.size() != b.losses.size()) return -1;
  double most = 0;
  for (std::size_t i = 0; i < a.losses.size(); ++i)
    most = std::max(most, std::abs(a.losses[i] - b.losses[i]) / std::abs(b.losses[i]));
  return most;
}

}  // namespace relief
