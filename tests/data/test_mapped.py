"""What lies in mapped files."""

import numpy as np
import torch

from bayesfl.data import mapped as module
from bayesfl.data.mapped import mapped, mark_mapped


def test_what_lies_in_a_file_is_known(tmp_path, monkeypatch):
    """With Linux's list of mappings all of it; without, what torch or `mark_mapped` tells."""
    np.arange(4096.0).tofile(tmp_path / "x")
    torch.save({"x": torch.arange(4096.0)}, tmp_path / "x.pt")
    path = str(tmp_path / "x")
    shared = torch.from_file(path, shared=True, size=4096, dtype=torch.float64)
    others = [
        torch.from_file(path, size=4096, dtype=torch.float64),
        torch.load(tmp_path / "x.pt", mmap=True)["x"],
        torch.from_numpy(np.memmap(path, dtype=np.float64, mode="r+")),
    ]
    memory = [
        torch.zeros(3),
        torch.zeros(10**6),
        torch.zeros(3).share_memory_(),
        torch.zeros(0),
        torch.zeros(3, device="meta"),
    ]
    assert not any(map(mapped, (shared.clone(), *memory)))
    assert all(map(mapped, (shared, shared[7:])))
    if module.MAPPINGS.exists():
        assert all(map(mapped, others))
    monkeypatch.setattr(module, "MAPPINGS", tmp_path / "nothing")
    assert mapped(shared[:9])
    assert not mapped(others[0][1:])
    mark_mapped(part := others[0][1:])
    assert mapped(part)
