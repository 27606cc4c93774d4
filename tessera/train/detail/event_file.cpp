#include "tessera/train/detail/event_file.h"

#include <array>
#include <bit>

namespace tessera {

namespace {

std::array<std::uint32_t, 256> crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t c = n;
    for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? 0x82f63b78u ^ (c >> 1) : c >> 1;
    table[n] = c;
  }
  return table;
}

void little_endian(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

// The wire types of protocol buffers that occur here.
void varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}
void number_field(std::string& out, int field, std::uint64_t value) {
  varint(out, static_cast<std::uint64_t>(field) << 3);
  varint(out, value);
}
void double_field(std::string& out, int field, double value) {
  varint(out, static_cast<std::uint64_t>(field) << 3 | 1);
  little_endian(out, std::bit_cast<std::uint64_t>(value), 8);
}
void float_field(std::string& out, int field, float value) {
  varint(out, static_cast<std::uint64_t>(field) << 3 | 5);
  little_endian(out, std::bit_cast<std::uint32_t>(value), 4);
}
void bytes_field(std::string& out, int field, std::string_view bytes) {
  varint(out, static_cast<std::uint64_t>(field) << 3 | 2);
  varint(out, bytes.size());
  out += bytes;
}

std::string event_at(double wall_time, std::int64_t step) {
  std::string event;
  double_field(event, 1, wall_time);
  // A number that is zero is left out, as all writers do.
  if (step != 0) number_field(event, 2, static_cast<std::uint64_t>(step));
  return event;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = crc32c_table();
  std::uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = table[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

std::string event_record(std::string_view bytes) {
  const auto masked = [](std::string_view what) {
    const std::uint32_t crc = crc32c(what);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
  };
  std::string length, record;
  little_endian(length, bytes.size(), 8);
  record = length;
  little_endian(record, masked(length), 4);
  record += bytes;
  little_endian(record, masked(bytes), 4);
  return record;
}

std::string version_event(double wall_time) {
  std::string event = event_at(wall_time, 0);
  bytes_field(event, 3, "brain.Event:2");
  return event_record(event);
}

std::string scalars_event(double wall_time, std::int64_t step,
                          const std::map<std::string, double>& values) {
  std::string summary;
  for (const auto& [name, number] : values) {
    std::string value;
    bytes_field(value, 1, name);
    float_field(value, 2, static_cast<float>(number));
    bytes_field(summary, 1, value);
  }
  std::string event = event_at(wall_time, step);
  bytes_field(event, 5, summary);
  return event_record(event);
}

std::string restart_event(double wall_time, std::int64_t step) {
  std::string log, event = event_at(wall_time, step);
  number_field(log, 1, 1);
  bytes_field(event, 7, log);
  return event_record(event);
}

}  // namespace tessera
