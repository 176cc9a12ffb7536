"""No test reaches a network, every test starts from the same random state, and the order of tests can be shuffled."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_DISABLED"] = "true"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are so small that a second thread only waits for the first

import gc
import random
import signal

import datasets
import numpy as np
import pytest
import torch
from accelerate.state import GradientState

datasets.disable_progress_bars()


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_collection_modifyitems(config, items):
    """Shuffles whole modules, so that what a module sets up once is still set up once."""
    if config.option.shuffle is None:
        return
    rng = random.Random(config.option.shuffle)
    modules: dict = {}
    for item in items:
        modules.setdefault(item.module, []).append(item)
    shuffled = rng.sample(list(modules.values()), len(modules))
    items[:] = [item for module in shuffled for item in rng.sample(module, len(module))]


def pytest_collection_finish():
    """Accelerate collects garbage whenever a run starts. Without this, each time it walks through all that was imported, which
    takes longer than the run of a tiny model."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    kernels = f"{torch.backends.cpu.get_cpu_capability()} kernels, {torch.get_num_threads()} threads"
    shuffle = config.option.shuffle
    terminalreporter.write_line(kernels + (f", --shuffle {shuffle}" if shuffle is not None else ""))


@pytest.fixture(autouse=True)
def fixed_seed():
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def synced_gradients():
    """Accelerate's state of accumulation is global: a run that was interrupted inside a group leaves it out of sync."""
    GradientState()._set_sync_gradients(True)


@pytest.fixture
def interruptible():
    """Lets child processes of a test react to SIGINT and SIGHUP: a background job of a shell ignores the one, a job under
    `nohup` the other, and so do their children."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
