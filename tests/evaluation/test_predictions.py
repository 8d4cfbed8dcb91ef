"""Predictions of many clients, padded and put together."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayesfl.data import ClientData
from bayesfl.evaluation.collecting import Collector
from bayesfl.evaluation.predictions import (
    MEASURES,
    Predictions,
    measured,
    measures_of,
)
from bayesfl.likelihoods import Categorical, Gaussian, Poisson, Quantiles


def split(*counts: int) -> ClientData:
    """Clients of so many examples."""
    rows = sum(counts)
    return ClientData(
        torch.zeros(rows, 2), torch.arange(rows) % 3, torch.arange(rows), np.array(counts)
    )


def test_a_client_alone_has_no_padding():
    """And what is None stays None."""
    probs, mask = torch.rand(2, 3, 4), torch.tensor([[True, False, True], [True, True, True]])
    alone = Predictions(mask=mask, epistemic=torch.rand(2, 3), probs=probs).client(0)
    assert torch.equal(alone.probs, probs[0, [0, 2]])
    assert bool(alone.mask.all())
    assert alone.mean is alone.variance is None


def test_a_client_is_found_by_name_or_number():
    """As `Result.client` finds it; without names by numbers alone. One client's own predictions
    have no clients.
    """
    probs, mask = torch.rand(3, 2, 4), torch.ones(3, 2, dtype=torch.bool)
    found = Predictions(
        mask=mask, epistemic=torch.rand(3, 2), probs=probs, names=("Bern", "Basel", "1")
    )
    assert "Bern" not in repr(found)
    for client, j in {"Basel": 1, 0: 0, np.int64(2): 2, "1": 2}.items():
        assert torch.equal(found.client(client).probs, probs[j])  # type: ignore[arg-type]
    unnamed = Predictions(mask=mask, epistemic=torch.rand(3, 2), probs=probs)
    assert torch.equal(unnamed.client(1).probs, probs[1])
    for one, client, words in (
        (found, "Bsel", r"client 'Bsel'.*'Basel'"),
        (found, 3, r"0 to 2, got 3"),
        (found, 1, r"client 1 is ambiguous"),
        (unnamed, "Basel", r"client 'Basel'"),
        (unnamed, -1, r"0 to 2, got -1"),
        (found.client("Bern"), 0, r"client 0.*of one client alone"),
    ):
        with pytest.raises(ValueError, match=words):
            one.client(client)  # type: ignore[arg-type]


def test_what_more_data_would_leave():
    """The entropy, or the variance over all targets, less the epistemic part; NaN at the
    plug-in.
    """
    mask = torch.tensor([[True, True]])
    probs = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    found = Predictions(mask=mask, epistemic=torch.tensor([[0.2, 0.0]]), probs=probs)
    assert_close(found.aleatoric, torch.tensor([[math.log(2) - 0.2, 0.0]]))
    variance = torch.tensor([[[0.5, 0.25], [1.0, 2.0]]])
    found = Predictions(
        mask=mask,
        epistemic=torch.tensor([[0.25, math.nan]]),
        mean=torch.zeros(1, 2, 2),
        variance=variance,
    )
    assert_close(found.aleatoric, torch.tensor([[0.5, math.nan]]), equal_nan=True)


def test_what_is_printed_is_short():
    """Clients, rows and shapes; whether there are draws; no tensor."""
    mask = torch.arange(4) < torch.tensor([[2], [4]])
    drawn = Predictions(mask, torch.zeros(2, 4), probs=torch.full((2, 4, 3), 1 / 3))
    shown = "Predictions(2 clients of 2 to 4 examples; epistemic [2, 4], probs [2, 4, 3]"
    assert repr(drawn) == f"{shown})"
    assert repr(drawn.client(1)).startswith("Predictions(4 examples; ")
    plain = Predictions(mask, torch.full((2, 4), torch.nan), probs=torch.full((2, 4, 3), 1 / 3))
    assert repr(plain) == "Predictions(2 clients of 2 to 4 examples; probs [2, 4, 3])"


def test_measures_are_of_the_split_that_was_predicted():
    """Another number of clients or examples, or other labels, would make numbers without a meaning;
    clients without rows are left out.
    """
    own = split(2, 3, 1)
    collector = Collector(own)
    collector.add(
        np.array([0, 1]),
        {"probs": (probs := torch.full((2, 3, 3), 1 / 3)), "epistemic": probs[..., 0]},
    )
    found = collector.found().padded()
    assert found.summary(own)["nll"] == pytest.approx(math.log(3))
    assert "labels" not in repr(found)
    relabelled = ClientData(own.x, own.y.flip(0), own.index, own.counts)
    for predicted, other in (
        (found, split(2, 3)),
        (found, split(2, 4, 1)),
        (found, relabelled),
        (found.client(0), own),
    ):
        with pytest.raises(ValueError, match=r"^split, .*not the one .*summary\(clients\.test\)"):
            predicted.summary(other)


def test_targets_may_have_another_precision():
    """A run in float32 predicts targets that were rounded to it."""
    rows = torch.arange(3)
    own = ClientData(
        torch.zeros(3, 1),
        torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
        rows,
        np.array([1, 2]),
    )
    collector = Collector(own.to(dtype=torch.float32))
    zeros = torch.zeros(2, 2, 1)
    collector.add(
        np.array([0, 1]), {"mean": zeros, "variance": zeros + 1, "epistemic": zeros[..., 0]}
    )
    assert collector.found().padded().summary(own)["rmse"] == pytest.approx(
        (0.1 + math.sqrt((0.04 + 0.09) / 2)) / 2
    )


def test_each_label_is_measured_as_an_example():
    """Those that are not known and padding are left out, in summaries and in tables."""
    probs = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    y = torch.arange(20).view(5, 4) % 5
    y[1, 2:] = -100
    data = ClientData(torch.zeros(5, 2), y, torch.arange(5), np.array([3, 2]))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = Predictions(mask, probs[..., 0], probs=probs, names=("Bern", "Chur"))
    table = measured(*found.of_split(data)).table()
    assert table["examples"].tolist() == [10, 8]
    right = probs.argmax(-1) == torch.stack([y[:3], torch.cat([y[3:], y[:1]])])
    assert table["accuracy"].tolist() == pytest.approx(
        [float(right[0][y[:3] >= 0].double().mean()), float(right[1, :2].double().mean())]
    )
    assert found.summary(data)["accuracy"] == pytest.approx(table["accuracy"].mean())


def test_numbers_are_measured_under_the_likelihood():
    """Counts under theirs, intervals under their level, others as normal ones; a client alone keeps
    it.
    """
    y = torch.tensor([0.0, 2.0, 5.0])
    data = ClientData(torch.zeros(3, 2), y, torch.arange(3), np.array([3]))
    mask = torch.ones(1, 3).bool()
    mean = torch.full((1, 3, 1), 2.0)
    epistemic = torch.zeros(1, 3)
    for likelihood, wanted in (
        (Poisson(), torch.distributions.Poisson(2.0)),
        (Gaussian(), torch.distributions.Normal(2.0, math.sqrt(2.0))),
    ):
        found = Predictions(mask, epistemic, mean=mean, variance=mean, likelihood=likelihood)
        nll = -float(wanted.log_prob(y).mean())
        assert found.summary(data)["nll"] == pytest.approx(nll, abs=1e-6)
        assert found.client(0).likelihood is likelihood
        assert measured(*found.of_split(data)).table()["client"].tolist() == [0]
    ends = Predictions(
        mask, epistemic, mean=mean, lower=mean - 1, upper=mean + 1, likelihood=Quantiles(0.5)
    )
    assert ends.summary(data)["interval_score"] == pytest.approx((2 + 4 * 1 + 2 + 2 + 4 * 2) / 3)
    assert bool(ends.aleatoric.isnan().all())


def test_the_measures_of_clients_are_known_beforehand():
    """By the likelihood; of a client that was not predicted each is NaN."""
    mask = torch.tensor([[True, True], [False, False]])
    epistemic, ends = torch.zeros(2, 2), torch.zeros(2, 2, 1)
    for likelihood, kind, tensors in (
        (Categorical(), "classes", {"probs": torch.full((2, 2, 3), 1 / 3)}),
        (Gaussian(), "numbers", {"mean": ends, "variance": ends + 1}),
        (Poisson(), "numbers", {"mean": ends + 1, "variance": ends + 1}),
        (Quantiles(), "intervals", {"mean": ends, "lower": ends - 1, "upper": ends + 1}),
    ):
        found = Predictions(mask, epistemic, likelihood=likelihood, **tensors)
        labels = torch.arange(4) if kind == "classes" else torch.arange(4.0)
        data = ClientData(torch.zeros(4, 2), labels % 3, torch.arange(4), np.array([2, 2]))
        columns = measured(*found.of_split(data)).table()
        assert tuple(columns) == ("client", "examples", *MEASURES[kind])
        assert measures_of(likelihood) == MEASURES[kind]
        assert columns["examples"].tolist() == [2, 0]
        assert all(np.isnan(columns[name][1]) for name in MEASURES[kind])


def test_places_take_sets_and_answers_along():
    """Each label of an example becomes an example, with its own set and whether it is answered."""
    rng = torch.Generator().manual_seed(0)
    probs = torch.rand(2, 3, 4, 5, generator=rng).softmax(-1)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    labels = torch.randint(5, (2, 3, 4), generator=rng)
    sets, answered = probs > 0.2, probs.amax(-1) > 0.25
    found = Predictions(
        mask,
        torch.zeros(2, 3, 4),
        probs=probs,
        labels=labels,
        sets=sets,
        answered=answered,
        level=0.9,
    ).places()
    assert torch.equal(found.sets[found.mask], sets[mask].flatten(0, 1))
    assert torch.equal(found.answered[found.mask], answered[mask].flatten())
    assert found.mask.tolist() == [[True] * 8 + [False] * 4, [True] * 12]
