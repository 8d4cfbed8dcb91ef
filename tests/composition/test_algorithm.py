"""Blocks, energies and algorithms: what is refused, what is copied, what is declared, and the two conventions of an energy."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.layout import Layout
from bayesfl.base.protocols import Batch, Server, View
from bayesfl.composition.block import standard_normal
from bayesfl.composition.energy import Energy, inverse_count
from bayesfl.composition.phases import Descend
from bayesfl.composition.pools import Mean, PrecisionWeighted
from bayesfl.composition.priors import Flat, Normal, server_mean
from bayesfl.data import FederatedData, from_arrays
from bayesfl.likelihoods import Gaussian
from bayesfl.models import mlp, split
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField, Point

KERNELS = ["reference", "live", "layers", "vmap"]
KEPT = Normal(centre=server_mean("w"), variance=lambda given, view: torch.ones(1).to(given["w"]["loc"]))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal draws in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def algorithm(model: nn.Module, blocks: dict[str, bf.Block], parts: tuple[str, ...] | None = None, **rest) -> bf.Algorithm:
    """Blocks without phases."""
    return bf.Algorithm(model, blocks, (), parts=tuple(blocks) if parts is None else parts, **rest)


def data(clients: int = 3, features: int = 4, rows: int = 6) -> FederatedData:
    """Clients of 6, 8, 10, ... examples of two classes."""
    xs = [numbers(rows + 2 * j, features, seed=j).float() for j in range(clients)]
    return from_arrays(xs, [(x[:, 0] > 0).long() for x in xs], test_share=0.0)


# Block


def test_an_entropy_under_a_flat_prior_is_refused():
    """The width of such a belief has no optimum; the message names the block's pattern and both remedies."""
    with pytest.raises(ValueError, match=r"'head\.\*'.*MeanField.*Flat.*Normal prior, or a Point posterior"):
        bf.Block("head.*", posterior=MeanField())
    assert bf.Block(posterior=MeanField(), prior=KEPT).stochastic
    assert not bf.Block().stochastic


def test_the_four_ways_to_hold_a_block():
    """Private is what is kept and never sent; a shared, a frozen and a hierarchical block are not."""
    ways = {(pool, keep): bf.Block(pool=Mean() if pool else None, keep=keep).private for pool in (True, False) for keep in (True, False)}
    assert [way for way, private in ways.items() if private] == [(False, True)]
    assert isinstance(bf.Block().prior, Flat)
    assert isinstance(bf.Block().posterior, Point)


# Energy


@pytest.mark.parametrize("word", ["average", "Sum", ""])
def test_energy_has_two_conventions(word):
    """`sum` or `mean`, and nothing else."""
    with pytest.raises(ValueError, match="'sum' or 'mean'"):
        Energy("w", ("w",), likelihood=word)


def test_scales():
    """n times the batch's mean plus the KL, or the mean plus KL / n."""
    n = torch.tensor([1.0, 4.0, 50.0]).double()
    assert_close(Energy("w", ("w",), likelihood="sum").scales(n), (n, torch.ones(3).double()))
    assert_close(Energy("w", ("w",), likelihood="mean").scales(n), (torch.ones(3).double(), 1 / n))
    assert Energy("w", ("w",), likelihood="mean").blocks == ("w",)
    assert Energy(("a", "b"), ("a", "b"), likelihood="mean").blocks == ("a", "b")


def by_row(given: Server, view: View, batch: Batch) -> Tensor:
    """A weight for each example, by its place in the client's rows."""
    return given["weights"][batch["index"]]


