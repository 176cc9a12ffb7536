"""Nothing here reaches a network, and every test starts from the same random state."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_DISABLED"] = "true"

import datasets
import pytest
import torch

torch.set_num_threads(1)
datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(1234)
