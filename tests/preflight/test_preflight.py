"""Method, model and data are compared before training starts."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesfl as bf
from bayesfl.composition.block import Block
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Descend
from bayesfl.composition.priors import Normal, server_mean
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian
from bayesfl.optim import SGD
from bayesfl.posteriors import MeanField
from bayesfl.preflight.methods import lost

ONCE: dict[str, Any] = {"rounds": 1, "evaluate_every": None, "progress": False}


ZEROS, HALVES = torch.zeros(8, 8), [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("inputs", "outputs", "likelihood", "data", "words"),
    [
        (8, 5, Categorical(), None, r"5 outputs.* 3 classes"),
        (9, 3, Categorical(), None, r"inputs .*\(8,\) \(mat1 .*inputs=clients\.inputs"),
        (8, 3, Gaussian(), None, "Gaussian is for regression"),
        (10, 1, Categorical(), "diabetes", r"Categorical .*classification.*regression"),
        (8, 1, Bernoulli(), None, r"Bernoulli .*two classes.* 3\b"),
        (10, 3, Gaussian(), "diabetes", r"3 outputs.* 1 targets"),
        (8, 1, Bernoulli(), [0] * 8, r"Bernoulli .*two classes.* 1;.*outputs=2"),
        (
            8,
            1,
            Categorical(),
            [0, *range(50, 57)],
            r"1 outputs.* 57 classes: .*outputs=57.*task='regression'",
        ),
    ],
)
def test_model_and_data_must_fit(
    clients: FederatedData, inputs: int, outputs: int, likelihood: Any, data: Any, words: str
):
    """Outputs, inputs and likelihood are compared with the data before training starts."""
    made = bf.algorithms.fedavg(bf.models.mlp(inputs, outputs=outputs), likelihood=likelihood)
    if data == "diabetes":
        data = bf.data.diabetes(clients=3)
    elif data is not None:
        data = bf.data.from_arrays(ZEROS, data, client_ids=HALVES)
    with pytest.raises(ValueError, match=words):
        bf.simulate(made, data or clients, rounds=1)


def test_data_that_cannot_be_measured(clients: FederatedData, model: nn.Module):
    bare = bf.data.FederatedData(
        splits={"train": clients.train},
        outputs=3,
        task="classification",
        inputs=(8,),
        client_names=clients.client_names,
        source=clients.source,
        recipe={},
    )
    with pytest.raises(ValueError, match="evaluate_every=None"):
        bf.simulate(bf.algorithms.fedavg(model), bare, rounds=1)
    assert bf.simulate(bf.algorithms.fedavg(model), bare, **ONCE).round == 1


@pytest.mark.parametrize(
    ("split", "value", "words", "kind"),
    [
        ("train", -1, "x -1 to 8", torch.int64),
        *(
            (*case, kind)
            for case in (("train", 9, "x 0 to 9"), ("test", 12, "x 0 to 12"))
            for kind in (torch.int64, torch.uint8, torch.uint16)
        ),
    ],
)
def test_a_token_that_an_embedding_lacks(split, value, words, kind):
    """It is found before training in whatever row it stands, and the numbers that there are are
    named.
    """
    train, test = torch.arange(900).view(300, 3) % 9, torch.arange(90).view(30, 3) % 9
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2))
    ids = np.arange(300) % 2

    def simulate() -> None:
        data = bf.data.from_arrays(
            train.to(kind), ids, client_ids=ids, test=(test.to(kind), ids[:30], ids[:30])
        )
        bf.simulate(bf.algorithms.fedavg(model), data.transformed(lambda x: x.long()), **ONCE)

    simulate()
    {"train": train[217], "test": test[-7]}[split][1] = value
    with pytest.raises(ValueError, match=rf"embedding's rows.*{words}: build"):
        simulate()


def test_columns_that_have_embeddings_of_their_own():
    """A number that is small beside another column's is beyond the rows of its own."""

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(100, 2), nn.Embedding(5, 2)
            self.last = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.one(x[:, 0]), self.two(x[:, 1])], 1))

    ids = np.arange(300) % 2
    x = np.stack([np.arange(300) % 100, np.arange(300) % 5], 1)
    fits, beyond = (
        bf.data.from_arrays(rows, ids, client_ids=ids)
        for rows in (x, np.where((np.arange(300) == 150)[:, None], 7, x))
    )
    bf.simulate(bf.algorithms.fedavg(Columns()), fits, **ONCE)
    with pytest.raises(ValueError, match="embedding's rows"):
        bf.simulate(bf.algorithms.fedavg(Columns()), beyond, **ONCE)


