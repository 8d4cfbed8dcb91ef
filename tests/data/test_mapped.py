"""What lies in mapped files."""

import numpy as np
import torch

from bayesfl.data.mapped import mapped, mark_mapped


def test_what_lies_in_a_file_is_known(tmp_path):
    """By what torch or `mark_mapped` tells."""
    np.arange(4096.0).tofile(tmp_path / "x")
    path = str(tmp_path / "x")
    shared = torch.from_file(path, shared=True, size=4096, dtype=torch.float64)
    other = torch.from_file(path, size=4096, dtype=torch.float64)
    memory = [
        torch.zeros(3),
        torch.zeros(10**6),
        torch.zeros(3).share_memory_(),
        torch.zeros(0),
        torch.zeros(3, device="meta"),
    ]
    assert not any(map(mapped, (shared.clone(), *memory)))
    assert all(map(mapped, (shared, shared[7:])))
    assert not mapped(other[1:])
    mark_mapped(part := other[1:])
    assert mapped(part)
