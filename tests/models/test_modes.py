"""Batch norm and dropout in training: against a bare loop, the same wherever they run, and what is
refused.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import bayesfl as bf
from bayesfl.base.addressed import Addressed
from bayesfl.base.random import Purpose, generator, key
from bayesfl.composition import Energy
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.models.modes import norms
from bayesfl.models.trial import draws_in_training, lively
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField
from tests.cases import draws_elsewhere, federation, run

SIZES = (21, 12)  # the last batches of ten have one row and two


def seeded(made: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return made()


def network(rate: float = 0.4, **options: Any) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(8, 6),
            nn.BatchNorm1d(6, **options),
            nn.ReLU(),
            nn.Dropout(rate),
            nn.Linear(6, 3),
        )
    )


def parted(rate: float = 0.4) -> nn.Module:
    made = network(rate)
    assert isinstance(made, nn.Sequential)
    return bf.models.SplitModel(made[:4], nn.Sequential(nn.Dropout(rate), made[4]))


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return federation(sizes=SIZES)


def stepped(model: nn.Module, x: Tensor, y: Tensor, draws: Addressed, lr: float) -> None:
    """One step of SGD on a batch; a batch norm uses its statistics where there is one row."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.train(len(x) > 1)
    with draws:
        loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, slope in zip(model.parameters(), slopes, strict=True):
            p -= lr * slope


def test_federated_averaging_by_a_bare_loop(data: FederatedData):
    """Weights and running statistics of two clients over two rounds, dropout at the same addresses;
    the counter is left alone.
    """
    model = network()
    found = run(bf.algorithms.fedavg(model, epochs=2, batch_size=10, optimiser=SGD(0.3)), data, 2)
    server = {name: t.detach().double().clone() for name, t in model.state_dict().items()}
    for round in range(2):
        ended = []
        for j in range(2):
            x, y = data.train.client(j)
            assert isinstance(x, Tensor)
            own = network().double().train()
            own.load_state_dict(server)
            batches = [
                places
                for epoch in range(2)
                for places in torch.from_numpy(
                    generator(
                        2, Purpose.PERMUTATION, round=round, client=j, index=epoch
                    ).permutation(len(x))
                ).split(10)
            ]
            address = key(2, Purpose.FORWARD, round=round, client=j)
            for step, places in enumerate(batches):
                stepped(own, x[places].double(), y[places], Addressed(address, step * 2**33), 0.3)
            ended.append(own.state_dict())
        server = {
            name: (ended[0][name].double() * SIZES[0] + ended[1][name].double() * SIZES[1])
            / sum(SIZES)
            for name in server
        }
    made = found.model().state_dict()
    server["1.num_batches_tracked"] = torch.tensor(0)
    assert_close(made, server, rtol=0, atol=1e-12)
    x = data.test.client(1)[0].double()
    reference = network().double().eval()
    reference.load_state_dict(made)
    assert_close(
        found.predict().client(1).probs, reference(x).softmax(-1).detach(), rtol=0, atol=1e-12
    )


@pytest.mark.slow
def test_the_same_bits_wherever_it_runs(data: FederatedData):
    """For any number of workers, on resume, and whoever draws in other threads; to rounding for any
    chunk; a seed changes all.
    """
    data = federation()
    method = bf.algorithms.fedrep(parted(), head_epochs=2, body_epochs=1, batch_size=10)
    first = run(method, data, 4)

    def same(other: Any, tolerance: float = 0.0) -> None:
        mine, wanted = ((one.server, one.private, one.predict().probs) for one in (other, first))
        assert_close(mine, wanted, atol=tolerance, rtol=0, equal_nan=True)

    for workers in (1, 2, 4):
        same(run(method, data, 4, engine=bf.Engine(workers=workers)))
        for chunk in (1, 3):
            same(run(method, data, 4, engine=bf.Engine(workers=workers, chunk=chunk)), 1e-12)
    same(run(method, data, 4, resume=run(method, data, 2)))
    with draws_elsewhere():
        same(run(method, data, 4))
    assert not torch.equal(
        run(method, data, 4, seed=3).server["body_buffers"]["loc"],
        first.server["body_buffers"]["loc"],
    )