class Dropping(nn.Module):
    """Dropout as a function, which no list of layers shows."""

    def __init__(self, p: float, always: bool = False) -> None:
        super().__init__()
        self.layer, self.p, self.always = nn.Linear(8, 3), p, always

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, self.p, training=self.training or self.always))


def test_classes_that_do_not_occur(model: nn.Module):
    """Next month's data without the last class: the data may be told how many there are."""
    few, told = (
        bf.data.from_arrays([torch.randn(20, 8)], [torch.arange(20) % 2], outputs=outputs)
        for outputs in (None, 3)
    )
    with pytest.raises(ValueError, match=r"3 outputs, .* 2 classes.*make the data with outputs=3"):
        bf.simulate(bf.algorithms.fedavg(model), few, **ONCE)
    assert bf.simulate(bf.algorithms.fedavg(model), told, **ONCE)


def test_one_output_for_two_classes_is_offered_the_likelihood_of_one_logit():
    for outputs, classes in ((1, 2), (1, 3), (2, 3)):
        y = torch.arange(20) % classes
        data = bf.data.from_arrays([torch.randn(20, 8)], [y])
        one = bf.algorithms.fedavg(bf.models.mlp(8, outputs=outputs))
        with pytest.raises(ValueError, match=f"has {outputs} outputs, .* {classes} cl") as error:
            bf.simulate(one, data, **ONCE)
        assert "bf.likelihoods.Bernoulli()" in str(error.value)


def test_a_forward_that_draws_outside_training_is_refused(clients):
    """Its predictions would not repeat; torch's own generator is not moved by the look at it."""
    drawing = [Dropping(rate, always=True) for rate in (0.5, 0.05)]
    still = [Dropping(0.0, always=True), Dropping(0.5), Dropping(0.5).eval()]
    before = torch.get_rng_state()
    for module in drawing:
        with pytest.raises(ValueError, match=r"Dropping .*F\.dropout\(x, p, self\.training\)"):
            bf.simulate(bf.algorithms.fedavg(module), clients, **ONCE)
    for module in still:
        assert bf.simulate(bf.algorithms.fedavg(module), clients, **ONCE).round == 1
    assert torch.equal(torch.get_rng_state(), before)


class Shaped(nn.Module):
    """Three outputs of a linear layer, in another shape or type."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(8, 3), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[:, :, None, None], r"shape \[32, 3, 1, 1\]"),
        (lambda t: t[:, None], r"shape \[32, 1, 3\]"),
        (lambda t: t[:, 0], r"shape \[32\].*squeeze"),
        (lambda t: t[:1], r"shape \[1, 3\] for 32"),
        (lambda t: t.sum(), r"shape \[\]"),
        (lambda t: t.long(), r"torch.int64"),
    ],
)
def test_outputs_of_another_shape_or_type_are_refused(
    clients: FederatedData, change: Any, words: str
):
    with pytest.raises(ValueError, match=rf"Shaped returns .*{words}"):
        bf.simulate(bf.algorithms.fedavg(Shaped(change)), clients, **ONCE)


class Focal(Categorical):
    """Another loss, with the slope of the old one."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        plain = super().nll(outputs, y)
        return (1 - (-plain).exp()).square() * plain


class Huber(Gaussian):
    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs.squeeze(-1), y, reduction="none")


@dataclass(frozen=True)
class Bent(Categorical):
    """The right loss, with a slope that is a hundredth too large."""

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses, slope = super().nll_and_slope(outputs, y)
        return losses, 1.01 * slope


class Whole(Focal):
    """Both overridden, by autograd."""

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = outputs.detach().requires_grad_()
            losses = self.nll(at, y)
            return losses.detach(), torch.autograd.grad(losses.sum(), at)[0]