@pytest.mark.parametrize("likelihood", ["sum", "mean"])
@pytest.mark.parametrize("weight", [None, inverse_count, by_row], ids=["plain", "1 / n", "by row"])
def test_energy_by_hand(likelihood, weight):
    """Draws average, examples count by their weight and padding not at all, the KL of every trained block is added, and of no other."""
    model = mlp(2, hidden=3, outputs=2)
    head = bf.Block(
        "head.*", posterior=MeanField(), prior=Normal(centre=server_mean("head"), variance=lambda given, view: view["v"][..., None])
    )
    body = bf.Block("body.*", prior=Normal(centre=server_mean("body"), variance=lambda given, view: torch.full((1,), 0.3).double()))
    both = ("body", "head")
    made = algorithm(model, {"body": body, "head": head})
    n, v = torch.tensor(20.0).double(), torch.tensor(0.7).double()
    weights = numbers(20, seed=6).exp()
    given = {"body": {"loc": numbers(9)}, "head": {"loc": numbers(8, seed=1)}, "weights": weights}
    beliefs = {"body": {"loc": numbers(9, seed=2)}, "head": {"loc": numbers(8, seed=3), "rho": numbers(8, seed=4)}}
    batch = {"x": numbers(5, 2), "y": torch.tensor([0, 1, 1, 0, 1]), "weight": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).double()}
    batch["index"] = torch.tensor([4, 17, 9, 0, 0])
    noise = {"head": numbers(4, 8, seed=5)}
    x, y = batch["x"][:3], batch["y"][:3]
    scale = beliefs["head"]["rho"].exp().log1p()
    losses = []
    for e in noise["head"]:
        w, b = beliefs["head"]["loc"] + scale * e, beliefs["body"]["loc"]
        hidden = torch.relu(x @ b[:6].view(3, 2).T + b[6:])
        losses.append(F.cross_entropy(hidden @ w[:6].view(2, 3).T + w[6:], y, reduction="none"))
    each = {None: torch.ones(3).double(), inverse_count: torch.full((3,), 1 / 20).double(), by_row: weights[[4, 17, 9]]}[weight]
    nll = (each * torch.stack(losses).mean(0)).sum() / 3
    q = torch.distributions.Normal(beliefs["head"]["loc"], scale)
    kl_head = torch.distributions.kl_divergence(q, torch.distributions.Normal(given["head"]["loc"], v.sqrt())).sum()
    energy_body = -torch.distributions.Normal(given["body"]["loc"], math.sqrt(0.3)).log_prob(beliefs["body"]["loc"]).sum()
    for trained, divergence in (("head", kl_head), ("body", energy_body), (both, kl_head + energy_body)):
        names = (trained,) if isinstance(trained, str) else trained
        view = {"n": n, "v": v, **{name: beliefs[name] for name in both}}
        found, loss = Energy(trained, both, likelihood=likelihood, weight=weight)(
            made, {k: beliefs[k] for k in names}, given, view, batch, noise
        )
        assert_close(loss, nll)
        assert_close(found, 20 * nll + divergence if likelihood == "sum" else nll + divergence / 20)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight", [inverse_count, lambda given, view, batch: 0.5 + batch["index"].to(view["n"])], ids=["1 / n", "by row"])
def test_every_kernel_weighs_examples(kernel, weight):
    """Under draws or without, in full batches or not: as the reference, and not as without weights."""
    prior = Normal(centre=server_mean("head"), variance=lambda given, view: torch.ones(1).to(given["head"]["loc"]))
    head = bf.Block("head.*", posterior=MeanField(), prior=prior, pool=PrecisionWeighted())
    runs = []
    for k, w in (("reference", weight), (kernel, weight), (kernel, None)):
        steps = tuple(
            Descend(Energy(name, ("body", "head"), likelihood="sum", weight=w), batch_size=size, draws=2, optimiser=SGD(0.01))
            for name, size in (("head", None), ("body", 3))
        )
        made = bf.Algorithm(mlp(4, hidden=3, outputs=2), {"body": bf.Block("body.*"), "head": head}, steps, parts=("body", "head"))
        engine = bf.Engine(k, workers=1)
        runs.append(bf.simulate(made, data(3), rounds=1, evaluate_every=None, engine=engine, dtype=torch.float64, progress=False).server)
    assert_close(runs[1], runs[0], rtol=1e-9, atol=1e-10)
    assert not torch.allclose(runs[1]["body"]["loc"], runs[2]["body"]["loc"])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("posterior", [Point(), MeanField(init_scale=0.1)], ids=["point", "mean field"])