SEEN: list[tuple[str, Tensor]] = []


class Recorded(nn.Module):
    """Dropout that keeps its masks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training:
            SEEN.append((self.name, mask.detach().clone()))
        return x * mask


def test_draws_of_a_step_share_one_mask_and_no_others_do(data: FederatedData):
    """Three draws of a head: the head's own mask is the same for them, another in each step, round
    and client, and not the body's.
    """
    model = seeded(
        lambda: bf.models.SplitModel(
            nn.Sequential(nn.Linear(8, 40), Recorded("body")),
            nn.Sequential(Recorded("head"), nn.Linear(40, 3)),
        )
    )
    method = bf.algorithms.pfedvem(
        model, head_epochs=3, body_epochs=1, batch_size=None, init_scale=0.3, draws=3
    )
    SEEN.clear()
    run(method, data, 2, engine=bf.Engine("live", workers=1))
    seen = SEEN[2 * 2 :]  # a look before training passes twice
    bodies, heads = ([mask for name, mask in seen if name == part] for part in ("body", "head"))
    steps = 2 * 2 * (3 + 1)  # rounds, clients, steps
    assert len(bodies) == steps
    assert len(heads) == 3 * steps
    for step in range(steps):
        assert all(torch.equal(heads[3 * step], other) for other in heads[3 * step : 3 * step + 3])
    every = [mask[:12].flatten() for mask in (*bodies, *heads[::3])]
    assert len({tuple(mask.tolist()) for mask in every}) == 2 * steps


def test_components_have_statistics_of_their_own(data: FederatedData):
    """After one full-batch step, .9 of the start and .1 of the mean over the client's rows, under
    each component's own weights.
    """
    model = seeded(
        lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    )
    method = bf.algorithms.fedem(model, components=2, epochs=1, batch_size=None)
    one = data.select([0])
    found, start = run(method, one, 1), method.init(1, seed=2, dtype=torch.float64)
    x = one.train.client(0)[0].double()
    for m in range(2):
        leaves = method.layout("components").leaves(start["components"]["loc"][m])
        made = found.server["components_buffers"]["loc"][m]
        h = x @ leaves["0.weight"].mT + leaves["0.bias"]
        wanted = {"1.running_mean": 0.1 * h.mean(0), "1.running_var": 0.9 + 0.1 * h.var(0)}
        assert_close(method.layout("components_buffers").leaves(made), wanted, rtol=0, atol=1e-12)


def test_draws_of_a_body_pass_through_its_norm_one_after_another(data: FederatedData):
    """Two draws of all weights make two updates of the statistics a step, as in a loop
    over draws.
    """
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    plain = bf.algorithms.fedavg(model, epochs=1, batch_size=None)
    prior = bf.priors.Normal(
        centre=bf.priors.server_mean("w"),
        variance=lambda given, view: torch.ones_like(view["n"])[..., None],
    )
    block = bf.Block(posterior=MeanField(init_scale=0.3), prior=prior, keep=True)
    method = replace(plain, blocks={"w": block}, phases=(replace(plain.phases[0], draws=2),))
    one = data.select([0])
    found, start = run(method, one, 1), method.init(1, seed=2, dtype=torch.float64)
    rng = generator(2, Purpose.NOISE)
    noise = torch.from_numpy(rng.standard_normal((2, method.layout("w").size), np.float32)).double()
    x, mean, var = one.train.client(0)[0].double(), torch.zeros(6).double(), torch.ones(6).double()
    for s in range(2):
        leaves = method.layout("w").leaves(
            block.posterior.sample(method.centre("w", start), noise[s])
        )
        h = x @ leaves["0.weight"].mT + leaves["0.bias"]
        mean, var = 0.9 * mean + 0.1 * h.mean(0), 0.9 * var + 0.1 * h.var(0)
    made = method.layout("w_buffers").leaves(found.private["w_buffers"]["loc"][0])
    assert_close(made, {"1.running_mean": mean, "1.running_var": var}, rtol=0, atol=1e-12)


def test_which_norms_have_statistics():
    """Those in training mode that keep them: with weights, without, with frozen ones; and by which
    block they go.
    """
    assert set(norms(network())) == {"1"}
    assert not norms(network().eval())
    fixed = network()
    fixed.get_submodule("1").eval()
    assert bf.algorithms.fedavg(fixed).blocks.keys() == {"w"}
    assert draws_in_training(fixed)
    assert not lively(fixed.eval())
    for model in (network(affine=False), network()):
        model.get_submodule("1").requires_grad_(False)
        assert list(bf.algorithms.fedavg(model).blocks) == ["w", "w_buffers"]
    method = bf.algorithms.fedrep(parted())
    for one in (method, replace(method, draws=0)):
        assert list(one.blocks) == ["body", "head", "body_buffers"]
    assert method.layout("body_buffers").names == ("body.1.running_mean", "body.1.running_var")
    assert method.uplink(method.init(1))["body_buffers.loc"][0] == (12,)
    kept = replace(
        method,
        blocks={**method.blocks, "body": replace(method.blocks["body"], pool=None, keep=True)},
    )
    assert kept.blocks["body_buffers"].private


class Branch(nn.Module):
    """A network whose forward does one thing more in training."""

    def __init__(self, more: Callable[["Branch", Tensor], Tensor], always: bool = False) -> None:
        super().__init__()
        self.last, self.more, self.always = nn.Linear(8, 3), more, always
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self, self.last(x)) if self.training or self.always else self.last(x)


def _count(module: Branch, x: Tensor) -> Tensor:
    module.seen.add_(1)
    return x


class Checkpointed(nn.Module):
    """A part that is computed again for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=False)


