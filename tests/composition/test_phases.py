"""What `Descend` may add to plain steps: priors solved, penalties, optimisers that persist; against
closed forms and steps by hand.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import Batch, View
from bayesfl.base.random import Purpose, generator
from bayesfl.composition import (
    Block,
    Descend,
    Energy,
    Mixture,
    Normal,
    Once,
    Repeat,
    own_mean,
    server_mean,
    standard_normal,
)
from bayesfl.data import FederatedData
from bayesfl.engine.driver import KernelName
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.optim import SGD, Adam
from bayesfl.posteriors import MeanField
from tests.cases import SIZES, close, run


def pulled(
    model: nn.Module,
    variance: float,
    *,
    optimiser: Any = SGD(0.1),
    prox: bool = True,
    likelihood: Any = "mean",
    **steps,
) -> bf.Algorithm:
    """One private block under N(server's mean, variance)."""
    prior = Normal(
        centre=server_mean("w"),
        variance=lambda given, view: torch.full_like(view["n"], variance)[..., None],
    )
    phase = Descend(
        Energy("w", ("w",), likelihood=likelihood), optimiser=optimiser, prox=prox, **steps
    )
    return bf.Algorithm(model, {"w": Block(prior=prior)}, (phase,), parts=("w",))


@pytest.mark.parametrize("likelihood", ["sum", "mean"])
@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
def test_two_steps_by_hand(model: nn.Module, clients: FederatedData, likelihood: str, kernel: str):
    """Each step: SGD on the likelihood alone, then (w + lr k centre) / (1 + lr k), k = 1 /
    variance, of a mean 1 / (n variance).
    """
    variance, lr, one = 0.3, 0.05, clients.select([2])
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    network = bf.models.mlp(8, hidden=16, outputs=3).double()
    network.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    centres = [p.detach().clone() for p in network.parameters()]
    k = 1 / variance if likelihood == "sum" else 1 / (len(x) * variance)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(network(x), y, reduction=likelihood)
        for p, g, c in zip(
            network.parameters(),
            torch.autograd.grad(loss, list(network.parameters())),
            centres,
            strict=True,
        ):
            p.data = (p.data - lr * g + lr * k * c) / (1 + lr * k)
    stepped = pulled(model, variance, optimiser=SGD(lr), likelihood=likelihood, epochs=2)
    assert_close(
        run(stepped, one, kernel=kernel).server["w"]["loc"],
        torch.cat([p.detach().flatten() for p in network.parameters()]),
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["reference", "layers"])
@pytest.mark.parametrize("optimiser", [SGD(0.1), SGD(0.03, momentum=0.9), Adam(0.01)], ids=str)
def test_the_minimum_is_that_of_the_energy(clients: FederatedData, optimiser: Any, kernel: str):
    """Whatever the optimiser, the gradient of likelihood and prior together vanishes where it ends:
    of a linear model, convex.
    """
    one, variance = clients.select([0]), 0.5
    x, y = (t.double() if t.is_floating_point() else t for t in one.train.client(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
    result = run(pulled(model, variance, optimiser=optimiser, steps=1500), one, kernel=kernel)
    w = result.server["w"]["loc"].clone().requires_grad_()
    centre = torch.cat([model.weight.flatten(), model.bias]).detach().double()
    energy = torch.nn.functional.cross_entropy(x @ w[:24].view(3, 8).T + w[24:], y) + (
        w - centre
    ).square().sum() / (2 * variance * len(x))
    energy.backward()
    assert w.grad is not None
    assert float((w - centre).detach().abs().max()) > 0.1
    assert_close(w.grad, torch.zeros_like(w), atol=1e-4, rtol=0)


def test_stiff_priors_are_stable(model: nn.Module, clients: FederatedData):
    """lr k of a few hundred: the proximal step stays finite and near the centre, the gradient step
    leaves the numbers.
    """
    options = {"optimiser": SGD(0.1), "epochs": 300, "likelihood": "sum"}
    stiff = pulled(model, 1e-4, **options)
    moved = run(stiff, clients).server["w"]["loc"] - stiff.init(7, dtype=torch.float64)["w"]["loc"]
    assert 0 < float(moved.abs().max()) < 0.01
    with pytest.raises(bf.DivergenceError):
        run(pulled(model, 1e-4, prox=False, **options), clients)


def test_a_wide_prior_changes_nothing(model: nn.Module, clients: FederatedData):
    """As the variance grows, the steps become those under a flat prior; Adam's too."""
    wide = pulled(model, 1e12, optimiser=Adam(0.01), epochs=3, batch_size=10)
    flat = replace(wide, blocks={"w": Block()}, phases=(replace(wide.phases[0], prox=False),))
    assert_close(
        run(wide, clients).server["w"]["loc"],
        run(flat, clients).server["w"]["loc"],
        atol=1e-10,
        rtol=0,
    )


def test_repeated_phases_that_persist(model: nn.Module, clients: FederatedData):
    """Inside `Repeat` too: two rounds of three batches as one of six."""

    def repeated(times: int) -> bf.Algorithm:
        step = Descend(
            Energy("w", ("w",), likelihood="mean"),
            optimiser=SGD(0.05, momentum=0.9),
            persist="velocity",
        )
        return bf.Algorithm(
            model, {"w": Block(pool=None, keep=True)}, (Repeat((step,), times=times),), parts=("w",)
        )

    found = [
        run(repeated(times), clients, kernel=kernel, rounds=6 // times)
        for times in (3, 6)
        for kernel in ("reference", "layers")
    ]
    kept = [(other.private["w"], other.private["velocity"]) for other in found]
    assert_close(kept[1:], kept[:1] * 3, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
@pytest.mark.parametrize(
    ("optimiser", "belief"), [(SGD(0.05, momentum=0.9), False), (Adam(0.01), True)], ids=str
)
def test_passes_of_a_repeat_are_passes_of_its_only_phase(
    clients: FederatedData, kernel: Any, belief: bool, optimiser: Any
):
    """One step a batch for two epochs is two epochs of steps, for clients of unequal size: the
    optimiser's state goes from batch to batch, and starts anew with every round.
    """
    net = bf.models.mlp(8, hidden=16, outputs=3)
    prior = Normal(
        centre=server_mean("w"), variance=lambda given, view: torch.ones_like(view["n"])[..., None]
    )
    block = Block(posterior=MeanField(init_scale=0.1), prior=prior) if belief else Block()

    def trained(phase: Any) -> Any:
        return run(
            bf.Algorithm(net, {"w": block}, (phase,), parts=("w",)),
            clients,
            rounds=2,
            kernel=kernel,
        ).server["w"]

    step = Descend(
        Energy("w", ("w",), likelihood="mean"), optimiser=optimiser, batch_size=10, epochs=2
    )
    one = replace(step, epochs=1, batch_size=None)
    wanted = trained(step)["loc"]
    close(trained(Repeat((one,), epochs=2, batch_size=10))["loc"], wanted)
    if kernel == "reference":
        most = -(-int(clients.train.counts.max()) // 10)
        longer = trained(Repeat((one,), times=2 * most, batch_size=10))["loc"]
        assert (longer - wanted).abs().max() > 1e-4


@pytest.mark.parametrize("kernel", ["reference", "layers", "live", "vmap"])
@pytest.mark.parametrize("copies", [None, 1, 3])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.7)])
def test_once_gets_the_losses_it_asks_for(
    clients: FederatedData, kernel: Any, copies: int | None, likelihood: Any
):
    """Those of every example at the parts' means, of every copy, by every kernel as by hand; of
    beliefs and points alike.
    """
    net = bf.models.mlp(8, hidden=16, outputs=3)
    if likelihood.task == "regression":
        parts = [clients.train.client(j) for j in range(7)]
        xs = [x for x, _ in parts]
        ys = [torch.nn.functional.one_hot(y, 3).float() for _, y in parts]
        clients = bf.data.from_arrays(xs, ys, test=(xs, ys), task="regression")

    def keep(algorithm: Any, given: Any, view: Any, data: Batch) -> Any:
        return view | {"seen": (data["losses"] * data["weight"]).sum(-1)}

    prior = Normal(
        centre=server_mean("head"),
        variance=lambda given, view: torch.ones_like(view["n"])[..., None],
    )
    start = bf.models.anew(net, pattern="head.*") if copies else "module"
    blocks = {
        "body": Block("body.*"),
        "head": Block(
            "head.*", posterior=MeanField(init_scale=0.5), prior=prior, copies=copies, start=start
        ),
    }
    algorithm = bf.Algorithm(
        net,
        blocks,
        (Once(keep, data=True, losses=("body", "head")),),
        parts=("body", "head"),
        likelihood=likelihood,
        private={"seen": torch.zeros(copies or ())},
        predictor=Mixture("head", "seen") if copies else None,
    )
    result = run(algorithm, clients, kernel=kernel)
    loc = result.server["head"]["loc"]
    for j in range(7):
        x, y = (t.double() if t.is_floating_point() else t for t in clients.train.client(j))
        body = algorithm.layout("body").leaves(result.server["body"]["loc"])
        wanted = [
            algorithm.losses(body | algorithm.layout("head").leaves(head), {"x": x, "y": y}).sum()
            for head in (loc if copies else loc[None])
        ]
        assert_close(
            result.private["seen"][j],
            torch.stack(wanted) if copies else wanted[0],
            atol=1e-9,
            rtol=0,
        )


def test_a_phase_of_another_kind_may_keep_something(model: nn.Module, clients: FederatedData):
    """Clients outside the cohort run it although it says which blocks it trains: what is kept does
    not depend on evaluations.
    """

    class Counting(bf.Once):
        blocks = ("w",)

        def keeps(self, algorithm: bf.Algorithm, beliefs: View) -> View:
            return {"count": torch.tensor(0)}

    plain = bf.algorithms.fedavg(model, epochs=1)
    made = replace(
        plain,
        phases=(
            *plain.phases,
            Counting(lambda a, given, view, batch: view | {"count": view["count"] + 1}),
        ),
    )
    for every in (None, 1):
        found = run(made, clients, 4, participation=0.5, train="all", evaluate_every=every)
        assert found.private["count"].tolist() == [4] * clients.clients


def test_a_repeat_counts_batches_or_passes():
    once = (Once(lambda algorithm, given, view, batch: view),)
    assert (Repeat(once, times=3).steps, Repeat(once, epochs=3).steps) == (3, None)


STEP = Descend(Energy("w", ("w",), likelihood="mean"))
BODY = Descend(Energy("body", ("body",), likelihood="mean"))
WIDE = Normal(centre=own_mean("w"), variance=lambda given, view: torch.ones(1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda model: bf.Algorithm(
                model,
                {"w": Block(posterior=MeanField(), prior=WIDE)},
                (replace(STEP, prox=True),),
                parts=("w",),
            ),
            "use prox=False",
        ),
        (
            lambda model: bf.Algorithm(
                model,
                {"body": Block("body.*"), "head": Block("head.*")},
                (BODY,),
                parts=("body", "head"),
            ),
            r"\('body',\).*leave out \['head\.bias', 'head\.weight'\].*\('body', 'head'\)",
        ),
        (lambda model: Repeat((STEP,), epochs=0), r"epochs.*0"),
        (lambda model: Repeat((Repeat((STEP,)),)), r"Repeat .*batch.*got Repeat"),  # type: ignore[arg-type]
        (lambda model: Repeat((replace(STEP, batch_size=7),)), r"Repeat .*batch.*got Descend"),
    ],
)
def test_what_is_refused_as_it_is_composed(call: Any, words: str, model: nn.Module):
    """A proximal step without a Gaussian prior of points; an energy that leaves out a part, which
    would stay at the weights of the model as it was given; in a repeat another one, or a phase
    that would draw batches of its own.
    """
    with pytest.raises(ValueError, match=words):
        call(model)


PASSES = (3, 1, 2, 5, 1, 4, 2)


def by_client(client: int, rng: np.random.Generator) -> int:
    return PASSES[client]


def drawn(client: int, rng: np.random.Generator) -> int:
    return int(rng.integers(1, 5))


@pytest.mark.parametrize("repeat", [False, True])
def test_epochs_by_client(model: nn.Module, clients: FederatedData, repeat: bool):
    """By every kernel each client has the numbers that it has where all make as many passes, and
    knows how many steps it took.
    """

    def alone(epochs: Any) -> bf.Algorithm:
        step = Descend(
            Energy("w", ("w",), likelihood="mean"), optimiser=SGD(0.1, 0.5), counts="steps"
        )
        sizes = {"epochs": epochs, "batch_size": 10}
        train = Repeat((step,), **sizes) if repeat else replace(step, **sizes)
        blocks = {"w": Block(pool=None, keep=True)}
        return bf.Algorithm(model, blocks, (train,), parts=("w",), private={"steps": 0.0})

    same = {
        epochs: run(alone(epochs), clients, 2, engine=bf.Engine("reference")).private["w"]["loc"]
        for epochs in set(PASSES)
    }
    wanted = torch.stack([same[own][j] for j, own in enumerate(PASSES)])
    steps = [1 if repeat else e * -(-n // 10) for e, n in zip(PASSES, SIZES, strict=True)]
    kernels: tuple[KernelName, ...] = ("reference", "layers", "live", "vmap")
    for kernel in kernels:
        engine = bf.Engine(kernel, chunk=4, workers=2)
        found = run(alone(by_client), clients, 2, engine=engine)
        close(found.private["w"]["loc"], wanted)
        assert found.private["steps"].tolist() == steps
        assert len(found.history["train_nll"]) == 2


def test_epochs_are_drawn_by_address(model: nn.Module, clients: FederatedData):
    """By seed, round and client, whatever the chunks; a phase beside has the same."""
    step = Descend(
        Energy("w", ("w",), likelihood="mean"), epochs=drawn, optimiser=SGD(0.0), counts="one"
    )
    both = (step, replace(step, counts="two"))
    algorithm = bf.Algorithm(
        model, {"w": Block()}, both, parts=("w",), private={"one": 0.0, "two": 0.0}
    )
    for rounds in (1, 2):
        wanted = [
            drawn(j, generator(2, Purpose.EPOCHS, round=rounds - 1, client=j)) for j in range(7)
        ]
        for chunk in (2, 7):
            found = run(algorithm, clients, rounds, engine=bf.Engine(chunk=chunk)).private
            assert found["one"].tolist() == found["two"].tolist() == wanted
    none = replace(algorithm, phases=(replace(step, epochs=no_passes),), private={})
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        run(none, clients)


def no_passes(client: int, rng: np.random.Generator) -> int:
    return 0


def of_once(model: nn.Module, fn: Any, **options: Any) -> bf.Algorithm:
    """A function after plain steps, on what the client keeps."""
    step = Descend(Energy("w", ("w",), likelihood="mean"), optimiser=SGD(0.1))
    blocks = {"w": Block(), "v": Block(pool=None, keep=True)}
    return bf.Algorithm(model, blocks, (step, Once(fn, **options)), parts=("w",))


def test_a_function_returns_what_changes(model: nn.Module, clients: FederatedData):
    """The rest of the view stays."""
    found = run(of_once(model, lambda a, given, view, batch: {"v": view["w"]}), clients, rounds=2)
    plain = run(of_once(model, lambda a, given, view, batch: view), clients, rounds=2)
    close(found.server["w"]["loc"], plain.server["w"]["loc"])
    weights = torch.from_numpy(clients.train.counts / clients.train.counts.sum())
    assert_close(weights @ found.private["v"]["loc"], found.server["w"]["loc"])


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (lambda a, given, view, batch: {"v": view["w"]["loc"]}, ValueError, "'v' was .*'loc'"),
        (
            lambda a, given, view, batch: {"v": {"loc": view["n"]}},
            ValueError,
            r"returned as .*\[\]",
        ),
        (lambda a, given, view, batch: {"v": view["aplha"]}, KeyError, "aplha"),
    ],
)
def test_what_a_function_does_wrong_names_it(
    fn: Any, kind: type[Exception], words: str, model: nn.Module, clients: FederatedData
):
    def half_done(*given: Any) -> View:
        return fn(*given)

    with pytest.raises(kind, match=words) as raised:
        run(of_once(model, half_done), clients)
    assert raised.value.__notes__ == ["in 'half_done', a function of a phase", "in phase 2, Once"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"c": torch.zeros(3)}, r"'c' was torch.float64 \[\], .* torch.float32 \[3\]"),
        ({"c": torch.tensor(3)}, r"'c' was torch.float64 \[\], .* torch.int64 \[\]"),
    ],
)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_an_entry_in_another_form_is_refused(
    found: View, words: str, kernel: KernelName, model: nn.Module, clients: FederatedData
):
    made = replace(of_once(model, lambda *given: found), private={"c": 0.0})
    with pytest.raises(ValueError, match=words) as raised:
        run(made, clients, kernel=kernel)
    assert raised.value.__notes__[-1] == "in phase 2, Once"


