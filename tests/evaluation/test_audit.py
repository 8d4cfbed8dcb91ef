"""Audits: counts, sums and intervals of units against loops over examples, and that intervals hold
together.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesfl.base.surveys import conduct, together
from bayesfl.evaluation import plots
from bayesfl.evaluation.audit import BINS, Audit, Counting, grouped
from bayesfl.evaluation.binomial import clopper_pearson, worst_by_chance
from bayesfl.evaluation.metrics import ece
from bayesfl.evaluation.predictions import Predictions
from bayesfl.evaluation.surveys import LocalPredictions, Outputs
from bayesfl.likelihoods import Quantiles

MASK = torch.arange(30) < torch.tensor([30, 12, 25])[:, None]
CLASSES = Outputs("classification", 4)


def of_classes(names: int = 4) -> Predictions:
    """Probabilities, labels and sets of three clients; what pads is NaN."""
    rng = torch.Generator().manual_seed(0)
    probs = torch.rand(3, 30, names, generator=rng).mul(3).softmax(-1).double()
    labels = torch.where(
        torch.rand(3, 30, generator=rng) < 0.5,
        probs.argmax(-1),
        torch.randint(names, (3, 30), generator=rng),
    )
    sets = (probs > 0.2) & MASK[..., None]
    probs = torch.where(MASK[..., None], probs, torch.nan)
    return Predictions(
        mask=MASK,
        epistemic=torch.full((3, 30), torch.nan),
        probs=probs,
        labels=labels,
        sets=sets,
        level=0.8,
    )


def audited(
    survey: Counting, given: Predictions, outputs: Outputs = CLASSES, delta: float = 0.05
) -> Audit:
    state = conduct(survey, together(survey, local(given)), outputs)
    return survey.audit(state, level=given.promise, risk=given.risk, delta=delta)


def local(given: Predictions) -> LocalPredictions:
    return LocalPredictions(*given.rows(), np.arange(3))


def rows_of(unit: Tensor, u: int) -> list[tuple[int, int]]:
    return [(j, i) for j in range(3) for i in range(30) if MASK[j, i] and int(unit[j, i]) == u]


@pytest.mark.parametrize("by", ["client", "label", "group"])
def test_units_are_those_of_a_loop(by: str):
    """Rows, held, right, size, and the calibration error of a unit's rows as one client."""
    given = of_classes()
    groups = torch.randint(-1, 2, (3, 30), generator=torch.Generator().manual_seed(1))
    unit = {
        "client": torch.arange(3)[:, None].expand(3, 30),
        "label": given.labels,
        "group": groups,
    }[by]
    names = {"client": ("a", "b", "c"), "label": ("0", "1", "2", "3"), "group": ("old", "young")}[
        by
    ]
    found = audited(Counting(by, names, groups=groups[MASK] if by == "group" else None), given)
    for u in range(len(names)):
        rows = rows_of(unit, u)
        probs, labels, sets, mask = (
            torch.stack([t[j, i] for j, i in rows])
            for t in (given.probs, given.labels, given.sets, MASK)
        )
        assert found.rows[u] == len(rows) > 0
        assert found.held[u] == sum(bool(s[y]) for s, y in zip(sets, labels, strict=True))
        assert found.right[u] == int((probs.argmax(-1) == labels).sum())
        assert found.size[u] == pytest.approx(float(sets.sum(-1).double().mean()))
        if by != "label":
            alone = float(ece(probs[None], labels[None], mask[None], bins=BINS))
            assert found.ece[u] == pytest.approx(alone, abs=1e-12)
    assert (found.ece is None) == (by == "label")


def test_the_calibration_error_is_that_of_the_diagrams():
    """Of each client, of all rows together and the clients' mean, by the same names and digits."""
    given = of_classes()
    found = audited(Counting("client", ("a", "b", "c")), given)
    of = (given.probs, given.labels, MASK)
    drawn = plots.reliability(*of).axes[0].texts[0].get_text().split("\n")
    drawn[0] = drawn[0].partition(", n = ")[0]
    assert drawn[:2] == [
        f"ECE, pooled {found.pooled_ece:.3f}",
        f"ECE, clients' mean {found.ece.mean():.3f}",
    ]
    assert f"\n{drawn[0]}; {drawn[1]}.\n" in str(found) + "\n"
    for u, ax in enumerate(plots.reliability(*of, by="client").axes[::2]):
        number = ax.texts[0].get_text().removeprefix("ECE ").partition(", n = ")[0]
        assert number == f"{found.ece[u]:.3f}"
        assert str(found).split("\n")[2 + u].split()[-1] == number
    alone = audited(Counting("group", ("all",), groups=torch.zeros(67).long()), given)
    assert alone.ece[0] == alone.pooled_ece == pytest.approx(found.pooled_ece, abs=1e-12)
    assert "ECE" not in str(alone)
    assert audited(Counting("label", ("0", "1", "2", "3")), given).pooled_ece is None