class Holding(nn.Module):
    """A forward that puts its norm into evaluation mode."""

    def __init__(self, mend: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.one = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.mend = mend

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mend(self.norm)
        return self.last(self.norm(self.one(x)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a count": (
        lambda: Branch(_count),
        r"changes the buffers \['seen'\] in training, which are no statistics",
    ),
    "a norm in evaluation mode": (
        lambda: Holding(nn.Module.eval),
        r"changes the numbers \['norm\.training'\]",
    ),
    "a norm's mode": (
        lambda: Holding(lambda norm: setattr(norm, "training", False)),
        r"changes the numbers \['norm\.training'\]",
    ),
    "a count always": (
        lambda: Branch(_count, always=True),
        r"changes the buffers \['seen'\] in evaluation mode, too",
    ),
    "checkpoints": (
        lambda: Branch(
            lambda m, x: checkpoint(
                lambda t: F.dropout(t, 0.5), x, use_reentrant=False, preserve_rng_state=False
            )
        ),
        r"draws random numbers in its backward pass, as checkpointing",
    ),
    "checkpoints a layer": (
        lambda: Branch(Checkpointed()),
        r"draws random numbers in its backward pass, as",
    ),
    "Python's draws": (
        lambda: Branch(lambda m, x: x * random.random()),
        r"draws by other means than torch's",
    ),
    "NumPy's draws": (
        lambda: Branch(lambda m, x: x * np.random.rand()),  # noqa: NPY002 (the fault)
        r"draws by other means than torch's",
    ),
    "dropout always": (
        lambda: Branch(lambda m, x: F.dropout(x, 0.5), always=True),
        r"in evaluation mode, too; .*self.training",
    ),
    "no rows": (
        lambda: Branch(lambda m, x: x.mean(0)),
        r"returns outputs of another form in training mode",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_run_could_repeat(data: FederatedData, name: str):
    make, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        run(bf.algorithms.fedavg(make()), data)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"track_running_stats": False}, r"tracks no statistics.*nn.GroupNorm"),
        ({"momentum": None}, r"has momentum=None.*momentum=0.1"),
    ],
)
def test_norms_without_statistics_to_average(option: Any, words: str):
    with pytest.raises(ValueError, match=rf"'1' \(BatchNorm1d\) {words}"):
        bf.algorithms.fedavg(network(**option))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (
            kernel,
            f"Sequential has dropout or other draws .*, which kernel='{kernel}' cannot train",
        )
        for kernel in ("reference", "vmap")
    ],
)
def test_other_kernels_do_not_train_such_models(data: FederatedData, kernel: Any, words: str):
    with pytest.raises(ValueError, match=words):
        run(bf.algorithms.fedavg(network()), data, 1, kernel)


