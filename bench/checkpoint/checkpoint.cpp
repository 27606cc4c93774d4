// Checkpoints: writing and reading beside plain files of the same size on the same disk, the pause
// of a save in the background beside one memcpy, and all three beside Python's distributed
// checkpoint of the same tensors (dcp.py, in a process of its own).
//
//   bench_checkpoint [--out FILE] [--folder FOLDER] [--megabytes N] [--python PYTHON --script FILE]
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "harness.h"
#include "process.h"
#include "tessera/base/text.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checkpointer.h"
#include "tessera/comm/job/threads.h"
#include "tessera/files/operations.h"
#include "tessera/files/read_file.h"
#include "tessera/tensor/shard_tensor.h"

using namespace tessera;

namespace {

using Clock = std::chrono::steady_clock;

double timed(const std::function<void()>& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// As a program without checkpoints would: one file, written in large pieces, synced.
void write_plain(const std::string& path, const std::vector<at::Tensor>& tensors) {
  std::filesystem::remove(path);
  FileOperations operations;
  auto file = operations.open(path);
  std::uint64_t at = 0;
  for (const at::Tensor& t : tensors) {
    operations.write(file, t.const_data_ptr(), t.nbytes(), at);
    at += t.nbytes();
  }
  operations.sync(file);
  operations.close(file);
}

void read_plain(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const ReadFile file(path);
  std::uint64_t at = 0;
  for (const at::Tensor& t : tensors) {
    file.read(t.data_ptr(), t.nbytes(), at);
    at += t.nbytes();
  }
}

}  // namespace

int main(int count, char** arguments) {
  bench::Output output;
  std::string folder = std::filesystem::temp_directory_path();
  int megabytes = 128;
  CLI::App app("Checkpoints beside plain files and one memcpy");
  bench::add_output(app, output);
  app.add_option("--folder", folder, "on the disk that is measured");
  app.add_option("--megabytes", megabytes);
  std::string python, script;
  app.add_option("--python", python);
  app.add_option("--script", script);
  CLI11_PARSE(app, count, arguments);
  folder += concat("/tessera_bench_checkpoint_", ::getpid());
  std::filesystem::create_directories(folder);
  bench::Report report("checkpoint", output);
  run_threads(1, [&](DistributedManager& manager) {
    at::set_num_threads(1);
    std::vector<at::Tensor> tensors, targets;
    CheckpointState state, into;
    for (int i = 0; i < 16; ++i) {
      tensors.push_back(at::rand({megabytes * 1024 / 16, 256}));
      targets.push_back(at::zeros_like(tensors.back()));
      state.add(concat("t", i), tensors.back());
      into.add(concat("t", i), targets.back());
    }
    Checkpointer checkpoints(manager, folder + "/saves", {.keep_last = 1});
    const std::string plain = folder + "/plain";
    int n = 0;
    const auto measure = [&](const std::string& what, const std::function<double()>& ours,
                             const std::function<double()>& theirs, const char* reference,
                             double limit) {
      if (report.wants(what))
        report.time(what, bench::alternate(31, ours, theirs), reference, limit);
    };
    const auto save = [&] { return timed([&] { checkpoints.save(concat("s", n++ % 2), state); }); };
    const auto pause = [&] {
      const double seconds = timed([&] { checkpoints.start_save(concat("s", n++ % 2), state); });
      checkpoints.wait();
      return seconds;
    };
    save();
    const std::string size = concat(megabytes, " MB");
    measure(
        "write " + size, save, [&] { return timed([&] { write_plain(plain, tensors); }); },
        "a plain file, synced", 1.25);
    const auto read_ours = [&] {
      const std::string name = *checkpoints.latest();
      return timed([&] { CheckpointReader(manager.world(), folder + "/saves", name).load(into); });
    };
    write_plain(plain, tensors);
    const auto read_theirs = [&] { return timed([&] { read_plain(plain, targets); }); };
    measure("read " + size + " from the page cache, verified", read_ours, read_theirs,
            "a plain file", 3);
    const auto read_once = [&] {
      const std::string name = *checkpoints.latest();
      return timed([&] {
        CheckpointReader(manager.world(), folder + "/saves", name)
            .load(into, {.all_or_nothing = false});
      });
    };
    measure("read " + size + " from the page cache, verified, once", read_once, read_theirs,
            "a plain file", 1.25);
    // From the disk: what is in the page cache is dropped first.
    const auto dropped = [&](const std::function<double()>& read) {
      return [&, read] {
        for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
          if (!entry.is_regular_file()) continue;
          const int file = ::open(entry.path().c_str(), O_RDONLY);
          ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
          ::close(file);
        }
        return read();
      };
    };
    measure("read " + size + " from the disk, verified", dropped(read_ours), dropped(read_theirs),
            "a plain file", 1.25);
    const auto read_staged = [&] {
      const std::string name = *checkpoints.latest();
      return timed([&] {
        CheckpointReader(manager.world(), folder + "/saves", name)
            .load(into, {.staging_bytes = std::numeric_limits<std::uint64_t>::max()});
      });
    };
    measure("read " + size + " from the disk, verified, staged", dropped(read_staged),
            dropped(read_theirs), "a plain file", 1.25);
    const at::Tensor copy =
        at::zeros({static_cast<std::int64_t>(megabytes) * 1024 * 1024}, at::kByte);
    const auto one_copy = [&] {
      return timed([&] {
        char* at = static_cast<char*>(copy.mutable_data_ptr());
        for (const at::Tensor& t : tensors) {
          std::memcpy(at, t.const_data_ptr(), t.nbytes());
          at += t.nbytes();
        }
      });
    };
    measure("pause of start_save, " + size, pause, one_copy, "one memcpy", 1.1);
    if (python.empty()) return;
    std::vector<std::string> environment{"OMP_NUM_THREADS=1"};
    for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
    bench::Process dcp({python, script, folder + "/dcp", concat(megabytes)}, environment);
    dcp.line();  // ready
    const auto ask = [&](const char* what) {
      return [&dcp, what] {
        dcp.tell(what);
        return std::stod(dcp.line());
      };
    };
    const char* reference = "torch.distributed.checkpoint";
    measure("write " + size + ", beside Python", save, ask("save"), reference, 1.0);
    measure("read " + size + " from the page cache, beside Python", read_ours, ask("load"),
            reference, 1.0);
    measure("pause, " + size + ", beside Python", pause, ask("async"), reference, 1.0);
  });
  std::filesystem::remove_all(folder);
  return report.finish();
}
