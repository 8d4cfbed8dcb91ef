"""Which kernel and how large a chunk a phase gets."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.engine import vmap
from bayesfl.engine.driver import KernelName
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField
from tests.cases import run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "fast"}, r"kernel .*'layers'.* got 'fast'"),
        ({"workers": 0}, r"workers .*1.* got 0"),
        ({"workers": 1.5}, r"workers .*got 1\.5"),
        ({"chunk": "5"}, r"chunk .*got '5'"),
        ({"chunk": -1}, r"chunk .*1.* got -1"),
    ],
)
def test_what_an_engine_refuses(options, message):
    """Names, zeros, fractions."""
    with pytest.raises(ValueError, match=message):
        bf.Engine(**options)


def test_chunks_of_a_cpu():
    """At most five clients, more of small models where four chunks are left, one of large; two
    chunks at least.
    """
    algorithms = bf.algorithms
    small = bf.models.mlp(4, hidden=8, outputs=2)
    medium = bf.models.mlp(100, hidden=200, outputs=10)
    large = bf.models.mlp(784, outputs=10)
    # 12 MiB hold 17 of them, each counted eight times in four bytes.
    assert sum(p.numel() for p in medium.parameters()) == 22_210
    lenet = bf.models.lenet((1, 12, 12), outputs=2, channels=(2, 2), hidden=(4, 4))
    cases = (
        (
            algorithms.fedavg(small),
            ((1, 1), (2, 1), (3, 2), (9, 5), (10, 5), (40, 10), (160, 40), (1000, 50)),
        ),
        (algorithms.fedavg(medium), ((10, 5), (40, 10), (1000, 17))),
        (algorithms.ditto(medium), ((10, 5), (40, 8), (1000, 8))),
        (algorithms.fedem(medium, components=3), ((10, 5), (1000, 5))),
        (algorithms.fedavg(large), ((1, 1), (9, 5), (1000, 5))),
        (algorithms.fedavg(bf.models.mlp(2000, hidden=1000, outputs=2)), ((2, 1), (1000, 1))),
        (algorithms.fedavg(lenet), ((1, 1), (9, 5), (1000, 5))),
    )
    for algorithm, sizes in cases:
        for clients, size in sizes:
            # Workers never count: they must not change the bits.
            assert {
                bf.Engine(workers=w).chunk_size(clients, algorithm, CPU) for w in (None, 1, 7)
            } == {size}
            assert bf.Engine(chunk=64).chunk_size(clients, algorithm, CPU) == 64


def chosen(
    model: nn.Module,
    phase: Descend | None = None,
    kernel: KernelName = "auto",
    shape: tuple[int, ...] = (4,),
) -> str:
    """The kernel for a phase of FedRep, or for predictions."""
    method, x = bf.algorithms.fedrep(model), torch.rand(50, *shape)
    return bf.Engine(kernel).choose(method, phase, torch.zeros(1), x, train=phase is not None)


def test_kernels_of_a_cpu():
    """Rules where there are rules, many convolutions client by client, also under a head that is
    trained on features, of all rows: a step on a usual batch decides.
    """
    lenet = bf.models.lenet((1, 28, 28), outputs=3)
    large = bf.models.cifar100_cnn()
    mlp = bf.models.mlp(4, outputs=2)
    own = bf.models.split(Branching(4), head="head")
    head, body = bf.algorithms.fedrep(large, batch_size=None).phases
    digits, images = {"shape": (1, 28, 28)}, {"shape": (3, 32, 32)}
    assert chosen(mlp) == chosen(mlp, body) == "layers"
    assert chosen(lenet, **digits) == chosen(lenet, body, **digits) == "layers"
    assert chosen(large, **images) == chosen(large, body, **images) == "live"
    assert chosen(large, head, **images) == "live"
    few, _ = bf.algorithms.fedrep(lenet, batch_size=None).phases
    assert chosen(lenet, few, **digits) == chosen(mlp, few) == "layers"
    assert chosen(own) == "live"
    assert chosen(own, kernel="vmap") == "vmap"


class Branching(nn.Module):
    """A network whose control flow depends on its inputs, as masks in a transformer's may."""

    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inputs, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu() if bool((x < 1e9).all()) else self.body(x))