def test_numbers_are_as_precise_as_the_run(model: nn.Module, clients: FederatedData):
    """Starts, draws, and what a function returns; lists, too."""
    made = replace(
        of_once(model, lambda *given: {"c": 0.3, "copy": given[2]["w"]}),
        private={"c": 0.1, "d": 0.3},
        server=lambda blocks, clients: {"e": 0.3},
        drawn={"f": lambda rng: [0.3, 0.3]},
    )
    result = run(made, clients)
    for t in (*(result.private[name] for name in "cd"), *(result.server[name] for name in "ef")):
        assert torch.equal(t, torch.full_like(t, 0.3, dtype=torch.float64))


def typo(*given: Any) -> Any:
    raise KeyError("aplha")


@pytest.mark.parametrize("which", ["weight", "penalty", "prior"])
def test_errors_in_an_energy_name_the_phase(which: str, model: nn.Module, clients: FederatedData):
    options: Any = {} if which == "prior" else {which: typo}
    prior = Normal(centre=typo, variance=typo) if which == "prior" else Block().prior
    step = Descend(Energy("w", ("w",), likelihood="mean", **options))
    made = bf.Algorithm(model, {"w": Block(prior=prior)}, (step,), parts=("w",))
    with pytest.raises(KeyError, match="aplha") as raised:
        run(made, clients)
    assert raised.value.__notes__ == ["in phase 1, Descend on w"]


