// The backend of init_process_group("tessera"), made for Python's own c10d. A store of Python's is
// not to be had here without Python's headers; so the meeting of the ranks runs in a thread of its
// own and asks its caller for everything that it wants of the store.

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "library.h"
#include "tessera/base/deadline.h"
#include "tessera/base/text.h"
#include "tessera/comm/backends/hosts/hosts.h"
#include "tessera/comm/backends/shm/shm.h"
#include "tessera/comm/backends/transport.h"
#include "tessera/comm/group/detail/store_meeting.h"

namespace tessera::python {

namespace {

constexpr char kDigits[] = "0123456789abcdef";

/// Texts of Python are Unicode, and what ranks tell each other is bytes.
std::string to_hex(const std::vector<std::uint8_t>& bytes) {
  std::string text;
  for (const auto byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::vector<std::uint8_t> from_hex(const std::string& text) {
  std::vector<std::uint8_t> bytes;
  const std::string_view digits(kDigits);
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    const auto high = digits.find(text[i]), low = digits.find(text[i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos)
      throw std::runtime_error("what was found at the store is not what another rank left there");
    bytes.push_back(static_cast<std::uint8_t>(high << 4 | low));
  }
  return bytes;
}

/// A question of the meeting: ("put", key, text), ("get", key, seconds), ("wait", keys in lines,
/// seconds), ("check", keys in lines), ("add", key, number), ("delete", key), ("address", the name
/// of this life), and at the end ("done").
using Question = std::tuple<std::string, std::string, std::string>;

/// Between the thread of the meeting, which asks, and the caller, who answers.
class Conversation {
 public:
  /// Blocks until the caller has answered. Throws what went wrong there.
  std::string ask(Question question) {
    std::unique_lock lock(mutex_);
    if (!over_) {
      question_ = std::move(question);
      changed_.notify_all();
      changed_.wait(lock, [this] { return answer_.has_value() || over_; });
    }
    if (!answer_) throw std::runtime_error("the meeting of the ranks at their store is over");
    const Answer answer = std::move(*answer_);
    answer_.reset();
    if (!answer.problem.empty()) throw std::runtime_error(answer.problem);
    return answer.text;
  }
  /// There are no more questions.
  void end() {
    const std::lock_guard lock(mutex_);
    question_ = Question{"done", "", ""};
    over_ = true;
    changed_.notify_all();
  }

  Question next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return question_.has_value(); });
    return *question_;
  }
  void reply(const std::string& text, const std::string& problem) {
    const std::lock_guard lock(mutex_);
    if (!question_ || std::get<0>(*question_) == "done") return;
    question_.reset();
    answer_ = Answer{text, problem};
    changed_.notify_all();
  }
  /// The caller answers no more.
  void give_up() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

 private:
  struct Answer {
    std::string text, problem;
  };

  // guards all below
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Question> question_;
  std::optional<Answer> answer_;
  bool over_ = false;
};

/// The caller's store, as far as backends need one to meet.
class AskingStore : public c10d::Store {
 public:
  AskingStore(std::shared_ptr<Conversation> caller, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), caller_(std::move(caller)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<AskingStore>(caller_, timeout_);
  }
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    caller_->ask({"put", key, to_hex(value)});
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    return from_hex(caller_->ask({"get", key, seconds(timeout_)}));
  }
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    std::vector<std::vector<std::uint8_t>> values;
    for (const auto& key : keys) values.push_back(get(key));
    return values;
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    caller_->ask({"wait", lines_of(keys), seconds(timeout)});
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return std::stoll(caller_->ask({"add", key, std::to_string(value)}));
  }
  bool deleteKey(const std::string& key) override {
    return !caller_->ask({"delete", key, ""}).empty();
  }
  bool check(const std::vector<std::string>& keys) override {
    return keys.empty() || !caller_->ask({"check", lines_of(keys), ""}).empty();
  }
  std::int64_t getNumKeys() override {
    throw NotAvailable("getNumKeys of the store in which the ranks of a group meet");
  }

 private:
  static std::string seconds(std::chrono::milliseconds limit) {
    return concat(static_cast<double>(limit.count()) / 1000);
  }
  static std::string lines_of(const std::vector<std::string>& keys) {
    std::string lines;
    for (const auto& key : keys) lines += lines.empty() ? key : "\n" + key;
    return lines;
  }

  const std::shared_ptr<Conversation> caller_;
};

class BackendMeeting : public torch::CustomClassHolder {
 public:
  /// `host`: HostsOptions::host.
  BackendMeeting(std::int64_t rank, std::int64_t size, const std::string& name,
                 const std::vector<std::int64_t>& ranks, double seconds, const std::string& host) {
    HostsOptions options;
    options.name = name;
    options.timeout = bounded_limit(std::chrono::duration<double>(seconds));
    for (const auto r : ranks) options.ranks.push_back(static_cast<int>(r));
    options.host = host;
    options.plain = false;
    thread_ = std::thread([this, options, rank, size] {
      try {
        meet(static_cast<int>(rank), static_cast<int>(size), options);
      } catch (const std::exception& error) {
        problem_ = error.what();
      }
      caller_->end();
    });
  }
  ~BackendMeeting() override {
    caller_->give_up();
    thread_.join();
  }

  Question next() { return caller_->next(); }
  void answer(const std::string& text) { caller_->reply(text, ""); }
  void fail(const std::string& why) { caller_->reply("", why.empty() ? "the store failed" : why); }

  /// After "done". Throws what the ranks said.
  c10::intrusive_ptr<c10d::ProcessGroup> group() {
    if (!chosen_.transport)
      throw std::runtime_error(problem_.empty() ? "the ranks found no backend" : problem_);
    const auto backend = chosen_.transport->backend();
    auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    return group;
  }
  /// After "done": the backend's name, why it was chosen, and what kept ranks of one host from
  /// sharing memory ("": nothing did).
  std::tuple<std::string, std::string, std::string> way() {
    return {chosen_.name, chosen_.reason, chosen_.refused};
  }

 private:
  void meet(int rank, int size, HostsOptions options) {
    const auto asking = c10::make_intrusive<AskingStore>(caller_, options.timeout);
    const auto life = detail::name_of_life(*asking, rank, size, options.timeout);
    const auto store = c10::make_intrusive<c10d::PrefixStore>(life, asking);
    options.find_address = [this, life] { return caller_->ask({"address", life, ""}); };
    if (size > 1) {
      chosen_ = make_transport_by_host(store, rank, size, options);
      return;
    }
    chosen_ = {make_shm_transport(store, rank, size, options), "shm", "it has one rank", ""};
  }

  const std::shared_ptr<Conversation> caller_ = std::make_shared<Conversation>();
  // written before "done"
  ChosenTransport chosen_;
  std::string problem_;
  std::thread thread_;
};

}  // namespace

void register_backend(Library& library) {
  library.class_<BackendMeeting>("BackendMeeting")
      .def(torch::init<std::int64_t, std::int64_t, const std::string&,
                       const std::vector<std::int64_t>&, double, const std::string&>())
      .def("next", &BackendMeeting::next)
      .def("answer", &BackendMeeting::answer)
      .def("fail", &BackendMeeting::fail)
      .def("group", &BackendMeeting::group)
      .def("way", &BackendMeeting::way);
}

}  // namespace tessera::python
