#include "tessera/comm/store/detail/job_store.h"

#include <c10/util/intrusive_ptr.h>

namespace tessera::detail {
namespace {

std::string_view view(const std::vector<std::uint8_t>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::vector<std::uint8_t> bytes(std::string_view s) { return {s.begin(), s.end()}; }

void put_keys(Writer& out, const std::vector<std::string>& keys) {
  out.number(static_cast<std::uint32_t>(keys.size()));
  for (const auto& key : keys) out.text(key);
}

}  // namespace

std::string JobStore::call(Frame kind, const std::function<void(Writer&)>& fields,
                           std::chrono::milliseconds limit) const {
  return connection_->call(kind, fields, limit, &stop_);
}

void JobStore::interrupt() {
  stop_ = true;
  connection_->wake();
}

c10::intrusive_ptr<c10d::Store> JobStore::clone() {
  return c10::make_intrusive<JobStore>(connection_, timeout_);
}

void JobStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  multiSet({key}, {value});
}

std::vector<std::uint8_t> JobStore::compareSet(const std::string& key,
                                               const std::vector<std::uint8_t>& expected,
                                               const std::vector<std::uint8_t>& desired) {
  const auto reply = call(
      Frame::compare, [&](Writer& out) { out.text(key).text(view(expected)).text(view(desired)); },
      timeout_);
  return bytes(Reader(reply).text());
}

std::vector<std::uint8_t> JobStore::get(const std::string& key) { return multiGet({key}).front(); }

std::int64_t JobStore::add(const std::string& key, std::int64_t value) {
  const auto reply = call(Frame::add, [&](Writer& out) { out.text(key).number(value); }, timeout_);
  return Reader(reply).number<std::int64_t>();
}

bool JobStore::deleteKey(const std::string& key) {
  const auto reply = call(Frame::remove, [&](Writer& out) { out.text(key); }, timeout_);
  return Reader(reply).number<std::int64_t>() > 0;
}

bool JobStore::check(const std::vector<std::string>& keys) {
  const auto reply = call(Frame::check, [&](Writer& out) { put_keys(out, keys); }, timeout_);
  return Reader(reply).number<std::int64_t>() > 0;
}

std::int64_t JobStore::getNumKeys() {
  const auto reply = call(Frame::count, [](Writer&) {}, timeout_);
  return Reader(reply).number<std::int64_t>();
}

void JobStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void JobStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) {
  call(
      Frame::wait, [&](Writer& out) { put_keys(out, keys); }, limit.count() > 0 ? limit : timeout_);
}

void JobStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  call(Frame::append, [&](Writer& out) { out.text(key).text(view(value)); }, timeout_);
}

std::vector<std::vector<std::uint8_t>> JobStore::multiGet(const std::vector<std::string>& keys) {
  const auto reply = call(Frame::get, [&](Writer& out) { put_keys(out, keys); }, timeout_);
  Reader in(reply);
  std::vector<std::vector<std::uint8_t>> values;
  for (std::size_t i = 0; i < keys.size(); ++i) values.push_back(bytes(in.text()));
  return values;
}

void JobStore::multiSet(const std::vector<std::string>& keys,
                        const std::vector<std::vector<std::uint8_t>>& values) {
  TORCH_CHECK(keys.size() == values.size(), "multiSet: ", keys.size(), " keys and ", values.size(),
              " values");
  const auto fill = [&](Writer& out) {
    out.number(static_cast<std::uint32_t>(keys.size()));
    for (std::size_t i = 0; i < keys.size(); ++i) out.text(keys[i]).text(view(values[i]));
  };
  call(Frame::set, fill, timeout_);
}

}  // namespace tessera::detail