def test_priors_are_constant_during_a_phase(kernel, posterior):
    """A prior may read a block that the same phase trains: every kernel, the reference too, sees it as the phase found it."""
    tied = Normal(centre=lambda given, view: view["b"]["loc"].mean(-1, keepdim=True), variance=lambda given, view: torch.ones(1).double())
    blocks = {"b": bf.Block("body.*"), "h": bf.Block("head.*", posterior=posterior, prior=tied)}
    step = Descend(Energy(("b", "h"), ("b", "h"), likelihood="sum"), steps=3, optimiser=SGD(0.05))
    model, clients = mlp(4, hidden=3, outputs=2), data(1)
    made = bf.Algorithm(model, blocks, (step,), parts=("b", "h"))
    still = made.init(1, dtype=torch.float64)["b"]["loc"].mean()
    held = Normal(centre=lambda given, view: still.expand(1), variance=tied.variance)
    expected = bf.Algorithm(model, blocks | {"h": bf.Block("head.*", posterior=posterior, prior=held)}, (step,), parts=("b", "h"))
    runs = [
        bf.simulate(a, clients, rounds=1, evaluate_every=None, engine=bf.Engine(k, workers=1), dtype=torch.float64, progress=False)
        for a, k in ((expected, "reference"), (made, kernel))
    ]
    assert_close(runs[1].server, runs[0].server, rtol=1e-10, atol=1e-12)
    assert (runs[0].server["b"]["loc"].mean() - still).abs() > 1e-3


# Algorithm: what is refused


def test_overlapping_parts_are_refused():
    """One predictor takes each parameter from one block: the message names both blocks and the parameter."""
    model = mlp(2, hidden=3, outputs=2)
    with pytest.raises(ValueError, match=r"'all' and 'last' both claim parameter 'head\.weight'"):
        algorithm(model, {"all": bf.Block(), "last": bf.Block("head.*")})
    assert algorithm(model, {"all": bf.Block(), "last": bf.Block("head.*")}, parts=("all",)).parts == ("all",)


def test_unknown_parts_are_refused():
    """The message names the part and the blocks there are."""
    with pytest.raises(ValueError, match=r"'tail' is not a block; the blocks are \['w'\]"):
        algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block()}, parts=("w", "tail"))


def test_phases_are_checked():
    """A phase trains what its energy's predictor contains; fine-tuning and adaptation too."""
    model = mlp(2, hidden=3, outputs=2)
    blocks = {"body": bf.Block("body.*"), "head": bf.Block("head.*")}
    wrong = Descend(Energy("head", ("body",), likelihood="mean"))
    for where in ({"finetune": (wrong,)}, {"adapt": (wrong,)}):
        with pytest.raises(ValueError, match=r"\['head'\] are trained on an energy whose predictor \('body',\)"):
            algorithm(model, blocks, **where)
    with pytest.raises(ValueError, match=r"\['head'\]"):
        bf.Algorithm(model, blocks, (wrong,), parts=("body", "head"))


@pytest.mark.parametrize("name", ["n", "ids", "round", "rounds"])
def test_reserved_names_are_refused(name):
    """Names that views and uplinks use themselves."""
    with pytest.raises(ValueError, match=f"'{name}'.*reserved"):
        algorithm(mlp(2, hidden=3, outputs=2), {name: bf.Block()})


@pytest.mark.parametrize("name", ["head.mean", ""])
def test_names_with_dots_are_refused(name):
    """State is saved under names joined by dots."""
    with pytest.raises(ValueError, match=f"{name!r} must be text without dots"):
        algorithm(mlp(2, hidden=3, outputs=2), {name: bf.Block()})


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        ("server", lambda blocks, clients: {"w": torch.zeros(1)}, r"`server` has \['w'\]"),
        ("server", lambda blocks, clients: {"round": torch.zeros(1)}, r"`server` has \['round'\].*reserved"),
        ("server", lambda blocks, clients: {"a": {"b.c": torch.zeros(1)}}, r"'b\.c' must be text without dots"),
        ("server", lambda blocks, clients: {0: torch.zeros(1)}, "0 must be text"),
        ("server", lambda blocks, clients: {"heads": [torch.zeros(1)]}, r"`server` has \['heads'\], which must be tensors"),
        ("private", {"w": torch.zeros(1)}, r"`private` has \['w'\]"),
        ("private", {"n": torch.zeros(1)}, r"`private` has \['n'\]"),
        ("reports", {"w": torch.zeros(1)}, r"`reports` has \['w'\]"),
        ("reports", {"ids": 0.0}, r"`reports` has \['ids'\]"),
        ("reports", {"a.b": 0.0}, r"'a\.b' must be text without dots"),
        ("address", lambda server, ids: {"n": torch.zeros(len(ids))}, r"`address` has \['n'\]"),
    ],
)
def test_names_that_are_taken_are_refused(where, what, words):
    """What a method adds would overwrite a block, or be overwritten, without a word; a run refuses it before its first round."""

    def made() -> bf.Algorithm:
        return algorithm(mlp(4, hidden=3, outputs=2), {"w": bf.Block()}, **{where: what})

    with pytest.raises(ValueError, match=words):
        made().uplink()
    with pytest.raises(ValueError, match=words):
        bf.simulate(made(), data(), rounds=1, evaluate_every=None, progress=False)