def test_intervals_are_shared_among_units():
    """Each at delta / G; units without rows take no share, and have NaN."""
    given = of_classes()
    found = audited(Counting("client", ("a", "b", "c", "nobody")), given, delta=0.1)
    np.testing.assert_array_equal(
        found.intervals(found.held), clopper_pearson(found.held, found.rows, 0.1 / 3)
    )
    columns = found.columns()
    assert columns["client"].tolist() == ["a", "b", "c", "nobody"]
    assert np.isnan(columns["coverage"][3])
    np.testing.assert_array_equal(columns["coverage_low"], found.intervals(found.held)[:, 0])
    assert found.worst_by_chance == worst_by_chance(found.rows, 0.8)
    for words in (
        "nobody     0",
        "All intervals of a column hold together with probability 0.9.",
        f"the lowest observed coverage would average {found.worst_by_chance:.2f}.",
    ):
        assert words in str(found)


def test_who_is_below_nominal_coverage():
    found = Audit("client", ("a", "b"), np.array([200, 200]), 0.9, 0.05, held=np.array([184, 150]))
    assert found.below == ("b",)
    assert "Nominal coverage 0.9. With exact coverage" in str(found)
    assert "Significantly below it: b." in str(found)
    assert "left out" not in str(found)
    one = {"units": ("a",), "rows": np.array([200]), "held": np.array([184])}
    assert "1 clients" not in str(dataclasses.replace(found, **one))
    # .85 of 200 is not beyond chance, among two.
    assert dataclasses.replace(found, held=np.array([170, 184])).below == ()
    assert repr(found) == str(found)


def test_labels_of_an_example_are_places():
    """T labels: each known one counts, also by label; -100 does not."""
    rng = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    probs = torch.rand(3, 2, 3, 2, generator=rng).softmax(-1).double()
    labels = torch.randint(-1, 2, (3, 2, 3), generator=rng)
    labels = labels.masked_fill(labels < 0, -100)
    sets = probs > 0.45
    given = Predictions(
        mask=mask,
        epistemic=torch.full((3, 2, 3), torch.nan),
        probs=probs,
        labels=labels,
        sets=sets,
        level=0.9,
    )
    found = audited(Counting("label", ("no", "yes")), given, Outputs("classification", 2))
    places = [
        (j, i, t)
        for j in range(3)
        for i in range(2)
        for t in range(3)
        if mask[j, i] and labels[j, i, t] >= 0
    ]
    for c in range(2):
        own = [place for place in places if labels[place] == c]
        assert found.rows[c] == len(own) > 0
        assert found.held[c] == sum(bool(sets[place][c]) for place in own)
    groups = torch.tensor([[0, 1], [1, -1], [0, -1]])
    by_group = audited(
        Counting("group", ("a", "b"), groups=groups[mask]), given, Outputs("classification", 2)
    )
    assert by_group.examples == len({(j, i) for j, i, _ in places if groups[j, i] >= 0})
    assert "Rows are labels, several of an example" in str(by_group)
    assert by_group.left_out == sum(groups[j, i] < 0 for j, i, _ in places) > 0
    assert f"{by_group.left_out} rows of no group are left out." in str(by_group)
    assert by_group.rows.tolist() == [
        sum(int(groups[j, i]) == g for j, i, _ in places) for g in range(2)
    ]


