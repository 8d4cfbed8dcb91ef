"""Energies by hand: their two conventions, weights of examples, penalties; priors stand still
during a phase.
"""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition import Block, Descend, Energy, Normal, own_mean, server_mean
from bayesfl.composition.energy import inverse_count
from bayesfl.composition.pools import PrecisionWeighted
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.models import mlp
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField, Point
from tests.cases import federation, numbers, run, with_batch_norm
from tests.composition.made import KERNELS, algorithm, data


def test_scales():
    """n times the batch's mean plus the KL, or the mean plus KL / n."""
    n = torch.tensor([1.0, 4.0, 50.0]).double()
    assert_close(Energy("w", ("w",), likelihood="sum").scales(n), (n, torch.ones(3).double()))
    assert_close(Energy("w", ("w",), likelihood="mean").scales(n), (torch.ones(3).double(), 1 / n))
    blocks = [Energy(name, ("a", "b"), likelihood="mean").blocks for name in ("a", ("a", "b"))]
    assert blocks == [("a",), ("a", "b")]


def by_row(given: Server, view: View, batch: Batch) -> Tensor:
    """A weight for each example, by its place in the client's rows."""
    return given["weights"][batch["index"]]


@pytest.mark.parametrize("likelihood", ["sum", "mean"])
@pytest.mark.parametrize("weight", [None, inverse_count, by_row], ids=["plain", "1 / n", "by row"])
def test_energy_by_hand(likelihood, weight):
    """Draws average, examples count by their weight and padding not at all, the KL of every trained
    block is added, and of no other.
    """
    model = mlp(2, hidden=3, outputs=2)
    head = bf.Block(
        "head.*",
        posterior=MeanField(),
        prior=Normal(centre=server_mean("head"), variance=lambda given, view: view["v"][..., None]),
    )
    body = bf.Block(
        "body.*",
        prior=Normal(
            centre=server_mean("body"), variance=lambda given, view: torch.full((1,), 0.3).double()
        ),
    )
    both = ("body", "head")
    made = algorithm(model, {"body": body, "head": head})
    n, v = torch.tensor(20.0).double(), torch.tensor(0.7).double()
    weights = numbers(20, seed=6).exp()
    given = {"body": {"loc": numbers(9)}, "head": {"loc": numbers(8, seed=1)}, "weights": weights}
    beliefs = {
        "body": {"loc": numbers(9, seed=2)},
        "head": {"loc": numbers(8, seed=3), "rho": numbers(8, seed=4)},
    }
    batch = {
        "x": numbers(5, 2),
        "y": torch.tensor([0, 1, 1, 0, 1]),
        "weight": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).double(),
        "index": torch.tensor([4, 17, 9, 0, 0]),
    }
    noise = {"head": numbers(4, 8, seed=5)}
    x, y = batch["x"][:3], batch["y"][:3]
    scale = beliefs["head"]["rho"].exp().log1p()
    losses = []
    for e in noise["head"]:
        w, b = beliefs["head"]["loc"] + scale * e, beliefs["body"]["loc"]
        hidden = torch.relu(x @ b[:6].view(3, 2).T + b[6:])
        losses.append(F.cross_entropy(hidden @ w[:6].view(2, 3).T + w[6:], y, reduction="none"))
    each = {
        None: torch.ones(3).double(),
        inverse_count: torch.full((3,), 1 / 20).double(),
        by_row: weights[[4, 17, 9]],
    }[weight]
    nll = (each * torch.stack(losses).mean(0)).sum() / 3
    q = torch.distributions.Normal(beliefs["head"]["loc"], scale)
    kl_head = torch.distributions.kl_divergence(
        q, torch.distributions.Normal(given["head"]["loc"], v.sqrt())
    ).sum()
    energy_body = (
        -torch.distributions.Normal(given["body"]["loc"], math.sqrt(0.3))
        .log_prob(beliefs["body"]["loc"])
        .sum()
    )
    view, scale = {"n": n, "v": v, **beliefs}, 20 if likelihood == "sum" else 1
    for trained, divergence in (
        ("head", kl_head),
        ("body", energy_body),
        (both, kl_head + energy_body),
    ):
        energy = Energy(trained, both, likelihood=likelihood, weight=weight)
        now = {name: beliefs[name] for name in energy.blocks}
        found = energy(made, now, given, view, batch, noise)
        assert_close(found, (scale * nll + divergence * scale / 20, nll))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "weight",
    [inverse_count, lambda given, view, batch: 0.5 + batch["index"].to(view["n"])],
    ids=["1 / n", "by row"],
)
def test_every_kernel_weighs_examples(kernel, weight):
    """Under draws or without, in full batches or not: as the reference, and not as without
    weights.
    """
    prior = Normal(
        centre=server_mean("head"),
        variance=lambda given, view: torch.ones(1).to(given["head"]["loc"]),
    )
    head = bf.Block("head.*", posterior=MeanField(), prior=prior, pool=PrecisionWeighted())
    runs = []
    for k, w in (("reference", weight), (kernel, weight), (kernel, None)):
        steps = tuple(
            Descend(
                Energy(name, ("body", "head"), likelihood="sum", weight=w),
                batch_size=size,
                draws=2,
                optimiser=SGD(0.01),
            )
            for name, size in (("head", None), ("body", 3))
        )
        made = bf.Algorithm(
            mlp(4, hidden=3, outputs=2),
            {"body": bf.Block("body.*"), "head": head},
            steps,
            parts=("body", "head"),
        )
        runs.append(
            bf.simulate(
                made,
                data(3),
                rounds=1,
                evaluate_every=None,
                engine=bf.Engine(k, workers=1),
                dtype=torch.float64,
                progress=False,
            ).server
        )
    assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-10)
    assert not torch.allclose(runs[1]["body"]["loc"], runs[2]["body"]["loc"])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "posterior", [Point(), MeanField(init_scale=0.1)], ids=["point", "mean field"]
)
def test_priors_are_constant_during_a_phase(kernel, posterior):
    """A prior may read a block that the same phase trains: every kernel, the reference too, sees it
    as the phase found it.
    """
    tied = Normal(
        centre=lambda given, view: view["b"]["loc"].mean(-1, keepdim=True),
        variance=lambda given, view: torch.ones(1).double(),
    )
    blocks = {"b": bf.Block("body.*"), "h": bf.Block("head.*", posterior=posterior, prior=tied)}
    step = Descend(Energy(("b", "h"), ("b", "h"), likelihood="sum"), steps=3, optimiser=SGD(0.05))
    model, clients = mlp(4, hidden=3, outputs=2), data(1)
    made = bf.Algorithm(model, blocks, (step,), parts=("b", "h"))
    still = made.init(1, dtype=torch.float64)["b"]["loc"].mean()
    held = Normal(centre=lambda given, view: still.expand(1), variance=tied.variance)
    expected = bf.Algorithm(
        model,
        blocks | {"h": bf.Block("head.*", posterior=posterior, prior=held)},
        (step,),
        parts=("b", "h"),
    )
    runs = [
        bf.simulate(
            a,
            clients,
            rounds=1,
            evaluate_every=None,
            engine=bf.Engine(k, workers=1),
            dtype=torch.float64,
            progress=False,
        )
        for a, k in ((expected, "reference"), (made, kernel))
    ]
    assert_close(runs[1].server, runs[0].server, rtol=1e-10, atol=1e-12)
    assert (runs[0].server["b"]["loc"].mean() - still).abs() > 1e-3


