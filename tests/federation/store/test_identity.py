"""What makes two methods the same: every value that changes what is computed, and nothing that
differs between processes.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.base.described import differences
from bayesfl.composition import options
from bayesfl.composition.pools import Mean, equal
from bayesfl.federation.store.identity import (
    identity,
    network_differences,
    same_method,
    same_network,
)
from bayesfl.optim import SGD


def test_a_method_is_its_name_and_its_options():
    """Also inside another; changed by hand it is its fields, in which a closure's cell alone knows
    the strength of a pull.
    """
    model = bf.models.mlp(8, outputs=3)
    one, other = (bf.algorithms.ditto(model, lam=lam) for lam in (3.0, 2.0))
    assert {key: identity(one)[key] for key in ("method", "revision")} == {
        "method": "ditto",
        "revision": 1,
    }
    assert identity(one) == identity(bf.algorithms.ditto(model, lam=3))
    assert differences(identity(one), identity(other)) == {"ditto.lam": (3.0, 2.0)}
    both = [identity(bf.with_server_optimiser(method, SGD(1.0))) for method in (one, other)]
    assert both[0]["method"] == "with_server_optimiser"
    assert differences(*both) == {"with_server_optimiser.algorithm.ditto.lam": (3.0, 2.0)}
    by_hand = [identity(replace(method, draws=0)) for method in (one, other)]
    assert by_hand[0]["method"] == "composed by hand"
    assert differences(*by_hand) != {}
    for given, words in (
        (other, r"ditto\.lam: saved 3\.0, given 2\.0; pass"),
        (replace(one, draws=0), "method: saved ditto, given composed by hand;"),
    ):
        with pytest.raises(CheckpointError, match=f"^it was made with another method: {words}"):
            same_method("it", identity(one), given)


def test_a_users_method_is_its_source():
    """Beside name and options: nobody else raises its revision."""

    @options.method()
    def mine(model: options.Model, *, epochs: options.Epochs = 1) -> bf.Algorithm:
        return bf.algorithms.fedavg(model, epochs=epochs)

    model = bf.models.mlp(8, outputs=3)
    found = identity(mine(model))
    assert found["method"] == f"{__name__}.test_a_users_method_is_its_source.<locals>.mine"
    assert found[found["method"]] == {}
    assert identity(mine(model, epochs=2))[found["method"]] == {"epochs": 2}
    with pytest.raises(CheckpointError, match=r"another method: source: saved 0123, given \w{16};"):
        same_method("it", found | {"source": "0123"}, mine(model))


def test_an_option_that_came_later_is_at_its_default():
    """An option at its default is not named, so that one that comes later changes no identity; one
    that is not is told from the default.
    """
    model = bf.models.mlp(8, outputs=3)
    method, other = bf.algorithms.fedprox(model), bf.algorithms.fedprox(model, mu=0.3)
    assert identity(method)["fedprox"] == {}
    for saved, given, words in (
        (identity(method), other, r"fedprox\.mu: saved its default, given 0\.3"),
        (identity(other), method, r"fedprox\.mu: saved 0\.3, given its default"),
        (identity(method) | {"revision": 0}, method, "revision: saved 0, given 1"),
    ):
        with pytest.raises(CheckpointError, match=words):
            same_method("it", saved, given)


def network(activation: nn.Module, *, shift: float = 0.0, count: int = 0) -> nn.Module:
    """Two layers, of which a pattern may cover one, and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), activation, nn.Linear(4, 3))
    with torch.no_grad():
        model[0].bias += shift
    model.register_buffer("count", torch.tensor(count))
    return model


def on_last(model: nn.Module) -> bf.Algorithm:
    """A method that trains the last layer alone."""
    return bf.Algorithm(model, {"w": bf.Block("2.*")}, (), parts=("w",))


def of_model(model: nn.Module) -> dict[str, Any]:
    """Its identity."""
    return identity(on_last(model))


def test_a_field_that_came_later_is_at_its_default():
    """Of an optimiser, also inside a method that another is made of."""
    model = bf.models.mlp(8, outputs=3)
    inner, other = (
        bf.algorithms.fedavg(model, optimiser=SGD(0.1, weight_decay=decay)) for decay in (0.0, 0.5)
    )
    assert identity(inner)["fedavg"] == {"optimiser": {"class": "SGD", "rate": 0.1}}
    both = [bf.with_server_optimiser(one, SGD(1.0)) for one in (inner, other)]
    for first, second in ((inner, other), both):
        said = json.loads(json.dumps(identity(first)))
        same_method("it", said, first)
        with pytest.raises(
            CheckpointError, match=r"optimiser\.weight_decay: saved its default, given 0\.5"
        ):
            same_method("it", said, second)


