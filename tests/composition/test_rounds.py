"""The number of the round that a method's functions are given."""

from typing import Any

import torch

import bayesfl as bf
from bayesfl.data import FederatedData


def test_rounds_count_from_1(clients: FederatedData):
    """In phases, in `combine` and in what predicts after the last round."""

    def see(algorithm: Any, given: Any, view: Any, batch: Any) -> Any:
        seen.append((given["round"], given["rounds"]))
        return {}

    def combine(server: Any, ids: Any, uplink: Any) -> Any:
        combined.append(uplink["round"])
        return {}

    seen: list[Any] = []
    combined: list[Any] = []
    method = bf.Algorithm(
        torch.nn.Linear(8, 3),
        {"w": bf.Block()},
        (bf.Once(see, batched=False),),
        parts=("w",),
        combine=combine,
        finetune=(bf.Once(see, batched=False),),
    )
    options: dict[str, Any] = {"engine": bf.Engine(workers=1), "progress": False}
    result = bf.simulate(method, clients, rounds=2, evaluate_every=None, **options)
    assert (sorted(set(seen)), combined) == ([(1, 2), (2, 2)], [1, 2])
    seen.clear()
    result.predict()
    assert set(seen) == {(2, 2)}