def test_phases_that_know_nothing_of_it(data: FederatedData):
    """A step of one's own, and a block whose norms no phase passes through."""

    class Own(bf.Descend):
        pass

    method = bf.algorithms.fedavg(network(), epochs=1)
    (phase,) = method.phases
    own = Own(phase.energy, batch_size=10)
    with pytest.raises(ValueError, match=r"which the steps of Own do not support"):
        run(replace(method, phases=(own,)), data)
    with pytest.raises(ValueError, match=r"no phase of the method has block 'w' .*group_norm"):
        run(bf.algorithms.pfedme(network(), batches=2, inner_steps=2), data)
    measured = Once(lambda algorithm, given, view, batch: view, data=True, losses=("w",))
    run(replace(method, phases=(measured, phase)), data)


def test_another_forward_in_training(data: FederatedData):
    """Label smoothing of the logits, without draws or statistics: trained as it is, predicted
    without.
    """
    scaled = seeded(lambda: Branch(lambda m, x: 2 * x))
    found = run(
        bf.algorithms.fedavg(scaled, epochs=1, batch_size=None, optimiser=SGD(0.3)),
        data.select([0]),
    )
    x, y = (t.double() if t.is_floating_point() else t for t in data.train.client(0))
    own = seeded(lambda: nn.Linear(8, 3)).double()
    slopes = torch.autograd.grad(F.cross_entropy(2 * own(x), y), list(own.parameters()))
    wanted = [p - 0.3 * slope for p, slope in zip(own.parameters(), slopes, strict=True)]
    probs = F.linear(data.test.client(0)[0].double(), *wanted).softmax(-1)
    last, predicted = found.model().last, found.predict().client(0).probs
    assert_close([last.weight, last.bias, predicted], [*wanted, probs], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"cannot train"):
        run(bf.algorithms.fedavg(scaled), data, 1, "reference")


class Hidden(nn.Module):
    """Dropout as a function, which no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.body(x).relu(), 0.5, self.training))


def test_draws_of_a_loaded_run_have_addresses(tmp_path, data: FederatedData):
    """Where this process has not trained the model, clients that join still draw what they draw
    beside the run itself.
    """

    def method() -> bf.Algorithm:
        return bf.algorithms.fedper(seeded(Hidden), epochs=2)

    newcomers = federation(sizes=(9, 12))
    told = bf.simulate(method(), data, rounds=1, evaluate_every=None, progress=False)
    told.save(tmp_path)
    wanted = told.adapt(newcomers).private["head"]["loc"]
    for seed in (1, 2):
        loaded = bf.load(tmp_path, method(), data)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            assert torch.equal(loaded.adapt(newcomers).private["head"]["loc"], wanted)


def test_norms_with_one_example_and_named_inputs(data: FederatedData):
    """A client of one example trains; a norm called by name is as one called by place."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(input=self.first(x)).relu())

    placed = network(0.0)
    made = seeded(Named)
    made.first, made.norm, made.last = placed[0], placed[1], placed[4]  # pyright: ignore[reportIndexIssue] (a Sequential)
    one = federation(sizes=(1, 1))
    for clients in (data, one):
        ends = [
            bf.simulate(
                bf.algorithms.fedavg(model, epochs=2, batch_size=10),
                clients,
                rounds=1,
                evaluate_every=None,
                progress=False,
            )
            for model in (made, placed)
        ]
        assert_close(ends[0].server, ends[1].server, atol=0, rtol=0)


def test_a_norm_has_one_owner():
    """Blocks that share out a norm's weight and bias would each have its statistics."""
    whole = Energy(("w", "b"), ("w", "b"), likelihood="mean")
    blocks = {"w": bf.Block("*.weight"), "b": bf.Block("*.bias")}
    with pytest.raises(
        ValueError, match=r"block 'w' covers some of \['1.weight', '1.bias'\].*norm '1'"
    ):
        bf.Algorithm(
            network(), blocks, (bf.Descend(whole, epochs=1, batch_size=4),), parts=("w", "b")
        )