def test_divergence_is_energy_minus_entropy():
    """Of a belief it is the KL divergence, for many clients at once."""
    prior = Normal(centre=server_mean("w"), variance=lambda given, view: view["v"][..., None])
    made = algorithm(
        nn.Linear(2, 1), {"w": bf.Block(posterior=MeanField(), prior=prior)}, likelihood=Gaussian()
    )
    q = {"loc": numbers(4, 3), "rho": numbers(4, 3, seed=1)}
    given, view = {"w": {"loc": numbers(3, seed=2)}}, {"v": numbers(4, seed=3).exp()}
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(q["loc"], F.softplus(q["rho"])),
        torch.distributions.Normal(given["w"]["loc"], view["v"].sqrt()[:, None]),
    ).sum(-1)
    assert_close(made.divergence("w", q, given, view), expected)


def alignment(
    features: Tensor | None, outputs: Tensor, losses: Tensor, batch: Batch, given: Any, view: Any
) -> Tensor:
    """Reads all three: features near what the view says, small outputs, alike losses; padding
    counts nothing.
    """
    assert features is not None
    weight = batch["weight"] / batch["weight"].sum(-1, keepdim=True)
    near = (features - view["target"].unsqueeze(-2)).square().mean(-1) + 0.1 * outputs.square().sum(
        -1
    )
    mean = (losses * weight).sum(-1, keepdim=True)
    return (weight * (0.7 * near + (losses - mean).square())).sum(-1)