def test_validation_rows_are_not_those_of_a_repeat():
    with pytest.raises(ValueError, match=r"inside a Repeat .*data='validation'"):
        Repeat((Once(typo, data="validation"),))


@pytest.mark.parametrize(("drawn", "words"), [(1.5, "whole number, got 1.5"), (0, "at least 1")])
def test_drawn_epochs_are_whole(drawn: float, words: str, model: nn.Module, clients: FederatedData):
    step = Descend(Energy("w", ("w",), likelihood="mean"), epochs="steps")
    made = bf.Algorithm(
        model, {"w": Block()}, (step,), parts=("w",), drawn={"steps": lambda rng: drawn}
    )
    with pytest.raises(ValueError, match=f"epochs='steps' must be .*{words}"):
        run(made, clients)
    twice = replace(made, drawn={"steps": lambda rng: 2.0})
    same = replace(made, phases=(replace(step, epochs=2),), drawn={})
    close(run(twice, clients).server["w"]["loc"], run(same, clients).server["w"]["loc"])


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_function_has_normals(kernel: KernelName, model: nn.Module, clients: FederatedData):
    """Those of its address: by client and round, whatever the kernel."""

    def shake(algorithm: bf.Algorithm, given: Any, view: View, batch: Batch) -> View:
        return {"v": {"loc": batch["normals"]["v"]}}

    made = of_once(model, shake, normals=("v",))
    found = run(made, clients, kernel=kernel, rounds=2).private["v"]["loc"]
    close(found, run(made, clients, rounds=2, engine=bf.Engine(chunk=3)).private["v"]["loc"])
    assert abs(float(found.mean())) < 4 / found.numel() ** 0.5
    assert float(found.std()) == pytest.approx(1, abs=0.1)
    assert float(found.std(0).min()) > 0
    assert not torch.allclose(found, run(made, clients, rounds=1).private["v"]["loc"])