def test_the_model_is_part_of_the_identity():
    """Layers and their options, buffers, and the parameters that no block covers; not the start of
    those that one covers.
    """
    plain, curved = of_model(network(nn.ReLU())), on_last(network(nn.Tanh()))
    with pytest.raises(
        CheckpointError, match=r"another network: layers\.1: saved ReLU\(\), given Tanh\(\); build"
    ):
        same_network("it", plain, curved)
    assert "held" not in str(network_differences(plain, curved))
    leaky = (of_model(network(nn.LeakyReLU(slope))) for slope in (0.1, 0.2))
    assert differences(*leaky) != {}
    for change, line in (({"shift": 0.1}, "constants.0.bias"), ({"count": 1}, "constants.count")):
        assert list(differences(plain, of_model(network(nn.ReLU(), **change)))) == [line]
    other = network(nn.ReLU())
    with torch.no_grad():
        other[2].bias += 1.0
    assert of_model(other) == plain


class Warm(nn.Module):
    """A network whose parts hold numbers and functions that no layer prints."""

    def __init__(
        self,
        temperature: float = 1.0,
        activation: Any = torch.relu,
        heads: int = 2,
        rate: float = 0.5,
    ) -> None:
        super().__init__()
        self.temperature, self.activation = temperature, activation
        self.inner = nn.TransformerEncoderLayer(8, heads, 8, dropout=rate, norm_first=rate == 0.25)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.inner(x) / self.temperature))


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"temperature": 2.0}, "held..temperature"),
        ({"activation": torch.tanh}, "held..activation"),
        ({"heads": 4}, "held.inner.self_attn.num_heads"),
        ({"rate": 0.25}, "held.inner.norm_first"),
    ],
)
def test_what_a_models_parts_hold(other: dict[str, Any], path: str):
    """Of which neither a layer's text nor a shape tells."""
    plain, again, changed = (
        identity(bf.algorithms.fedavg(Warm(**options))) for options in ({}, {}, other)
    )
    assert path in differences(plain, changed)
    assert differences(plain, again) == {}


def multiplied(x: torch.Tensor, by: float) -> torch.Tensor:
    return by * x


class Held:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.by * x


@pytest.mark.parametrize(
    "made",
    [
        lambda by: lambda x: by * x,
        lambda by: partial(multiplied, by=by),
        lambda by: Held(by).__call__,
        Held,
        lambda by: lambda x, by=by: by * x,
    ],
    ids=["closure", "partial", "bound", "slots", "default"],
)
def test_what_a_models_functions_hold(made: Any):
    """Values tell two networks apart; the weights of a network that its function closes over do
    not, which training changes.
    """

    def of(activation: Any) -> dict[str, Any]:
        return identity(bf.algorithms.fedavg(Warm(activation=activation)))

    one, again, other = (of(made(by)) for by in (1, 1, 2))
    assert differences(one, again) == {}
    assert any(path.startswith("held..activation") for path in differences(one, other))
    layers = nn.Linear(8, 8), nn.Linear(8, 8)
    one, other = (of(lambda x, layer=layer: layer(x)) for layer in layers)
    assert differences(one, other) == {}


def test_which_parts_draw():
    """A network in evaluation mode trains without its dropout, which a run that goes on is told."""
    said, still = identity(bf.algorithms.fedavg(Warm())), bf.algorithms.fedavg(Warm().eval())
    assert said["drawing"] == [
        "inner.self_attn",
        "inner.dropout",
        "inner.dropout1",
        "inner.dropout2",
    ]
    with pytest.raises(
        CheckpointError, match=r"another method: drawing: saved \['inner\.self_attn', .*given \[\]"
    ):
        same_method("it", said, still)
    same_network("it", said, still)


def test_other_versions_of_torch_hold_more_in_a_layer():
    method = bf.algorithms.fedavg(Warm())
    said = identity(method)

    def holding(held: dict[str, Any]) -> dict[str, Any]:
        return said | {"held": {**said["held"], "last": held}}

    same_method("it", holding({"in_features": 8}), method)
    with pytest.raises(CheckpointError, match=r"held\.last\.in_features: saved 9, given 8"):
        same_method("it", holding({"in_features": 9}), method)


def test_three_differences_are_told():
    """Of a deep network there may be hundreds."""
    one, other = (
        nn.Sequential(*[nn.BatchNorm1d(8, eps=eps) for _ in range(9)], nn.Linear(8, 3))
        for eps in (1e-5, 1e-3)
    )
    with pytest.raises(CheckpointError, match=r"method: [^;]*; [^;]*; [^;]*; and 6 more; pass"):
        same_method("it", identity(bf.algorithms.fedavg(one)), bf.algorithms.fedavg(other))