def aligned(model: nn.Module, **options: Any) -> bf.Algorithm:
    """Body and head in turn, both with the penalty, targets from the client's private state."""
    parts = ("body", "head")
    target = {"target": torch.linspace(-1, 1, 16, dtype=torch.float64)}
    rest = {"optimiser": SGD(0.1), **options}
    phases = tuple(
        Descend(Energy(name, parts, likelihood="mean", penalty=alignment), **rest) for name in parts
    )
    return bf.Algorithm(
        model,
        {"body": Block("body.*"), "head": Block("head.*")},
        phases,
        parts=parts,
        private=target,
    )


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
@pytest.mark.parametrize("likelihood", ["sum", "mean"])
def test_a_penalty_by_hand(
    model: bf.models.SplitModel, clients: FederatedData, kernel: str, likelihood: str
):
    """One step of the body, then one of the head, on n times (or once) the mean loss plus the
    penalty, by autograd.
    """
    one = clients.select([2])
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    network = copy.deepcopy(model).double()
    lr, scale = 0.01, len(x) if likelihood == "sum" else 1
    view = {"target": torch.linspace(-1, 1, 16, dtype=torch.float64)}
    batch = {"weight": torch.ones(len(x), dtype=torch.float64)}
    for part in (network.body, network.head):
        features = network.body(x)
        outputs = network.head(features)
        losses = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
        loss = scale * (losses.mean() + alignment(features, outputs, losses, batch, {}, view))
        for p, g in zip(
            part.parameters(), torch.autograd.grad(loss, list(part.parameters())), strict=True
        ):
            p.data -= lr * g
    algorithm = aligned(model)
    phases = tuple(
        replace(p, energy=replace(p.energy, likelihood=likelihood), optimiser=SGD(lr))
        for p in algorithm.phases
    )
    result = run(replace(algorithm, phases=phases), one, kernel=kernel)
    wanted = {
        name: {"loc": torch.cat([p.detach().flatten() for p in part.parameters()])}
        for name, part in (("body", network.body), ("head", network.head))
    }
    assert_close(result.server, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("prox", [False, True])
def test_a_penalty_in_every_kernel(model: nn.Module, clients: FederatedData, prox: bool):
    """In batches, for clients of unequal size, beside a prior or one that is solved."""
    prior = Normal(
        centre=server_mean("body"),
        variance=lambda given, view: torch.full_like(view["n"], 0.5)[..., None],
    )
    algorithm = aligned(model, batch_size=10, epochs=2)
    body = replace(algorithm.phases[0], prox=prox)
    algorithm = replace(
        algorithm,
        blocks={**algorithm.blocks, "body": Block("body.*", prior=prior)},
        phases=(body, algorithm.phases[1]),
    )
    reference = run(algorithm, clients, kernel="reference", rounds=2).server
    for kernel in ("layers", "live", "vmap"):
        found = run(algorithm, clients, kernel=kernel, rounds=2).server
        assert_close(found, reference, atol=1e-10, rtol=0)


def test_a_penalty_without_features():
    """A model that is not cut in two has none, and a penalty that reads nothing trained changes
    nothing.
    """

    def flat(
        features: Tensor | None,
        outputs: Tensor,
        losses: Tensor,
        batch: Batch,
        given: Any,
        view: Any,
    ) -> Tensor:
        assert features is None
        return torch.full_like(view["n"], 5.0)

    clients, model = federation(), nn.Sequential(nn.Linear(8, 3))
    plain = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=SGD(0.1))
    energy = replace(plain.energy, penalty=flat)
    found = [
        run(
            bf.Algorithm(model, {"w": Block()}, (replace(plain, energy=e),), parts=("w",)),
            clients,
            kernel=kernel,
        ).server["w"]["loc"]
        for e, kernel in ((plain.energy, "layers"), (energy, "layers"), (energy, "reference"))
    ]
    assert_close(found[1], found[0], atol=0, rtol=0)
    assert_close(found[2], found[0], atol=1e-12, rtol=0)


def test_a_penalty_needs_points(model: nn.Module):
    """Of draws there would be as many penalties as draws: refused, with the remedy."""
    prior = Normal(centre=own_mean("w"), variance=lambda given, view: torch.ones(1))
    step = Descend(Energy("w", ("w",), likelihood="sum", penalty=alignment))
    with pytest.raises(ValueError, match=r"blocks \['w'\] .*Point"):
        algorithm(model, {"w": Block(posterior=MeanField(), prior=prior)}, finetune=(step,))


