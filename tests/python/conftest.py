import gc
import pathlib
import subprocess
import sys
import time

import pytest
import torch

import warm

pytest.register_assert_rewrite("precisions", "program_cases", "session_cases", "support", "training_cases")
gc.freeze()  # no collection walks through the million objects of torch


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are threads: each computes on its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """What stands for `sys.executable` where a test starts ranks that need not import torch themselves (warm.py)."""
    path, program = tmp_path_factory.mktemp("warm") / "socket", pathlib.Path(__file__).with_name("warm.py")
    server = subprocess.Popen([sys.executable, program, "serve", path], stdin=subprocess.DEVNULL)
    while not path.exists():
        assert server.poll() is None
        time.sleep(0.01)
    yield [sys.executable, "-I", "-S", program, "run", path]
    server.kill()
    server.wait()


@pytest.fixture
def warm_torchrun(warm_python):
    """As test_processes.torchrun, with an agent and workers that need not import torch."""

    def start(ranks, program, *arguments):
        agent = [*warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--no-python"]
        command = [*agent, *warm_python, pathlib.Path(__file__).with_name(program), *arguments]
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=200)

    return start


def pytest_addoption(parser):
    parser.addoption("--launcher", default="build/release/bin/tessera", help="the program `tessera`")
    parser.addoption("--wheel", help="test_wheel.py: a wheel that is there, in place of one that is packed from the build folder")
    parser.addoption("--skipped-status", type=int, default=0, help="the exit status where all passed but some were skipped")


def pytest_sessionfinish(session, exitstatus):
    """A skipped test reads as skipped: ctest looks at the exit status alone."""
    session.config.session = session
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and reporter and reporter.stats.get("skipped"):
        session.exitstatus = session.config.getoption("--skipped-status")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends the process as a warm one ends; test_processes.py has programs that end by themselves."""
    if hasattr(config, "session"):
        warm.end(int(config.session.exitstatus))