def test_what_is_drawn_is_common_to_clients_and_server(model: nn.Module, clients: FederatedData):
    """A coin of each round, by address; a run that goes on has those of one that never stopped."""
    seen: list[float] = []

    def look(algorithm: bf.Algorithm, given: Any, view: View, batch: Batch) -> View:
        return {"coin": given["coin"] + 0 * view["n"]}

    def combine(server: Any, ids: Any, uplink: Any) -> Any:
        assert uplink["coin"].unique().tolist() == [float(server["coin"])]
        seen.append(float(server["coin"]))
        return {}

    made = replace(
        of_once(model, look),
        drawn={"other": lambda rng: rng.random(), "coin": lambda rng: rng.random()},
        reports={"coin": 0.0},
        combine=combine,
    )
    half = run(made, clients, rounds=2)
    run(made, clients, rounds=4, resume=half)
    assert seen == [
        generator(2, Purpose.COMMON, round=round, index=1).random() for round in range(4)
    ]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_number_of_epochs_may_be_drawn(
    kernel: KernelName, model: nn.Module, clients: FederatedData
):
    """In each round as many for all clients."""

    def trained(epochs: Any, **options: Any) -> Any:
        step = Descend(Energy("w", ("w",), likelihood="mean"), epochs=epochs, batch_size=10)
        made = bf.Algorithm(model, {"w": Block()}, (step,), parts=("w",), **options)
        return run(made, clients, kernel=kernel).server["w"]["loc"]

    drawn = trained("often", drawn={"often": lambda rng: int(rng.integers(2, 9))})
    often = int(generator(2, Purpose.COMMON, round=0).integers(2, 9))
    assert often > 2
    close(drawn, trained(often))