def believing(clients: FederatedData, likelihood: Any, **options: Any) -> bf.Algorithm:
    """A classifier whose weights are a Gaussian belief under N(0.5, 4)."""
    prior = Normal(
        centre=lambda given, view: torch.full_like(view["w"]["loc"], 0.5),
        variance=lambda given, view: 4 * torch.ones_like(view["w"]["loc"]),
    )
    block = Block(posterior=MeanField(init_scale=0.3), prior=prior, pool=None, keep=True)
    step = Descend(
        Energy("w", ("w",), likelihood=likelihood, **options), epochs=3, optimiser=SGD(0.01)
    )
    return bf.Algorithm(mlp(8, hidden=4, outputs=3), {"w": block}, (step,), parts=("w",))


@pytest.mark.parametrize("likelihood", ["sum", "mean"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_on_the_kl_is_another_prior(likelihood: str, kernel: Any, clients: FederatedData):
    """The gradient is that of the likelihood plus kl_weight times the KL's: linear in it, and 1 is
    the plain energy.
    """

    def moved(**options: float) -> Tensor:
        made = believing(clients, likelihood, **options)
        made = replace(made, phases=tuple(replace(phase, epochs=1) for phase in made.phases))
        after = run(made, clients, engine=bf.Engine(kernel, chunk=3)).private["w"]
        return torch.cat([after["loc"], after["rho"]], 1)

    none, one, two, half = (moved(kl_weight=weight) for weight in (0.0, 1.0, 2.0, 0.5))
    assert_close(two - none, 2 * (one - none), atol=1e-12, rtol=1e-9)
    assert_close(half - none, 0.5 * (one - none), atol=1e-12, rtol=1e-9)
    assert float((one - none).abs().max()) > 1e-4
    assert_close(one, moved(), atol=0, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_energy_without_the_data_goes_to_its_prior(kernel: Any, clients: FederatedData):
    """Gradient steps on the KL alone end at the prior's moments, whatever the data."""
    made = believing(clients, "none")
    made = replace(
        made,
        phases=tuple(
            replace(phase, epochs=400, optimiser=SGD(0.5, momentum=0.9)) for phase in made.phases
        ),
    )
    after = run(made, clients.select([3]), engine=bf.Engine(kernel))
    mean, variance = MeanField().moments(after.private["w"])
    assert_close(mean, torch.full_like(mean, 0.5), atol=1e-6, rtol=0)
    assert_close(variance, torch.full_like(variance, 4.0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"likelihood": word}, f"^likelihood must be 'sum', 'mean' or 'none', got '{word}'")
            for word in ("average", "")
        ),
        ({"kl_weight": -1.0}, r"kl_weight .*got -1\.0"),
        ({"kl_weight": math.inf}, "kl_weight .*got inf"),
        ({"likelihood": "none", "weight": inverse_count}, "weight .*likelihood='none'"),
    ],
)
def test_what_is_no_energy(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Energy("w", ("w",), **{"likelihood": "sum", **options})


def taught(
    features: Tensor | None, outputs: Tensor, losses: Tensor, batch: Batch, given: Any, view: Any
) -> Tensor:
    """Cross entropy to two teachers' predictions, and features near the first one's."""
    assert features is not None
    weight = batch["weight"] / batch["weight"].sum(-1, keepdim=True)
    one, other = batch["at"]["received"], batch["at"]["kept"]
    assert not one.outputs.requires_grad
    teacher = 0.5 * (one.outputs.softmax(-1) + other.outputs.softmax(-1))
    apart = -(teacher * outputs.log_softmax(-1)).sum(-1)
    return (weight * (apart + (features - one.features).square().mean(-1))).sum(-1)


def received(algorithm: bf.Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    return algorithm.leaves(("w",), given)


def kept(algorithm: bf.Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    return algorithm.leaves(("w",), view["kept"])


def keep(algorithm: bf.Algorithm, given: Server, view: View, data: Batch) -> View:
    return view | {"kept": {name: view[name] for name in algorithm.whole(("w",))}}


def learner(model: nn.Module, *, repeat: bool = False, **options: Any) -> bf.Algorithm:
    """FedAvg taught by the model received and the client's last one."""
    energy = Energy(
        "w", ("w",), likelihood="mean", penalty=taught, at={"received": received, "kept": kept}
    )
    step = Descend(energy, optimiser=SGD(0.1, momentum=0.5), **({} if repeat else options))
    train = bf.Repeat((replace(step, epochs=2), step), **options) if repeat else step

    def start(given: Server) -> Any:
        return {name: entry for name, entry in given.items() if isinstance(entry, dict)}

    return bf.Algorithm(
        model, {"w": Block()}, (train, bf.Once(keep)), parts=("w",), private={"kept": start}
    )


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
def test_a_penalty_at_other_weights_by_hand(
    model: bf.models.SplitModel, clients: FederatedData, kernel: str
):
    """Two rounds of two steps of a lone client, by autograd on modules: teachers are constant."""
    one = clients.select([2])
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    network = copy.deepcopy(model).double()
    last = copy.deepcopy(network)
    for _ in range(2):
        received, before = copy.deepcopy(network), last
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)
        for _ in range(2):
            optimiser.zero_grad()
            z = network.body(x)
            with torch.no_grad():
                near, far = received.body(x), received(x).softmax(1) + before(x).softmax(1)
            loss = F.cross_entropy(network.head(z), y) + (z - near).square().mean()
            loss = loss - (0.5 * far * network.head(z).log_softmax(1)).sum(1).mean()
            loss.backward()
            optimiser.step()
        last = copy.deepcopy(network)
    found = run(learner(model, epochs=2), one, 2, kernel=kernel).server["w"]["loc"]
    wanted = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert_close(found, wanted, atol=1e-11, rtol=0)


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("batch_size", [None, 10])
def test_a_penalty_at_other_weights_in_every_kernel(
    model: nn.Module, clients: FederatedData, batch_size: int | None, repeat: bool
):
    """For clients of unequal size in batches, full ones or those of a `Repeat`, under several
    workers; they give the bits of one.
    """
    algorithm = learner(model, batch_size=batch_size, epochs=2, repeat=repeat)
    reference = run(algorithm, clients, kernel="reference", rounds=2).server
    for kernel in ("layers", "live", "vmap"):
        one, three = (
            run(algorithm, clients, rounds=2, engine=bf.Engine(kernel, chunk=2, workers=w)).server
            for w in (1, 3)
        )
        assert_close(one, reference, atol=1e-10, rtol=0)
        assert torch.equal(one["w"]["loc"], three["w"]["loc"])


def test_other_weights_run_in_evaluation_mode(clients: FederatedData):
    """With the running statistics that are theirs and without dropout, whose own addresses stay:
    kernels agree, and a network at its own weights in evaluation mode teaches as the module says.
    """
    algorithm = learner(with_batch_norm(dropout=0.3), batch_size=10, epochs=2)
    found = [
        run(algorithm, clients, rounds=2, engine=bf.Engine(kernel, chunk=3, workers=2)).server
        for kernel in ("live", "layers")
    ]
    assert_close(found[0], found[1], atol=1e-10, rtol=0)
    seen: list[tuple[Tensor, Tensor]] = []

    def note(features: Any, outputs: Any, losses: Any, batch: Batch, given: Any, view: Any) -> Any:
        seen.append((batch["x"], batch["at"]["received"].outputs))
        return losses.sum(-1) * 0

    energy = replace(algorithm.phases[0].energy, penalty=note)
    noting = replace(
        algorithm, phases=(replace(algorithm.phases[0], energy=energy), algorithm.phases[1])
    )
    engine = bf.Engine("layers", chunk=7, workers=1)
    before = run(noting, clients, rounds=1, engine=engine)
    seen.clear()
    run(noting, clients, rounds=2, engine=engine, resume=before)
    network = before.model().double().eval()
    x, outputs = seen[0]
    assert_close(outputs[0], network(x[0]), atol=1e-10, rtol=0)


class Asking(nn.Module):
    """Asks its rows something in evaluation mode, which no recording can repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return z if self.training or float(z.sum()) < 0 else z + 0.0


def test_a_network_that_cannot_be_recorded_in_evaluation_mode(clients: FederatedData):
    """It runs client by client then, as the reference does."""
    algorithm = learner(bf.models.SplitModel(Asking(), nn.Linear(8, 3)), epochs=2)
    found, wanted = (
        run(algorithm, clients, kernel=kernel).server["w"]["loc"] for kernel in ("auto", "live")
    )
    assert_close(found, wanted, atol=1e-10, rtol=0)