def test_numbers_have_widths():
    """An interval without end makes its unit's width infinite; errors are of means."""
    rng = torch.Generator().manual_seed(0)
    mean = torch.rand(3, 30, 2, generator=rng).double()
    y = torch.rand(3, 30, 2, generator=rng).double()
    lower, upper = mean - 0.4, mean + 0.4
    upper[1, 0] = torch.inf
    given = Predictions(
        mask=MASK,
        epistemic=torch.full((3, 30), torch.nan),
        mean=mean,
        variance=torch.ones_like(mean),
        lower=lower,
        upper=upper,
        labels=y,
        level=0.9,
    )
    found = audited(Counting("client", ("a", "b", "c")), given, Outputs("regression", 2))
    inside = ((lower <= y) & (y <= upper)).all(-1) & MASK
    assert found.held.tolist() == inside.sum(1).tolist()
    for j, own in enumerate(MASK):
        assert found.rmse[j] == pytest.approx(float((mean[j] - y[j])[own].square().mean().sqrt()))
    assert found.size.tolist() == pytest.approx([0.8, np.inf, 0.8])
    assert found.accuracy is None
    assert list(found.columns()) == [
        "client",
        "rows",
        "coverage",
        "coverage_low",
        "coverage_high",
        "width",
        "rmse",
    ]
    with pytest.raises(ValueError, match="by='label' audits each class"):
        audited(Counting("label", ("a",)), given, Outputs("regression", 2))


def test_without_sets_there_is_no_nominal_coverage():
    given = dataclasses.replace(of_classes(), sets=None, level=None)
    found = audited(Counting("client", ("a", "b", "c")), given)
    assert (found.coverage, found.below) == (None, ())
    assert np.isnan(found.worst_by_chance)
    assert not any(word in str(found) for word in ("coverage", "Nominal"))


def test_groups_have_names():
    names, places = grouped([["old", "young"], [], ["young"]], np.array([2, 0, 1]))
    assert names == ("old", "young")
    assert places.tolist() == [0, 1, 1]
    assert grouped([[True, False]], np.array([2]))[0] == ("False", "True")
    with pytest.raises(ValueError, match="groups must have a list for each of 3 clients"):
        grouped([[]], np.array([2, 0, 1]))
    with pytest.raises(ValueError, match=r"\[1, 2\]; got arrays of shape \[\[1\], \[1\]\]"):
        grouped([["a"], ["b"]], np.array([1, 2]))


def test_answers_are_counted_among_themselves():
    """The share that is answered is of all rows, the share that is right of the answers, with its
    interval of so many.
    """
    given = of_classes()
    answered = (given.probs.amax(-1) > 0.45) & MASK
    answered[1] = False
    found = audited(
        Counting("client", ("a", "b", "c")), dataclasses.replace(given, answered=answered, risk=0.3)
    )
    right = (given.probs.argmax(-1) == given.labels) & answered
    assert found.answered.tolist() == [int(answered[j].sum()) for j in range(3)]
    assert found.answered_right.tolist() == [int(right[j].sum()) for j in range(3)]
    assert 0 < found.answered_right[0] < found.answered[0]
    columns = found.columns()
    np.testing.assert_array_equal(
        columns["answered_low"], clopper_pearson(found.answered, found.rows, 0.05 / 3)[:, 0]
    )
    np.testing.assert_array_equal(
        columns["answered_accuracy_high"],
        clopper_pearson(found.answered_right, found.answered, 0.05 / 2)[:, 1],
    )
    assert np.isnan(columns["answered_accuracy"][1])
    wrong, answers = int(answered.sum() - right.sum()), int(answered.sum())
    low, high = clopper_pearson(np.array(wrong), np.array(answers), 0.05)
    line = (
        f"Wrong among all {answers} answers: {wrong / answers:.2f}, {low:.2f} to {high:.2f} with "
        "probability 0.95; nominal: at most 0.3."
    )
    assert line in str(found)
    assert "answered" not in str(audited(Counting("client", ("a", "b", "c")), given))


def test_quantiles_promise_their_own_level():
    """Intervals of a likelihood are audited without a step; ends that hold the truth are
    counted.
    """
    lower, upper = torch.zeros(3, 30, 1), torch.ones(3, 30, 1)
    y = torch.linspace(-0.5, 1.5, 30).expand(3, 30)[..., None]
    given = Predictions(
        MASK,
        torch.full((3, 30), torch.nan),
        mean=lower + 0.5,
        lower=lower,
        upper=upper,
        labels=y,
        likelihood=Quantiles(0.8),
    )
    survey = Counting("client", ("a", "b", "c"))
    found = audited(survey, given, Outputs("regression", 1))
    assert found.level == 0.8
    assert found.held.tolist() == [
        int(((y[j, :n] >= 0) & (y[j, :n] <= 1)).sum()) for j, n in enumerate((30, 12, 25))
    ]
    two: dict[str, Tensor] = {
        name: getattr(given, name).repeat(1, 1, 2) for name in ("mean", "lower", "upper", "labels")
    }
    several = audited(survey, dataclasses.replace(given, **two), Outputs("regression", 2))
    assert several.held is None  # they promise each target, not all together