def test_a_pattern_that_matches_nothing_is_refused():
    """With the names there are."""
    with pytest.raises(ValueError, match=r"'fc\.\*' matches no parameter.*head\.weight"):
        algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block("fc.*")})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.1),
        nn.AlphaDropout(0.1),
        nn.RReLU(),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        nn.MultiheadAttention(4, 2, dropout=0.1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_draw_are_refused(layer):
    """By name and type, with the remedy; in eval mode they draw nothing and are fine."""
    layer = copy.deepcopy(layer)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), layer))
    with pytest.raises(ValueError, match=rf"'1\.1' \({type(layer).__name__}\) draws its own randomness.*eval mode"):
        algorithm(model, {"w": bf.Block()})
    layer.eval()
    assert algorithm(model, {"w": bf.Block()}).layout("w").size >= 20


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4, affine=False), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_layers_that_count_are_refused(layer):
    """Batch norm by name, with group norm as the remedy; in eval mode its statistics are constants and it is fine."""
    layer = copy.deepcopy(layer)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(ValueError, match=rf"'1' \({type(layer).__name__}\) updates its buffers.*nn\.GroupNorm.*eval mode"):
        algorithm(model, {"w": bf.Block()})
    layer.eval()
    algorithm(model, {"w": bf.Block()})


def test_layers_that_neither_draw_nor_count_are_fine():
    """Dropout of 0, norms over single examples."""
    for layer in (nn.Dropout(0.0), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4), nn.LSTM(4, 4)):
        algorithm(nn.Sequential(nn.Linear(4, 4), layer), {"w": bf.Block()})


# Algorithm: the model


def test_the_model_is_copied():
    """Changing the original afterwards changes nothing, and training changes neither."""
    model = mlp(4, hidden=3, outputs=2)
    made = bf.algorithms.fedavg(model, epochs=1)
    start = made.init(1)["w"]["loc"].clone()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    assert made.model is not model
    assert torch.equal(made.init(1)["w"]["loc"], start)
    kept = [p.clone() for p in made.model.parameters()]
    result = bf.simulate(made, data(), rounds=1, evaluate_every=None, progress=False)
    assert not torch.equal(result.server["w"]["loc"], start)
    assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), kept, strict=True))
    assert all((p == 7.0).all() for p in model.parameters())


PATTERNS = {"split, head": "head.*", "split, body": "body.2.*", "stack, first": "0.*", "stack, middle": "2.*", "weights": "*.weight"}


def uncovered(which: str) -> tuple[nn.Module, str, list[str]]:
    """A model, a pattern over part of it, and the parameters that the pattern leaves out."""
    stack = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    model = split(stack, head="4") if which.startswith("split") else stack
    pattern = {"split, head": "head.*", "split, body": "body.2.*", "stack, first": "0.*", "stack, middle": "2.*", "weights": "*.weight"}[
        which
    ]
    return model, pattern, [name for name, _ in model.named_parameters() if name not in Layout(model, pattern).names]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("which", PATTERNS)
