"""The state that a round leaves on the server: what pools and `combine` may leave there,
and how.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.rounds.replies import Unseen
from tests.federation.made import run


def test_unseen_refuses_whatever_is_asked():
    """Entries but the number of the round, attributes, iteration, length."""
    unseen = Unseen("it is hidden", 3, 5, 7)
    assert (unseen["round"], unseen["rounds"]) == (3, 5)
    for ask in (
        lambda: unseen["n"],
        lambda: unseen.shape,
        lambda: list(unseen),
        lambda: len(unseen),
        lambda: "n" in unseen,
    ):
        with pytest.raises(ValueError, match=r"it is hidden, .*`combine`"):
            ask()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"w": {"loc": torch.zeros(3)}}, r"`combine` .*'w\.loc'.*server .*'w\.loc'"),
        ({"seen": torch.zeros(2)}, r"'seen': \(torch\.float32.*server .*'seen': \(torch\.int64"),
        ({"each": torch.zeros(3, 2)}, r"each.*\(3, 2\).*each.*\(7, 2\)"),
        ({"one": torch.zeros(1)}, r"one.*\(1,\).*one.*\(\)"),
        ({"other": torch.zeros(2)}, r"`combine` .*'other'.*'other': 'nothing'.*`server`"),
    ],
)
def test_combine_returns_what_the_server_has(
    returned: Any, words: str, model: nn.Module, clients: FederatedData
):
    """Names, shapes and dtypes; else the next round, or a saved run that nobody can load, would be
    the first to notice.
    """
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {
            "seen": torch.zeros(2, dtype=torch.int64),
            "each": torch.zeros(number, 2),
            "one": 0.0,
        },
        combine=lambda server, ids, uplink: returned,
    )
    with pytest.raises(ValueError, match=words):
        run(made, clients, rounds=1)


def assigned(server: Any, key: str, value: Any) -> Any:
    server[key] = value
    return {}


def inside(server: Any) -> Any:
    server["d"]["m"] = server["d"]["m"] + 1
    return {}


@pytest.mark.parametrize(
    "combine",
    [
        lambda server, ids, uplink: (server["k"].add_(1), {})[1],
        lambda server, ids, uplink: assigned(server, "k", server["k"] + 1),
        lambda server, ids, uplink: assigned(server, "more", server["k"] + 1),
        lambda server, ids, uplink: (server.pop("k"), {})[1],
        lambda server, ids, uplink: inside(server),
    ],
)
def test_combine_does_not_change_what_it_is_given(
    combine: Any, model: nn.Module, clients: FederatedData
):
    """The state of the round before would change with it: that of a result that is resumed, or of a
    round that is repeated.
    """
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"k": 0.0, "d": {"m": torch.zeros(number)}},
        combine=combine,
    )
    for aggregation in (None, bf.SecureSum()):
        with pytest.raises(ValueError, match=r"`combine` .*server\['k'\] \+ 1"):
            run(made, clients, rounds=1, aggregation=aggregation)


@dataclass(frozen=True)
class Own:
    """A pool of a user's own."""

    entry: Any
    sends = ("loc",)

    def __call__(self, server: Any, name: str, uplink: Any) -> Any:
        return self.entry(server[name]["loc"])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (lambda loc: {"loc": loc.float()}, r"w\.loc.*float32.*float64"),
        (lambda loc: {"loc": loc[None]}, r"w\.loc.*\(1, .*w\.loc"),
        (lambda loc: {"loc": loc, "more": loc}, r"'w\.more': 'nothing'"),
        (lambda loc: {"loc": loc.add_(1)}, "pool.*writes"),
    ],
)
def test_pools_return_what_the_server_has(
    entry: Any, words: str, model: nn.Module, clients: FederatedData
):
    """Names, shapes and dtypes, in new tensors."""
    made = bf.algorithms.fedavg(model, epochs=1)
    with pytest.raises(ValueError, match=words):
        run(replace(made, blocks={"w": bf.Block(pool=Own(entry))}), clients, rounds=1)


def test_a_first_axis_that_stands_still_at_this_number_of_clients_may_grow(
    model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """By the rule that saved runs and new clients are held to: the same for one client more."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"models": torch.zeros(min(number, 3), 2)},
        combine=lambda server, ids, uplink: {
            "models": torch.cat([server["models"], server["models"][:1]])
        },
    )
    result = run(made, clients, rounds=2)
    result.save(tmp_path / "run")
    assert bf.load(tmp_path / "run", made, clients).server["models"].shape == (5, 2)


def test_combine_knows_how_many_clients_there_are(model: nn.Module, clients: FederatedData):
    """The number J, also where only some take part, and where the server sees sums alone."""
    made = replace(
        bf.algorithms.fedavg(model, epochs=1),
        server=lambda blocks, number: {"known": 0.0},
        combine=lambda server, ids, uplink: {
            "known": torch.zeros_like(server["known"]) + uplink["clients"]
        },
    )
    for aggregation in (None, bf.SecureSum()):
        result = run(made, clients, rounds=1, participation=0.5, aggregation=aggregation)
        assert result.server["known"].item() == clients.clients
