"""older_system.py SOURCE COMPILER: what is linked with scripts/older_system demands nothing newer than manylinux_2_28 has, and does here what it does without."""

import pathlib
import re
import subprocess
import sys
import tempfile

# Constructors, waits on both clocks, paths, files, numbers, streams, an exception that is kept: all of it has newer names on this system.
PROGRAM = r"""
#include <dlfcn.h>
#include <sys/stat.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <filesystem>
#include <iostream>
#include <sstream>
#include <thread>

using namespace std::chrono_literals;
struct Before {
  int value = 42;
  Before() { value += 1; }
} before;

int main(int count, char**) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::thread other([&] {
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
    const auto began = std::chrono::steady_clock::now();
    if (changed.wait_until(lock, began + 20ms, [] { return false; })) return 1;
    if (std::chrono::steady_clock::now() < began + 20ms) return 2;
  }
  other.join();
  char text[64];
  const auto written = std::to_chars(text, text + 64, 0.1, std::chars_format::general, 17);
  double read = 0;
  std::from_chars(text, written.ptr, read);
  std::ostringstream out;
  out << read << ' ' << before.value << ' ' << std::pow(2.0, count);
  std::exception_ptr kept;
  try {
    std::filesystem::remove("/proc/self/stat");
  } catch (...) {
    kept = std::current_exception();
  }
  try {
    std::rethrow_exception(kept);
  } catch (const std::filesystem::filesystem_error& error) {
    out << ' ' << error.path1();
  }
  struct stat status;
  if (stat("/proc/self/exe", &status) != 0 || !S_ISREG(status.st_mode) || lstat("/proc/self/exe", &status) != 0 || !S_ISLNK(status.st_mode)) return 3;
  if (stat("/nowhere", &status) == 0 || errno != ENOENT || dlopen("/nowhere", RTLD_NOW)) return 4;
  std::cout << std::move(out).str() << std::endl;
}
"""
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def demanded(file):
    said = subprocess.run(["readelf", "--wide", "--version-info", file], check=True, capture_output=True, text=True).stdout
    return {(kind, tuple(map(int, version.split(".")))) for kind, version in re.findall(r"Name: (\w+?)_([\d.]+)\s", said)}


def newer(file):
    return {(kind, version) for kind, version in demanded(file) if kind in NEWEST and version > NEWEST[kind]}


def main():
    source, compiler = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made = subprocess.run([f"{source}/scripts/older_system", folder / "older"], capture_output=True, text=True, timeout=60)
        if "GCC 12 and older" in made.stderr:
            print("skipped:", made.stderr.strip())
            sys.exit(77)
        assert made.returncode == 0, made.stderr
        (folder / "main.cpp").write_text(PROGRAM)
        command = [compiler, "-std=c++20", "-O1", folder / "main.cpp", "-o"]
        subprocess.run([*command, folder / "here"], check=True, timeout=120)
        subprocess.run([*command, folder / "older_one", *made.stdout.split(), "-Wl,--wrap=__libc_start_main"], check=True, timeout=120)
        assert newer(folder / "here"), "the program has nothing that is newer: it shows nothing"
        assert not newer(folder / "older_one"), newer(folder / "older_one")
        for program in ("here", "older_one"):
            done = subprocess.run([folder / program], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0 and done.stdout == '0.1 43 2 "/proc/self/stat"\n', (program, done)


main()