prior_of_w = Normal(
    centre=lambda given, view: torch.zeros_like(view["w"]["loc"]),
    variance=lambda given, view: torch.full_like(view["w"]["loc"], 0.01),
)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_priors_parameters_are_trained(
    kernel: KernelName, model: nn.Module, clients: FederatedData
):
    """Three steps on KL(q || N(c, s)), in q and in c and s, by the KL's own slopes."""
    family, lr = MeanField(init_scale=0.3), 0.1
    tied = Normal(centre=own_mean("w"), variance=lambda given, view: family.moments(view["w"])[1])
    wide = MeanField(init_scale=0.7)
    blocks = {
        "w": Block(posterior=family, pool=None, keep=True),
        "q": Block(posterior=wide, prior=tied, start=standard_normal(1.0), pool=None, keep=True),
    }
    energy = Energy(("q", "w"), ("q",), likelihood="none")
    fit = Descend(energy, steps=3, optimiser=SGD(lr))
    made = bf.Algorithm(model, blocks, (fit,), parts=("q",))
    start = made.rows(made.init(7, seed=2, dtype=torch.float64))
    found = run(made, clients, kernel=kernel).private
    q, w = ({key: t.expand(7, -1) for key, t in start[name].items()} for name in "qw")
    for _ in range(3):
        (m, v), (c, s) = family.moments(q), family.moments(w)
        at_q = (m - c) / s, (1 / s - 1 / v) / 2
        at_w = (c - m) / s, (1 / s - (v + (m - c).square()) / s.square()) / 2
        q, w = (
            {
                "loc": one["loc"] - lr * of_loc,
                "rho": one["rho"] - lr * of_var * 2 * var.sqrt() * one["rho"].sigmoid(),
            }
            for one, var, (of_loc, of_var) in ((q, v, at_q), (w, s, at_w))
        )
    assert_close(found["q"], q, atol=1e-10, rtol=0)
    assert_close(found["w"], w, atol=1e-10, rtol=0)
    # under a prior of its own, w has a KL too
    own = replace(made, blocks=blocks | {"w": replace(blocks["w"], prior=prior_of_w)})
    once = replace(fit, steps=1)
    plain, pulled = (
        run(replace(one, phases=(once,)), clients, kernel=kernel).private["w"]["loc"]
        for one in (made, own)
    )
    assert_close(plain - pulled, lr * start["w"]["loc"].expand(7, -1) / 0.01, atol=1e-10, rtol=0)
    for wrong in (
        replace(fit, prox=True),
        replace(fit, energy=Energy("w", ("q",), likelihood="sum")),
    ):
        with pytest.raises(ValueError, match=r"\['w'\] are trained on an energy without"):
            replace(made, phases=(wrong,))