class Weighted(Whole):
    """Holds weights in single precision."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        flat, labels = outputs.flatten(0, -2), y.expand(outputs.shape[:-1]).flatten()
        losses = F.cross_entropy(
            flat, labels, weight=torch.tensor([1.0, 2.0, 0.5]), reduction="none"
        )
        return losses.view(outputs.shape[:-1])


def test_a_likelihood_whose_slope_is_not_its_derivative_is_refused(model, clients: FederatedData):
    """As of a subclass that overrides one of the two: kernels use either, and would train on
    different losses.
    """
    one, numbers = bf.models.mlp((10,), outputs=1), bf.data.diabetes(clients=3)
    for network, data, likelihood in (
        (model, clients, Focal()),
        (model, clients, Bent()),
        (one, numbers, Huber(1.0)),
    ):
        with pytest.raises(ValueError, match=rf"{type(likelihood).__name__}: nll_and_slope"):
            bf.simulate(bf.algorithms.fedavg(network, likelihood=likelihood), data, **ONCE)
    found = [
        bf.simulate(
            bf.algorithms.fedavg(model, likelihood=Whole()), clients, engine=bf.Engine(k), **ONCE
        )
        for k in ("auto", "reference")
    ]
    torch.testing.assert_close(found[0].server, found[1].server)


@pytest.mark.parametrize(
    "likelihood",
    [Categorical(), Categorical(weights=(1.0, 2.0, 0.5)), Weighted()],
)
def test_right_likelihoods_pass(model, clients: FederatedData, likelihood: Any):
    """The check does not ask for more digits than one has."""
    assert (
        bf.simulate(bf.algorithms.fedavg(model, likelihood=likelihood), clients, **ONCE).round == 1
    )


class Necked(bf.models.SplitModel):
    """A layer that is in neither of the two parts."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.Linear(4, 3))
        self.neck = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.body(x)))


def test_parameters_in_no_block_are_named(clients: FederatedData):
    """They are never trained: a warning says so, unless they are frozen."""
    with pytest.warns(
        UserWarning, match=r"'neck.weight', 'neck.bias'.*2 in all.*requires_grad=False"
    ):
        bf.simulate(bf.algorithms.fedper(Necked()), clients, **ONCE)
    frozen = Necked()
    frozen.neck.requires_grad_(False)
    for silent in (bf.algorithms.fedper(frozen), bf.algorithms.fedavg(Necked())):
        assert bf.simulate(silent, clients, **ONCE).round == 1


def test_frozen_parameters_that_changed_since_are_refused(clients: FederatedData, tmp_path):
    """They share memory with the user's module: results made before would silently change. A method
    made anew is another one.
    """
    model = bf.models.mlp(8, hidden=4, outputs=3)
    model.get_submodule("body").requires_grad_(False)
    method = bf.algorithms.fedavg(model, epochs=1)
    result = bf.simulate(method, clients, **ONCE)
    one = result.client(0)
    model.load_state_dict(bf.models.mlp(8, hidden=4, outputs=3, seed=1).state_dict())
    for use in (
        lambda: bf.simulate(method, clients, **ONCE),
        result.predict,
        lambda: result.adapt(clients),
        lambda: result.save(tmp_path),
        lambda: result.client(1),
        result.model,
        lambda: one.predict(torch.zeros(1, 8)),
    ):
        with pytest.raises(ValueError, match=r"\['body.0.weight', 'body.0.bias'\].*copy\.deepcopy"):
            use()
    assert bf.simulate(bf.algorithms.fedavg(model, epochs=1), clients, **ONCE).round == 1
    apart = bf.algorithms.fedavg(copy.deepcopy(model), epochs=1)
    with torch.no_grad():
        model.get_parameter("body.0.bias").add_(1.0)
    assert bf.simulate(apart, clients, **ONCE).round == 1


def test_a_model_that_was_frozen_after_the_method_was_made_is_refused(clients: FederatedData):
    """The method trains a copy, in which nothing is frozen; weights that have changed since are
    warned of.
    """
    model = bf.models.mlp(8, hidden=4, outputs=3)
    method = bf.algorithms.fedavg(model, epochs=1)
    model.load_state_dict(bf.models.mlp(8, hidden=4, outputs=3, seed=1).state_dict())
    with pytest.warns(UserWarning, match=r"\['body.0.weight'.*make the method anew"):
        bf.simulate(method, clients, **ONCE)
    model.get_submodule("body").requires_grad_(False)
    with pytest.raises(ValueError, match=r"\['body.0'\].*frozen or unfrozen"):
        bf.simulate(method, clients, **ONCE)


