"""What all tests share."""

import pytest
import torch

torch.set_num_threads(1)  # torch's own threads stall beside any other busy process


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