def test_a_priors_parameters_are_trained_with_the_data(model: nn.Module, clients: FederatedData):
    """The pull of a point to w, a mean over the data; one client with all kinds of steps."""
    prior = Normal(centre=own_mean("w"), variance=lambda given, view: torch.ones(1).to(view["n"]))
    blocks = {
        "w": Block(pool=None, keep=True, start=standard_normal(1.0)),
        "v": Block(prior=prior, pool=None, keep=True),
    }
    fit = Descend(Energy(("v", "w"), ("v",), likelihood="mean"), steps=1, optimiser=SGD(0.1))
    alone = replace(fit, energy=Energy("v", ("v",), likelihood="mean"))
    made = bf.Algorithm(model, blocks, (fit,), parts=("v",))
    found, constant = (
        run(replace(made, phases=(phase,)), clients).private for phase in (fit, alone)
    )
    close(found["v"]["loc"], constant["v"]["loc"])
    start = made.rows(made.init(7, seed=2, dtype=torch.float64))
    n = torch.from_numpy(clients.train.counts)[:, None]
    pull = start["w"]["loc"] - start["v"]["loc"]
    close(found["w"]["loc"], start["w"]["loc"] - 0.1 * pull / n)


def test_what_a_phase_keeps_has_the_precision_of_the_run(model: nn.Module, clients: FederatedData):
    step = Descend(Energy("w", ("w",), likelihood="mean"))
    half = Once(lambda *given: {"c": given[2]["c"] / 2}, kept={"c": torch.tensor(0.3)})
    made = bf.Algorithm(model, {"w": Block()}, (half, step), parts=("w",))
    assert run(made, clients).private["c"].dtype == torch.float64
