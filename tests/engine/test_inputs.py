"""Training and prediction on trees of inputs in dtypes of their own, transformed and augmented,
under every kernel.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs
from bayesfl.base.random import Purpose, key
from bayesfl.data import FederatedData
from bayesfl.data.changes import CALLS
from bayesfl.data.split import Change
from bayesfl.optim import SGD
from tests.cases import federation, run

KERNELS = ("reference", "live", "layers", "vmap")


def of(
    data: FederatedData, x: Inputs, transform: Change | None = None, augment: Change | None = None
) -> FederatedData:
    """The same federation with other inputs."""
    splits = {name: replace(split, x=x) for name, split in data.splits.items()}
    made = replace(data, splits=splits, inputs=splits["train"].inputs)
    made = made if transform is None else made.transformed(transform)
    return made if augment is None else made.augmented(augment)


class Two(nn.Module):
    """A network of two inputs, one of them a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.first(torch.where(mask, values, 0.5)).tanh())


class One(Two):
    """The same of one tensor, which holds both."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] (one input, on purpose)
        return super().forward(x[:, :8], x[:, 8:] > 0)


class Tokens(nn.Module):
    """A network of whole numbers."""

    def __init__(self, floats: bool = False) -> None:
        super().__init__()
        self.embed, self.last, self.floats = nn.Embedding(7, 4), nn.Linear(4, 3), floats

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x.long() if self.floats else x).mean(1))


def seeded(made: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return made()


def same(one: Any, other: Any, tolerance: float) -> None:
    """Two runs end with the same weights and the same predictions."""
    for a, b in (
        (one.server["w"]["loc"], other.server["w"]["loc"]),
        (one.predict().probs, other.predict().probs),
    ):
        assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True)


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return federation()


@pytest.mark.parametrize("kernel", KERNELS)
def test_several_inputs_are_one_joined(data: FederatedData, kernel: Any):
    """A tuple and a mapping train as the tensor that holds both does."""
    x = data.train.x
    mask = x.flip(1) > 0
    whole = of(data, torch.cat([x, mask.float()], 1))
    method = {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.3, momentum=0.9)}
    wanted = run(bf.algorithms.fedavg(seeded(One), **method), whole, 2, kernel)
    for tree in ((x, mask), {"mask": mask, "values": x}):
        several = of(data, tree)
        same(run(bf.algorithms.fedavg(seeded(Two), **method), several, 2, kernel), wanted, 1e-12)
    assert of(data, (x, mask)).inputs == ((8,), (8,))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_body_of_several_inputs(data: FederatedData, kernel: Any):
    """A network cut in two, whose body takes them, under a method that draws the head."""

    class Body(Two):
        def forward(self, values: Tensor, mask: Tensor) -> Tensor:
            return self.first(torch.where(mask, values, 0.5)).tanh()

    x = data.train.x
    cut = bf.models.SplitModel(seeded(Body), seeded(lambda: nn.Linear(5, 3)))
    method = bf.algorithms.pfedvem(
        cut, head_epochs=3, body_epochs=1, batch_size=10, init_scale=0.3, draws=2
    )
    found = run(method, of(data, {"values": x, "mask": x > 0}), 2, kernel)
    reference = run(method, of(data, (x, x > 0)), 2, "reference")
    assert_close(found.server["body"]["loc"], reference.server["body"]["loc"], rtol=0, atol=1e-12)
    assert_close(
        found.predict().probs, reference.predict().probs, rtol=0, atol=1e-12, equal_nan=True
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_whole_numbers_stay_such(data: FederatedData, kernel: Any):
    """Tokens train as floats that the forward converts do."""
    x = data.train.x
    tokens = (x.abs() * 3).long().clamp(max=6)
    method = {"epochs": 2, "batch_size": 10, "optimiser": SGD(0.3, momentum=0.9)}
    found = run(bf.algorithms.fedavg(seeded(Tokens), **method), of(data, tokens), 2, kernel)
    wanted = run(
        bf.algorithms.fedavg(seeded(lambda: Tokens(floats=True)), **method),
        of(data, tokens.float()),
        2,
        kernel,
    )
    same(found, wanted, 0)


def test_a_transform_is_what_was_done_before(data: FederatedData):
    """Bytes that are divided where they are read train to the bit as floats divided before; in
    float32 and in float64.
    """
    x = data.train.x
    pixels = (x * 40 + 128).clamp(0, 255).to(torch.uint8)
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=6, outputs=3), epochs=2, batch_size=10)
    for dtype in (torch.float32, torch.float64):
        found = run(method, of(data, pixels, transform=lambda x: x / 255), 2, dtype=dtype)
        wanted = run(method, of(data, pixels / 255), 2, dtype=dtype)
        same(found, wanted, 0)
        assert found.predict().probs.dtype == dtype
    mapped = of(data, (x, pixels), transform=lambda x: x[0] + x[1] / 255)
    same(run(method, mapped, 2), run(method, of(data, x + pixels / 255), 2), 1e-6)


def flips(seen: list[Tensor] | None = None) -> Change:
    """A random flip of each row, and noise; what it is given is kept."""

    def augment(x: Inputs) -> Inputs:
        if seen is not None:
            seen.append(x.clone())
        turned = torch.where(torch.rand(len(x), 1) < 0.5, x.flip(1), x)
        return turned + 0.1 * torch.randn_like(turned)

    return augment


@pytest.mark.parametrize("batch_size", [None, 10])
@pytest.mark.parametrize("kernel", KERNELS)
def test_augmented_steps_by_hand(data: FederatedData, kernel: Any, batch_size: int | None):
    """FedAvg of one client against a bare loop that draws at the same addresses; a client of 12
    rows and one of 31, without padding.
    """
    model, seen = bf.models.mlp(8, hidden=6, outputs=3), []
    x, some = data.train.x, data.select([0, 1])
    method = bf.algorithms.fedavg(model, epochs=2, batch_size=batch_size, optimiser=SGD(0.3))
    found = run(method, of(some, x, augment=flips(seen)), 2, kernel)
    server = nn.utils.parameters_to_vector(model.double().parameters()).detach()
    sizes = []
    for round in range(2):
        ended = []
        for j in range(2):
            rows, y = some.train.client(j)
            nn.utils.vector_to_parameters(server.clone(), model.parameters())
            step = 0
            for epoch in range(2):
                order = torch.arange(len(rows))
                if batch_size is not None:
                    drawn = bf.base.random.generator(
                        2, Purpose.PERMUTATION, round=round, client=j, index=epoch
                    )
                    order = torch.from_numpy(drawn.permutation(len(rows)))
                for places in order.split(batch_size or len(rows)):
                    with Addressed(key(2, Purpose.AUGMENT, round=round, client=j, index=step)):
                        batch = flips()(rows[places].double())
                    loss = nn.functional.cross_entropy(model(batch), y[places])
                    slopes = torch.autograd.grad(loss, list(model.parameters()))
                    with torch.no_grad():
                        for p, slope in zip(model.parameters(), slopes, strict=True):
                            p -= 0.3 * slope
                    step += 1
                    sizes.append(len(places))
            ended.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        n = torch.from_numpy(some.train.counts).double()
        server = torch.stack(ended).mT @ n / n.sum()
    assert_close(found.server["w"]["loc"], server, rtol=0, atol=1e-12)
    # Without padding, and the calls of the look at it.
    assert [len(rows) for rows in sorted(seen[CALLS:], key=len)] == sorted(sizes)


def test_augmentation_is_the_same_wherever_it_runs(data: FederatedData):
    """To the bit for any number of workers and on resume, whoever draws beside it; to rounding for
    any chunk; other seeds, other draws.
    """
    method = bf.algorithms.fedavg(bf.models.mlp(8, hidden=6, outputs=3), epochs=2, batch_size=10)
    augmented = of(data, data.train.x, augment=flips())
    first = run(method, augmented, 4)
    torch.rand(5)
    for workers in (1, 2, 4):
        same(run(method, augmented, 4, engine=bf.Engine(workers=workers)), first, 0)
    for chunk in (1, 3, 7):
        same(run(method, augmented, 4, engine=bf.Engine(chunk=chunk)), first, 1e-12)
    half = run(method, augmented, 2)
    same(run(method, augmented, 4, resume=half), first, 0)
    assert not torch.equal(
        run(method, augmented, 4, seed=3).server["w"]["loc"], first.server["w"]["loc"]
    )
    assert not torch.equal(run(method, data, 4).server["w"]["loc"], first.server["w"]["loc"])


def test_every_step_of_the_whole_data_is_augmented_anew(data: FederatedData):
    """Also where the head of a network is trained on all rows, whose features would be kept
    otherwise.
    """
    method = bf.algorithms.fedrep(
        bf.models.mlp(8, hidden=6, outputs=3), head_epochs=3, body_epochs=1, batch_size=None
    )
    augmented = of(data, data.train.x, augment=flips())
    wanted, *others = (
        run(method, augmented, 1, kernel).private for kernel in ("reference", "live", "layers")
    )
    for found in others:
        assert_close(found, wanted, rtol=0, atol=1e-12)


def test_what_measures_is_not_augmented(data: FederatedData):
    """Predictions, and the E step of a mixture, which looks its rows up in training; there the M
    step's are augmented.
    """
    seen: list[Tensor] = []
    method = bf.algorithms.fedem(
        bf.models.mlp(8, hidden=6, outputs=3), components=2, epochs=1, batch_size=None
    )
    found = run(method, of(data, data.train.x, augment=flips(seen)), 1)
    count = len(seen)
    assert count == CALLS + data.clients  # those of the look at it, then each client's only step
    found.predict()
    found.client(0).predict(data.test.client(0)[0])
    assert len(seen) == count


def test_inputs_that_do_not_fit(data: FederatedData):
    """Each is named, with the remedy."""
    x, mlp = data.train.x, bf.algorithms.fedavg(bf.models.mlp(8, hidden=6, outputs=3))
    for method, given, words in (
        (mlp, x.long(), r"x holds torch.int64, .*x.astype\('float32'\), .*clients.transformed"),
        (mlp, (x, x > 0), r"shape \(\(8,\), \(8,\)\) .*a tuple of arrays as model\(\*x\)"),
        (mlp, {"values": x}, r"a mapping as model\(\*\*x\)"),
        (bf.algorithms.fedavg(Tokens()), x, r"whole numbers.*astype\('int64'\)"),
    ):
        with pytest.raises(ValueError, match=words):
            run(method, of(data, given))