def test_a_frozen_embedding_with_max_norm_is_left_alone():
    """Torch rescales its rows whenever they are read: those of a copy."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.table(x.long()).mean(1))

    model = Reader()
    model.table.requires_grad_(False)
    before = model.table.weight.clone()
    data = bf.data.from_arrays(
        torch.randint(0, 20, (40, 5)), torch.arange(40) % 2, client_ids=[0, 1] * 20
    )
    bf.simulate(bf.algorithms.fedavg(model, epochs=1), data, rounds=2, progress=False).predict()
    assert torch.equal(model.table.weight, before)


class Around(nn.Module):
    """A layer, and something around it."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.before = before or (lambda x: x)
        self.after = after or (lambda x: x)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: Around(before=lambda x: x.clamp_(-0.1, 0.1)), r"Around .*in place.*x\.clone\(\)"),
        (lambda: Around(before=lambda x: x.div_(2.0)), r"Around .*in place.*x\.clone\(\)"),
        (lambda: Around(after=lambda x: x - x.mean(0)), r"Around .*mixes the rows.*GroupNorm"),
        (lambda: Around(after=lambda x: x - x[:1]), r"Around .*mixes the rows.*GroupNorm"),
        (lambda: Around(after=lambda x: x.cumsum(0)), r"Around .*mixes the rows.*GroupNorm"),
        (
            lambda: Around(after=lambda x: F.batch_norm(x, None, None, training=True)),
            r"Around .*mixes the rows.*GroupNorm",
        ),
        (
            lambda: Around(after=lambda x: x if torch.rand(()) < 0.999 else x * 0),
            r"Around .*draws random numbers",
        ),
        (lambda: Around(after=Counting()), r"Around .*buffers .*'after\.calls'.*self\.training"),
    ],
)
def test_what_a_forward_may_not_do_is_refused(clients: FederatedData, model: Any, words: str):
    """It would write into everybody's data, depend on padding, or could not be repeated; nothing is
    left changed by the look at it.
    """
    torch.manual_seed(0)
    made, before = model(), clients.train.x.clone()
    method, generator = bf.algorithms.fedavg(made), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            bf.simulate(method, clients, **ONCE)
    assert torch.equal(clients.train.x, before)
    assert torch.equal(torch.get_rng_state(), generator)


class Averaged(Categorical):
    """A loss as torch reduces it by default."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y)

    def nll_and_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.nll(outputs, y), (outputs.softmax(-1) - F.one_hot(y, outputs.shape[-1])) / len(
            y
        )


def test_a_loss_for_each_example(model: nn.Module, clients: FederatedData):
    """A mean over the batch would be divided once more, by some kernels."""
    with pytest.raises(
        ValueError, match=r"Averaged: nll returns shape \[\].*\[32, 3\].*reduction='none'"
    ):
        bf.simulate(bf.algorithms.fedavg(model, likelihood=Averaged()), clients, **ONCE)


def test_what_is_learnt_in_vain_is_warned_of(model: nn.Module, clients: FederatedData):
    """Widths that are not sent, blocks that nobody keeps, methods without phases; what is kept or
    sent is silent.
    """
    prior = Normal(
        centre=server_mean("w"), variance=lambda given, view: torch.ones_like(view["n"])[..., None]
    )
    step = (Descend(Energy("w", ("w",), likelihood="sum"), optimiser=SGD(1e-3)),)

    def method(**options: Any) -> bf.Algorithm:
        return bf.Algorithm(model, {"w": Block(**options)}, step, parts=("w",))

    belief: dict[str, Any] = {"posterior": MeanField(), "prior": prior}
    for vain, words in (
        (method(**belief), r"block 'w' .*\['rho'\].*keep=True.*sends=\('loc', 'rho'\)"),
        (method(pool=None), r"block 'w' .*\['loc'\].*keep=True"),
        (bf.Algorithm(model, {"w": Block()}, (), parts=("w",)), "no phases"),
    ):
        with pytest.warns(UserWarning, match=words):
            bf.simulate(vain, clients, **ONCE)
    for silent in (
        method(keep=True, **belief),
        method(pool=bf.pools.Mean(sends=("loc", "rho")), **belief),
        method(pool=None, keep=True),
    ):
        bf.simulate(silent, clients, **ONCE)
    assert not lost(bf.with_heads(bf.algorithms.fedavg(model)))  # clients' answers fit it


class Squeezed(nn.Module):
    """A probability, as for a binary cross-entropy of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x).unsqueeze(-1)).squeeze(-1)


class Special(Squeezed):
    """The same by torch.special."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.softmax(self.linear(x), -1)


def test_a_network_that_ends_in_probabilities_is_told_of(clients: FederatedData):
    """Once, before a run, also behind a change of shape; log probabilities are logits, and a
    sigmoid may stand before the end.
    """
    body = nn.Linear(8, 3)
    for model in (nn.Sequential(body, nn.Softmax(-1)), Squeezed(), Special()):
        with pytest.warns(UserWarning, match=r"ends in a softmax or a sigmoid, and Categorical"):
            bf.simulate(bf.algorithms.fedavg(model, epochs=1), clients, **ONCE)
    for last in (nn.LogSoftmax(-1), nn.SiLU()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bf.simulate(bf.algorithms.fedavg(nn.Sequential(body, last), epochs=1), clients, **ONCE)
