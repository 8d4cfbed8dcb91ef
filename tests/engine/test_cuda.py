"""The same numbers on a GPU; needs one."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import bayesfl as bf
from tests.cases import CASES, Case, federation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", ["layers", "vmap", "live"])
def test_the_device_changes_nothing(case: Case, kernel: str):
    """Draws are made on the CPU, so a CNN trained on a GPU agrees with the CPU to rounding."""
    clients = federation((1, 12, 12), sizes=(23, 17, 5))
    model = bf.models.lenet((1, 12, 12), outputs=3, channels=(3, 4), hidden=(12, 8))
    options = {
        "rounds": 2,
        "dtype": torch.float64,
        "evaluate_every": 2,
        "progress": False,
        "engine": bf.Engine(kernel),
    }
    here = bf.simulate(case(model), clients, **options)
    there = bf.simulate(case(model), clients, device="cuda", **options)
    cpu = tree_map(lambda t: t.cpu(), (there.server, there.private))
    assert_close(cpu, (here.server, here.private), atol=1e-6, rtol=0)
    assert_close(there.predict().probs, here.predict().probs, atol=1e-6, rtol=0, equal_nan=True)
