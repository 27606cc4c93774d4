#pragma once
// Event files, as TensorBoard reads them: records of protocol buffers in the framing of TFRecord.
//
//   a record:  length (8 bytes), masked CRC-32C of those 8, the bytes, masked CRC-32C of the bytes
//   masked:    ((crc >> 15) | (crc << 17)) + 0xa282ead8, modulo 2^32
//   Event:     wall_time = 1 (double), step = 2 (int64), file_version = 3 (string),
//              summary = 5 (Summary), session_log = 7 (SessionLog)
//   Summary:   value = 1 (repeated Value);  Value: tag = 1 (string), simple_value = 2 (float)
//   SessionLog: status = 1 (START is 1)
//
// All numbers little-endian. Sources: TensorFlow's record_writer.h, event.proto and summary.proto.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace tessera {

/// CRC-32C (Castagnoli, RFC 3720): crc32c("123456789") = 0xe3069283.
std::uint32_t crc32c(std::string_view bytes);
/// The framing of one record around it.
std::string event_record(std::string_view bytes);

/// The records of an event file.
std::string version_event(double wall_time);
/// Scalars of a step.
std::string scalars_event(double wall_time, std::int64_t step,
                          const std::map<std::string, double>& values);
/// A run begins at this step: readers pass over what earlier files have of it and later ones.
std::string restart_event(double wall_time, std::int64_t step);

}  // namespace tessera
