#pragma once
// The protocol of the job's store. Both ends first send `store_magic`, then frames: size of the
// rest (4 bytes), kind (1), call number (8), fields. Numbers are little-endian as all hosts of a
// job are; a text is its length (4 bytes) and its bytes.
//
// The meeting: the store sends `challenge` to whoever connects. The rank answers with `hello`,
// which ends with a proof that it knows the job's secret; the store answers with its own, in
// `welcome`, and with `ready` when all ranks are there. Until a connection has proven itself,
// neither end keeps more than `largest_stranger` bytes of it.

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::detail {

/// In bytes; a longer message does not come from this protocol.
inline constexpr std::size_t largest_frame = std::size_t{1} << 30;

/// The blank line makes a web server that listens on the port answer at once instead of waiting for
/// more.
inline constexpr std::string_view store_magic = "TESSERA/2\r\n\r\n";

inline constexpr std::size_t largest_stranger = 4096;
/// Longer names of processes and jobs are truncated.
inline constexpr std::size_t longest_name = 512;

enum class Frame : std::uint8_t {
  // from a rank
  hello,     // rank, world size, limit in ms, who (process and host), job, nonce, proof
  set,       // n, n x (key, value)                       -> reply
  get,       // n, n x key; answers when all exist        -> reply: n x value
  wait,      // n, n x key; answers when all exist        -> reply
  add,       // key, amount                               -> reply: sum
  compare,   // key, expected, desired                    -> reply: value
  remove,    // key                                       -> reply: 0 or 1
  check,     // n, n x key                                -> reply: 0 or 1
  count,     //                                           -> reply: number of keys
  append,    // key, value                                -> reply
  cancel,    // gives up the call of this number
  leave,     // this rank deregisters
  poison,    // group, n, n x member, n, n x lost rank, timed out, reason
  ask,       // group, n, n x member                      -> reply, then an answer per member
  position,  // answers a question: begun, operation
  forget,    // prefix, n, members or none: once n ranks have said it, its keys are removed
  // from the server
  challenge,  // complete, name of the secret, nonce
  welcome,    // proof
  ready,      // all ranks are here
  retry,      // the meeting of an earlier store has not ended: try again
  refused,    // text, n, n x rank
  reply,
  lost,      // rank, text
  poisoned,  // group, n, n x lost rank, timed out, reason
  question,  // group
  answer,    // rank, answered, begun, operation
};

class Writer {
 public:
  explicit Writer(Frame kind, std::uint64_t call = 0) {
    number<std::uint32_t>(0);
    number(static_cast<std::uint8_t>(kind));
    number(call);
  }
  template <class T>
  Writer& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view s) {
    number(static_cast<std::uint32_t>(s.size()));
    bytes_.append(s);
    return *this;
  }
  template <class Range>
  Writer& numbers(const Range& range) {
    number(static_cast<std::uint32_t>(range.size()));
    for (const auto value : range) number(static_cast<std::int64_t>(value));
    return *this;
  }
  std::string take() {
    const auto rest = static_cast<std::uint32_t>(bytes_.size() - sizeof(std::uint32_t));
    std::memcpy(bytes_.data(), &rest, sizeof rest);
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

/// Reads the fields of one frame (without its size). Throws std::out_of_range past the end.
class Reader {
 public:
  explicit Reader(std::string_view frame) : bytes_(frame) {
    kind = static_cast<Frame>(number<std::uint8_t>());
    call = number<std::uint64_t>();
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() { return take(number<std::uint32_t>()); }
  template <class List>
  List numbers() {
    List values;
    for (auto n = number<std::uint32_t>(); n > 0; --n)
      values.push_back(static_cast<typename List::value_type>(number<std::int64_t>()));
    return values;
  }

  Frame kind;
  std::uint64_t call;

 private:
  std::string_view take(std::size_t n) {
    if (n > bytes_.size()) throw std::out_of_range("frame of the job's store is too short");
    const auto part = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return part;
  }

  std::string_view bytes_;
};

}  // namespace tessera::detail