def test_uncovered_parameters_stay_as_they_are(which, kernel):
    """Two full-batch rounds of two steps are those of gradient descent on the covered ones alone, the others held."""
    torch.manual_seed(0)
    model, pattern, frozen = uncovered(which)
    assert frozen
    step = Descend(Energy("w", ("w",), likelihood="mean"), steps=2, optimiser=SGD(0.5))
    made = bf.Algorithm(model, {"w": bf.Block(pattern)}, (step,), parts=("w",))
    clients = data(1)
    engine = bf.Engine(kernel, workers=1)
    result = bf.simulate(made, clients, rounds=2, evaluate_every=None, engine=engine, dtype=torch.float64, progress=False)
    x, y = clients.to(dtype=torch.float64).train.client(0)
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    for _ in range(4):
        live = {name: p.requires_grad_(name not in frozen) for name, p in params.items()}
        loss = F.cross_entropy(functional_call(model.double(), live, (x,)), y)
        moving = [name for name in live if name not in frozen]
        slopes = dict(zip(moving, torch.autograd.grad(loss, [live[name] for name in moving]), strict=True))
        params = {name: p.detach() - 0.5 * slopes[name] if name in slopes else p.detach() for name, p in params.items()}
    layout = made.layout("w")
    assert_close(result.server["w"]["loc"], layout.ravel(params), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_belief_about_weights_alone_trains(kernel):
    """Draws of a layer's weights under a bias that is a point, or that no block covers: every kernel agrees with the reference."""
    prior = Normal(centre=server_mean("w"), variance=lambda given, view: torch.ones(1).to(given["w"]["loc"]))
    weights = bf.Block("head.weight", posterior=MeanField(), prior=prior, pool=PrecisionWeighted())
    for extra in ({}, {"b": bf.Block("head.bias")}):
        parts = ("w", *extra)
        step = Descend(Energy(parts, parts, likelihood="mean"), steps=2, draws=3, optimiser=SGD(0.1))
        made = bf.Algorithm(mlp(4, hidden=3, outputs=2), {"w": weights, **extra}, (step,), parts=parts)
        runs = [
            bf.simulate(made, data(2), rounds=1, evaluate_every=None, engine=bf.Engine(k, workers=1), dtype=torch.float64, progress=False)
            for k in ("reference", kernel)
        ]
        assert_close(runs[1].server, runs[0].server, rtol=1e-9, atol=1e-10)


# Algorithm: what travels


def test_init_takes_the_modules_weights():
    """In the order of its parameters, in the precision asked for; the posterior's tensors travel as the pool says."""
    model = mlp(2, hidden=3, outputs=2)
    made = algorithm(
        model,
        {
            "body": bf.Block("body.*"),
            "head": bf.Block(
                "head.*",
                posterior=MeanField(init_scale=0.2),
                prior=Normal(centre=server_mean("head"), variance=lambda given, view: torch.ones(1)),
                pool=PrecisionWeighted(),
            ),
        },
    )
    server = made.init(3, dtype=torch.float64)
    assert_close(server["body"]["loc"], torch.cat([p.detach().flatten() for p in model.body.parameters()]).double())
    assert_close(server["head"]["loc"], torch.cat([p.detach().flatten() for p in model.head.parameters()]).double())
    assert_close(server["head"]["rho"].exp().log1p(), torch.full((8,), 0.2).double(), rtol=1e-6, atol=0)
    assert {t.dtype for entry in server.values() for t in entry.values()} == {torch.float64}
    assert list(server["body"]) == ["loc"]


def test_init_draws_where_it_is_told():
    """standard_normal draws from N(0, scale^2) at an address of the seed and the block's place; equal seeds, equal bits."""
    model = mlp(30, hidden=100, outputs=2)
    blocks = {name: bf.Block("body.0.weight", start=standard_normal(2.0)) for name in ("a", "b")}
    made = algorithm(model, blocks, parts=("a",))
    first, again, other = made.init(3), made.init(5), made.init(3, seed=1)
    assert torch.equal(first["a"]["loc"], again["a"]["loc"])
    assert not torch.equal(first["a"]["loc"], other["a"]["loc"])
    assert not torch.equal(first["a"]["loc"], first["b"]["loc"])
    assert_close(made.init(1, dtype=torch.float64)["a"]["loc"], first["a"]["loc"].double(), rtol=0, atol=0)
    draws = first["a"]["loc"] / 2.0
    assert abs(float(draws.mean())) < 4 / math.sqrt(3000)
    assert abs(float(draws.var()) - 1) < 4 * math.sqrt(2 / 3000)
    own = algorithm(model, {"w": bf.Block("head.bias", start=lambda rng, size: torch.arange(float(size)))})
    assert_close(own.init(1)["w"]["loc"], torch.tensor([0.0, 1.0]))


def test_init_of_a_private_block_is_its_centre():
    """Of what never travels the server only knows where it starts."""
    prior = Normal(centre=server_mean("head"), variance=lambda given, view: torch.ones(1))
    block = bf.Block("head.*", posterior=MeanField(), prior=prior, pool=None, keep=True)
    made = algorithm(mlp(2, hidden=3, outputs=2), {"head": block})
    server = made.init(1)
    assert list(server["head"]) == ["loc"]
    assert "head" not in made.share(server, torch.arange(1))[0]
    assert set(made.rows(server)["head"]) == {"loc", "rho"}


def test_server_state_takes_the_runs_precision():
    """What `server` adds, given the blocks and the number of clients."""
    made = algorithm(mlp(2, hidden=3, outputs=2), {"w": bf.Block()}, server=lambda blocks, clients: {"share": torch.tensor(1 / clients)})
    assert_close(made.init(4, dtype=torch.float64)["share"], torch.tensor(0.25).double())


def test_counters_and_masks_stay_what_they_are():
    """Only floating state takes the run's precision, on the server and on the clients."""
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"w": bf.Block()},
        server=lambda blocks, clients: {"calls": torch.zeros(clients, dtype=torch.int64), "scale": 0.5, "open": True},
        private={"steps": torch.tensor(3), "mask": torch.tensor([True, False]), "tau": 0.1},
    )
    server = made.init(4, dtype=torch.float64)
    assert (server["calls"].dtype, server["scale"].dtype, server["open"].dtype) == (torch.int64, torch.float64, torch.bool)
    rows = made.rows(server)
    assert (rows["steps"].dtype, rows["mask"].dtype, rows["tau"].dtype) == (torch.int64, torch.bool, torch.float64)
    assert made.rows(made.init(4))["tau"].dtype == torch.float32