@pytest.mark.parametrize("more", [False, True])
def test_a_model_that_cannot_be_batched(
    more: bool, clients: FederatedData, monkeypatch: pytest.MonkeyPatch
):
    """Where `auto` would take vmap, as on a GPU, it falls back to what runs, with the same draws;
    asked for by name, vmap fails.
    """
    prior = Normal(
        centre=server_mean("w"), variance=lambda given, view: torch.ones_like(view["n"])[..., None]
    )
    step = Descend(
        Energy("w", ("w",), likelihood="mean"), epochs=2, batch_size=10, draws=2, optimiser=SGD(0.1)
    )

    def look(algorithm: Any, given: Any, view: Any, batch: Any) -> Any:
        return view | {"seen": algorithm.losses(algorithm.leaves(("w",), view), batch).mean()}

    phases = (step, bf.Once(look, data=True)) if more else (step,)
    block = bf.Block(posterior=MeanField(init_scale=0.1), prior=prior, keep=True)
    made = bf.Algorithm(Branching(), {"w": block}, phases, parts=("w",), draws=2)
    choose = bf.Engine.choose

    def gpu(self: bf.Engine, algorithm: bf.Algorithm, *rest: Any, **more: Any) -> Any:
        found = choose(self, algorithm, *rest, **more)
        return "vmap" if self.kernel == "auto" and vmap.can_batch(algorithm.model) else found

    wanted = run(made, clients, rounds=2, engine=bf.Engine("reference", chunk=3))
    monkeypatch.setattr(bf.Engine, "choose", gpu)
    found = run(made, clients, rounds=2, engine=bf.Engine(chunk=3))
    assert_close(found.private, wanted.private, atol=1e-12, rtol=0)
    with pytest.raises(RuntimeError, match="vmap"):
        run(made, clients, rounds=1, engine=bf.Engine("vmap"))


@pytest.mark.parametrize(
    "method",
    [
        bf.algorithms.fedprox,
        bf.algorithms.pfedvem,  # draws of a head
        bf.algorithms.fedpac,  # a penalty on the features of all rows
        bf.algorithms.fedem,  # copies
    ],
)
@pytest.mark.parametrize("kernel", ["layers", "live"])
def test_microbatches_change_no_number(
    model: nn.Module, clients: FederatedData, kernel: KernelName, method: Any
):
    """Three rows at once of each batch, whose last piece has fewer: steps, losses, predictions."""
    engines = bf.Engine(kernel), bf.Engine(kernel, microbatch=3)
    one, other = (run(method(model), clients, 2, engine=engine) for engine in engines)
    assert_close(other.server, one.server, atol=1e-10, rtol=0)
    assert_close(other.private, one.private, atol=1e-10, rtol=0)
    assert_close(other.predict().probs, one.predict().probs, atol=1e-10, rtol=0)


def test_no_more_rows_than_a_microbatch_are_computed(clients: FederatedData):
    """After its trial a network sees at most three rows; one whose norm needs the whole batch is
    refused. A run that goes on may have another number.
    """
    seen = set()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(len(x))
            return super().forward(x)

    engine = bf.Engine("live", microbatch=3)
    method = bf.algorithms.fedavg(Watched(8, 3), batch_size=10)
    run(method, clients, engine=engine)  # with the trial
    seen.clear()
    once = run(method, clients, engine=engine)
    once.predict()
    assert max(seen) == 3
    again = bf.Engine("live", microbatch=2)
    seen.clear()
    run(method, clients, 2, resume=once, engine=again)
    assert max(seen) == 2
    normed = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"batch norm .* microbatch=3 cannot train"):
        run(bf.algorithms.fedavg(normed), clients, engine=engine)
