// The backend of init_process_group("tessera"), made for Python's own c10d. A store of Python's is
// not to be had here without Python's headers; so the meeting of the ranks runs in a thread of its
// own and asks its caller for every word that it wants to leave at the store or to find there.

#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
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
#include "tessera/comm/backends/shm/shm.h"

namespace tessera::python {

namespace {

constexpr char kDigits[] = "0123456789abcdef";

/// Texts of Python are Unicode, and what ranks tell each other is bytes.
std::string to_hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  const std::string_view digits(kDigits);
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    const auto high = digits.find(text[i]), low = digits.find(text[i + 1]);
    if (high == std::string_view::npos || low == std::string_view::npos)
      throw std::runtime_error("what was found at the store is not what another rank left there");
    bytes += static_cast<char>(high << 4 | low);
  }
  return bytes;
}

/// A question of the meeting: ("put", key, text), ("get", key, seconds), and at the end ("done").
using Question = std::tuple<std::string, std::string, std::string>;

class BackendMeeting : public torch::CustomClassHolder {
 public:
  BackendMeeting(std::int64_t rank, std::int64_t size, const std::string& name,
                 const std::vector<std::int64_t>& ranks, double seconds) {
    ShmBackendOptions options;
    options.name = name;
    options.timeout = bounded_limit(std::chrono::duration<double>(seconds));
    for (const auto r : ranks) options.ranks.push_back(static_cast<int>(r));
    shm::Directory directory;
    directory.put = [this](const std::string& key, const std::string& bytes) {
      ask({"put", key, to_hex(bytes)});
    };
    directory.get = [this](const std::string& key, std::chrono::milliseconds limit) {
      return from_hex(ask({"get", key, concat(static_cast<double>(limit.count()) / 1000)}));
    };
    thread_ = std::thread([this, directory, options, rank, size] {
      try {
        backend_ =
            make_shm_backend(directory, static_cast<int>(rank), static_cast<int>(size), options);
      } catch (const std::exception& error) {
        problem_ = error.what();
      }
      const std::lock_guard lock(mutex_);
      question_ = Question{"done", "", ""};
      changed_.notify_all();
    });
  }
  ~BackendMeeting() override {
    fail("the meeting was given up");
    {
      const std::lock_guard lock(mutex_);
      given_up_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  Question next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return question_.has_value(); });
    return *question_;
  }
  void answer(const std::string& text) { reply({text, ""}); }
  void fail(const std::string& why) { reply({"", why.empty() ? "the store failed" : why}); }

  /// After "done". Throws what the ranks said.
  c10::intrusive_ptr<c10d::ProcessGroup> group() {
    if (!backend_) throw std::runtime_error(problem_);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(backend_->getRank(), backend_->getSize());
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, backend_);
    return group;
  }

 private:
  struct Answer {
    std::string text, problem;
  };

  std::string ask(Question question) {
    std::unique_lock lock(mutex_);
    question_ = std::move(question);
    changed_.notify_all();
    changed_.wait(lock, [this] { return answer_.has_value() || given_up_; });
    if (!answer_) throw std::runtime_error("the meeting was given up");
    const Answer answer = std::move(*answer_);
    answer_.reset();
    if (!answer.problem.empty()) throw std::runtime_error(answer.problem);
    return answer.text;
  }
  void reply(Answer answer) {
    const std::lock_guard lock(mutex_);
    if (!question_ || std::get<0>(*question_) == "done") return;
    question_.reset();
    answer_ = std::move(answer);
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Question> question_;
  std::optional<Answer> answer_;
  bool given_up_ = false;
  // written before "done"
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::string problem_;
  std::thread thread_;
};

}  // namespace

void register_backend(torch::Library& library) {
  library.class_<BackendMeeting>("BackendMeeting")
      .def(torch::init<std::int64_t, std::int64_t, const std::string&,
                       const std::vector<std::int64_t>&, double>())
      .def("next", &BackendMeeting::next)
      .def("answer", &BackendMeeting::answer)
      .def("fail", &BackendMeeting::fail)
      .def("group", &BackendMeeting::group);
}

}  // namespace tessera::python