def test_only_what_is_named_leaves_the_server():
    """Blocks, unless they are private or addressed, and what `broadcast` names; the rest stays, however it came there."""
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"body": bf.Block("body.*"), "head": bf.Block("head.*"), "own": bf.Block("head.*", pool=None, keep=True)},
        parts=("body", "head"),
        server=lambda blocks, clients: {"heads": blocks["head"]["loc"].expand(clients, -1), "told": 1.0, "secret": 2.0},
        broadcast=("told",),
        address=lambda server, ids: {"head": {"loc": server["heads"][ids]}},
    )
    common, addressed = made.share(made.init(4) | {"by_combine": torch.tensor(3.0)}, torch.tensor([2, 0]))
    assert set(common) == {"body", "told"}
    assert {name: entry["loc"].shape for name, entry in addressed.items()} == {"head": (2, 8)}
    for broadcast, words in ((("body",), "what `server` adds to the blocks"), ("told", "must be names"), (("n",), "must be names")):
        with pytest.raises(ValueError, match=f"broadcast .*{words}"):
            replace(made, broadcast=broadcast)
    with pytest.raises(ValueError, match=r"broadcast names \['more'\], which the server does not have"):
        replace(made, broadcast=("more",)).init(4)


def test_reports_are_declared_by_their_start():
    """Tensors, numbers or functions of what is received; in the view at the start of each round, sent, and kept where `private` says so."""
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"w": bf.Block()},
        reports={"drift": lambda given: torch.zeros_like(given["w"]["loc"]), "count": torch.tensor(0), "tau": 0.5},
        private={"tau": 0.5},
    )
    declared = made.uplink(torch.float64)
    assert declared["drift"] == ((17,), torch.float64)
    assert (declared["count"], declared["tau"]) == (((), torch.int64), ((), torch.float64))
    server = made.init(3, dtype=torch.float64)
    assert set(made.rows(server)) == {"tau"}
    given = made.given(made.share(server, torch.arange(2))[0], 0, 1)
    view = made.views(given, {}, {"tau": torch.tensor([0.25, 0.5]).double()}, torch.ones(2).double())
    assert view["drift"].shape == (2, 17)
    assert view["tau"].tolist() == [0.25, 0.5]
    made.check_reported(view, view)
    with pytest.raises(ValueError, match=r"`reports` declares 'drift' as .*\(17,\).*leaves .*\(16,\)"):
        made.check_reported(view, view | {"drift": torch.zeros(2, 16).double()})
    with pytest.raises(ValueError, match=r"`reports` declares 'count' as .*leaves nothing"):
        made.check_reported(view, {name: entry for name, entry in view.items() if name != "count"})
    with pytest.raises(TypeError, match="private must be a mapping"):
        replace(made, private=lambda given: {"tau": 1.0})


