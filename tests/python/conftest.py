import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Ranks are threads: each computes on its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--launcher", default="build/release/bin/tessera", help="the program `tessera`")