def test_statistics_that_a_block_has_are_no_constants():
    """A model may be loaded into a network whose norms begin elsewhere, as its weights may;
    statistics that are held may not.
    """
    one, other = (
        nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)
    )
    other.get_submodule("1").running_mean.add_(1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue] (a norm's)
    other.get_submodule("1").num_batches_tracked.add_(1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    assert identity(bf.algorithms.fedavg(one)) == identity(bf.algorithms.fedavg(other))
    held = (identity(bf.algorithms.fedavg(each.eval())) for each in (one, other))
    assert list(differences(*held)) == [
        "constants.1.running_mean",
        "constants.1.num_batches_tracked",
    ]


def of_weight(weight: Any) -> Any:
    """The part of an identity that pictures a pool's weight."""
    method = bf.Algorithm(nn.Linear(2, 2), {"w": bf.Block(pool=Mean(weight))}, (), parts=("w",))
    return identity(method)["composed by hand"]["blocks"]["w"]["pool"]["weight"]


def scaled(by: Any, server: Any, uplink: Any) -> torch.Tensor:
    return by * uplink["n"]


class Scaled:
    """A weight that is an object."""

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, server: Any, uplink: Any) -> torch.Tensor:
        return self.by * uplink["n"]

    def method(self, server: Any, uplink: Any) -> torch.Tensor:
        return self.by * uplink["n"]


def default(by: Any) -> Callable:
    return lambda server, uplink, by=by: by * uplink["n"]


def keyword(by: Any) -> Callable:
    def weight(server, uplink, *, by=by):
        return by * uplink["n"]

    return weight


def closed(by: Any) -> Callable:
    return lambda server, uplink: by * uplink["n"]


def wrapped(by: Any) -> Callable:
    return functools.lru_cache(closed(by))


def two_fold(by: Any) -> Callable:
    """Two functions that hold each other and themselves."""

    def even(n):
        return by if n == 0 else odd(n - 1) + even(0)

    def odd(n):
        return 0.0 if n == 0 else even(n - 1) + odd(0)

    return lambda server, uplink: even(2) * uplink["n"]


HOLDERS = {
    "partial": lambda by: functools.partial(scaled, by),
    "partial keyword": lambda by: functools.partial(scaled, by=by),
    "default": default,
    "keyword default": keyword,
    "closure": closed,
    "object": Scaled,
    "method": lambda by: Scaled(by).method,
    "wrapped": wrapped,
    "mutually recursive": two_fold,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=list(HOLDERS))
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (torch.ones(2), torch.zeros(2)),
        (np.float32(1), np.float32(2)),
        (np.ones(2), np.zeros(2)),
        (math.inf, math.nan),
        ({"a": (1, 2)}, {"a": (1, 3)}),
        ({"x", "y"}, {"x", "z"}),
        (nn.Linear(1, 1), nn.Linear(1, 2)),
        (SGD(0.1), SGD(0.2)),
        (torch.float32, torch.float64),
    ],
    ids=[
        "number",
        "tensor",
        "numpy",
        "array",
        "not finite",
        "nest",
        "set",
        "module",
        "dataclass",
        "dtype",
    ],
)
def test_whatever_holds_a_value_is_told_apart(holder: Callable, one: Any, other: Any):
    """Two functions that differ in what they hold differ, two that hold the same do not; nothing of
    it is an address.
    """
    found = of_weight(holder(one))
    assert found == of_weight(holder(one)) != of_weight(holder(other))
    assert not re.search(r"0x[0-9a-f]{6}", json.dumps(found))


def test_any_value_has_an_identity():
    """Not one of these raises, and JSON holds them all."""
    inside: list[Any] = []
    inside.append(inside)
    chain: Any = 1.0
    for _ in range(3000):
        chain = functools.partial(scaled, chain)

    def unfilled():
        return lambda server, uplink: later
        later = 1.0

    class Broken(nn.Module):
        def extra_repr(self) -> str:
            raise RuntimeError

    class Addressed(nn.Module):
        def extra_repr(self) -> str:
            return repr(object())

    for value in (
        inside,
        chain,
        object(),
        print,
        torch.exp,
        torch.ops.aten.relu,
        Broken(),
        Addressed(),
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        np.array(["a"]),
        {(1, "a"): 2},
        b"bytes",
        1j,
        range(3),
        Path("a"),
        bf.Engine(),
        "a".upper,
        np.array([object()]),
        torch.Size([1]),
        equal,
        type,
        Scaled,
    ):
        text = json.dumps(of_weight(closed(value)))
        assert json.loads(text) == of_weight(closed(value)), value
        assert "0x" not in text
    assert json.dumps(of_weight(unfilled()))


@pytest.mark.slow
def test_identities_are_the_same_in_another_process():
    """Neither hashes that Python draws anew nor places in memory are in it."""
    code = (
        "import json, torch, bayesfl as bf; from bayesfl.federation.store.identity import "
        "identity; torch.manual_seed(0); model = "
        "bf.models.SplitModel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), "
        "torch.nn.Linear(8, 3)); print(json.dumps([identity(make(model)) for name, (make, _, _) in "
        "bf.algorithms.PAPERS.items() if name != 'fedsa_lora']))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    torch.manual_seed(0)
    model = bf.models.SplitModel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 3))
    assert json.loads(printed) == [
        identity(make(model))
        for name, (make, _, _) in bf.algorithms.PAPERS.items()
        if name != "fedsa_lora"  # which needs adapters
    ]