@pytest.mark.parametrize("number", [3, 5])
def test_newcomers_get_nobody_elses_state(number):
    """What the server holds for each client is made anew from the blocks as they are; what it has learnt for all stays."""
    made = algorithm(
        mlp(2, hidden=3, outputs=2),
        {"body": bf.Block("body.*"), "head": bf.Block("head.*")},
        server=lambda blocks, clients: {
            "per": {"heads": blocks["head"]["loc"].expand(clients, -1), "share": torch.full((clients,), 1 / clients)},
            "learnt": torch.zeros(3),
            "rounds_done": torch.tensor(0),
        },
    )
    server = made.init(3, dtype=torch.float64)
    server["head"] = {"loc": numbers(8)}
    server["per"] = {"share": torch.tensor([0.1, 0.2, 0.7]).double(), "heads": numbers(3, 8, seed=1)}
    server |= {"learnt": numbers(3, seed=2), "rounds_done": torch.tensor(7), "added_by_combine": torch.tensor(1.0)}
    found = made.newcomers(server, number)
    assert_close(found["per"]["heads"], server["head"]["loc"].expand(number, -1))
    assert_close(found["per"]["share"], torch.full((number,), 1 / number).double(), rtol=1e-6, atol=0)
    for kept in ("body", "head", "learnt", "rounds_done", "added_by_combine"):
        assert found[kept] is server[kept]


def test_pfedvem_declares_what_it_sends():
    """The body, the head's mean and one scale; the head's widths never leave the client."""
    made = bf.algorithms.pfedvem(mlp(5, hidden=4, outputs=3))
    assert made.uplink() == {
        "body.loc": ((5 * 4 + 4,), torch.float32),
        "head.loc": ((4 * 3 + 3,), torch.float32),
        "rho2": ((), torch.float32),
    }
    assert {dtype for _, dtype in made.uplink(torch.float64).values()} == {torch.float64}
    rows = made.rows(made.init(1))
    assert set(rows) == {"head", "rho2"}
    assert set(rows["head"]) == {"loc", "rho"}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fedavg", ("w",)),
        ("ditto", ("w",)),
        ("fedper", None),
        ("fedbabu", ("body", "head")),
        ("pfedvem", ("body", "head")),
        ("local", None),
    ],
)
def test_shared_parts(name, parts):
    """The blocks of a global model, where those that the server holds make one."""
    assert getattr(bf.algorithms, name)(mlp(2, hidden=3, outputs=2)).shared_parts() == parts


def test_divergence_is_energy_minus_entropy():
    """Of a belief it is the KL divergence, for many clients at once."""
    prior = Normal(centre=server_mean("w"), variance=lambda given, view: view["v"][..., None])
    made = algorithm(nn.Linear(2, 1), {"w": bf.Block(posterior=MeanField(), prior=prior)}, likelihood=Gaussian())
    q = {"loc": numbers(4, 3), "rho": numbers(4, 3, seed=1)}
    given, view = {"w": {"loc": numbers(3, seed=2)}}, {"v": numbers(4, seed=3).exp()}
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(q["loc"], F.softplus(q["rho"])),
        torch.distributions.Normal(given["w"]["loc"], view["v"].sqrt()[:, None]),
    ).sum(-1)
    assert_close(made.divergence("w", q, given, view), expected)


def test_layers_without_a_shape():
    """A lazy layer is named, with the remedy, before anything is made of it."""
    with pytest.raises(ValueError, match=r"parameters \['weight', 'bias'\] of the model have no shape yet"):
        bf.algorithms.fedavg(nn.LazyLinear(3))
