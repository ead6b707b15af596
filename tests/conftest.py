"""Every test starts with one thread, so that bits do not depend on the machine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _use_one_thread():
    torch.set_num_threads(1)
