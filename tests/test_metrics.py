"""Measures against hand-made numbers, against other packages, and against what must not matter: padding, order, device of origin."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesfl.evaluation import metrics

torch.set_num_threads(1)

CLASSIFICATION = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ece": metrics.ece,
    "mce": metrics.mce,
    "macro_f1": metrics.macro_f1,
    "auroc": metrics.auroc,
}


def federation(clients: int = 5, rows: int = 60, outputs: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random predictions that know something, of clients of different sizes; padded rows are NaN with label -1."""
    rng = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(clients, rows, outputs, generator=rng, dtype=torch.float64)
    probs = logits.softmax(-1)
    labels = torch.multinomial((0.7 * logits).softmax(-1).flatten(0, 1), 1, generator=rng).view(clients, rows)
    mask = torch.arange(rows) < torch.linspace(rows // 3, rows, clients).long()[:, None]
    return probs.masked_fill(~mask[..., None], math.nan), labels.masked_fill(~mask, -1), mask


def each(probs: Tensor, labels: Tensor, mask: Tensor):
    """Predictions and labels of each client, without padding."""
    return [(p[m], y[m]) for p, y, m in zip(probs, labels, mask, strict=True)]


def one(rows: list[list[float]], labels: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """A federation of one client without padding."""
    return torch.tensor([rows]), torch.tensor([labels]), torch.ones(1, len(labels), dtype=torch.bool)


# By hand


def test_hand_made_numbers():
    """Four examples of three classes: right, right, wrong, wrong."""
    case = one([[0.7, 0.2, 0.1], [0.2, 0.6, 0.2], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [0, 1, 1, 0])
    assert_close(metrics.accuracy(*case).item(), 0.5)
    assert_close(metrics.nll(*case).item(), -np.log([0.7, 0.6, 0.25, 0.1]).mean(), atol=1e-6, rtol=0)
    squares = [0.3**2 + 0.2**2 + 0.1**2, 0.2**2 + 0.4**2 + 0.2**2, 0.5**2 + 0.75**2 + 0.25**2, 0.9**2 + 0.1**2 + 0.8**2]
    assert_close(metrics.brier(*case).item(), float(np.mean(squares)), atol=1e-6, rtol=0)
    # class 0: one right, predicted twice, true twice; class 1: one right, predicted once, true twice; class 2: predicted once, never true
    assert_close(metrics.macro_f1(*case).item(), (2 / 4 + 2 / 3 + 0) / 3)
    # class 0: positives .7, .1 against .2, .5: 2 pairs of 4 won. class 1: .6, .25 against .2, .1: 4 of 4. class 2 has no positives.
    assert_close(metrics.auroc(*case).item(), (2 / 4 + 4 / 4) / 2)


def test_calibration_by_hand():
    """Two bins: [.3, .5] holds .4 (wrong); (.5, 1] holds .6 (right), .8 (right), .9 (wrong)."""
    case = one([[0.4, 0.3, 0.3], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.05, 0.05, 0.9]], [1, 0, 1, 0])
    low, high = 0.4, abs(2 / 3 - 2.3 / 3)
    assert_close(metrics.ece(*case, bins=2).item(), (low + 3 * high) / 4, atol=1e-6, rtol=0)
    assert_close(metrics.ece(*case, bins=2, norm="l2").item(), math.sqrt((low**2 + 3 * high**2) / 4), atol=1e-6, rtol=0)
    assert_close(metrics.mce(*case, bins=2).item(), low, atol=1e-6, rtol=0)
    assert_close(metrics.ece(*case, bins=1).item(), abs(2 / 4 - 2.7 / 4), atol=1e-6, rtol=0)


def test_bins_are_closed_on_the_right():
    """With four bins, confidence .5 belongs to (.25, .5], .75 to (.5, .75], and 1 to the last."""
    bins = metrics.reliability_bins(*one([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [0.76, 0.24]], [0, 0, 1, 0]), bins=4)
    assert bins.count.tolist() == [0, 1, 1, 2]
    np.testing.assert_allclose(bins.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(bins.accuracy, [math.nan, 1, 1, 0.5])
    np.testing.assert_allclose(bins.confidence, [math.nan, 0.5, 0.75, 0.88], rtol=1e-6)
    assert metrics.reliability_bins(*one([[0.0, 0.0]], [0]), bins=4).count.tolist() == [1, 0, 0, 0]


def test_perfect_and_worst():
    """Certain and right, then certain and wrong; the surprise of the latter is large and finite."""
    probs, labels = torch.eye(3)[None], torch.arange(3)[None]
    mask = torch.ones_like(labels, dtype=torch.bool)
    expected = {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0, "mce": 0, "macro_f1": 1, "auroc": 1}
    assert {name: measure(probs, labels, mask).item() for name, measure in CLASSIFICATION.items()} == expected
    wrong = labels.roll(1, -1)
    expected = {"accuracy": 0, "nll": -math.log(torch.finfo(torch.float64).tiny), "brier": 2, "ece": 1, "mce": 1, "macro_f1": 0}
    assert {name: CLASSIFICATION[name](probs, wrong, mask).item() for name in expected} == pytest.approx(expected)
    binary = one([[1.0, 0.0], [0.0, 1.0]], [1, 0])
    assert metrics.auroc(*binary).item() == 0


def test_auroc_ties_count_half_and_may_be_undefined():
    """All scores equal is a coin's AUROC; with one class there is none."""
    level = [[0.5, 0.5]] * 4
    assert metrics.auroc(*one(level, [0, 1, 1, 0])).item() == 0.5
    assert metrics.auroc(*one([[0.8, 0.2], [0.5, 0.5], [0.5, 0.5]], [0, 0, 1])).item() == 0.75
    assert metrics.auroc(*one(level, [1, 1, 1, 1])).isnan().all()


# Against other packages


@pytest.fixture(scope="module")
def calibration_error():
    """torchmetrics' function; beside a torch without CUDA its import of torchvision may need two operators to be declared first."""
    libraries = []
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchmetrics.functional.classification")
    yield module.multiclass_calibration_error
    del libraries


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_calibration_agrees_with_torchmetrics(calibration_error, norm, bins):
    """On confidences away from the edges of bins, where its bins are closed on the other side."""
    rng = torch.Generator().manual_seed(bins)
    confidence = (torch.randint(7, 15, (3, 200), generator=rng) + 0.1 + 0.8 * torch.rand(3, 200, generator=rng)) / 15
    probs = torch.stack([confidence, (1 - confidence) * 0.6, (1 - confidence) * 0.4], -1)
    turn = torch.randint(3, (3, 200), generator=rng)
    probs = probs.gather(-1, (torch.arange(3) + turn[..., None]) % 3)
    labels, mask = torch.randint(3, (3, 200), generator=rng), torch.rand(3, 200, generator=rng) < 0.8
    ours = metrics.ece(probs, labels, mask, bins=bins, norm=norm)
    theirs = [calibration_error(p, y, num_classes=3, n_bins=bins, norm=norm) for p, y in each(probs, labels, mask)]
    assert_close(ours, torch.stack(theirs).double(), atol=2e-6, rtol=0)
    assert_close(metrics.mce(probs, labels, mask, bins=bins), metrics.ece(probs, labels, mask, bins=bins, norm="max"))


@pytest.mark.parametrize("outputs", [2, 4])
def test_scores_agree_with_sklearn(outputs):
    """AUROC (ties included), F1, accuracy, log loss and Brier score of each client."""
    sklearn = pytest.importorskip("sklearn.metrics")
    probs, labels, mask = federation(outputs=outputs)
    probs = (probs * 20).round() / 20  # ties
    case = probs, labels, mask
    clients = [(p.numpy(), y.numpy()) for p, y in each(*case)]

    def area(p: np.ndarray, y: np.ndarray) -> float:
        return float(np.mean([sklearn.roc_auc_score(y == k, p[:, k]) for k in ((1,) if outputs == 2 else range(outputs))]))

    assert_close(metrics.auroc(*case).tolist(), [area(p, y) for p, y in clients])
    assert_close(metrics.macro_f1(*case).tolist(), [sklearn.f1_score(y, p.argmax(-1), average="macro") for p, y in clients])
    assert_close(metrics.accuracy(*case).tolist(), [sklearn.accuracy_score(y, p.argmax(-1)) for p, y in clients])
    exact = federation(outputs=outputs)
    clients = [(p.numpy(), y.numpy()) for p, y in each(*exact)]
    assert_close(metrics.nll(*exact).tolist(), [sklearn.log_loss(y, p, labels=range(outputs)) for p, y in clients])
    assert_close(metrics.brier(*exact).tolist(), [float(((p - np.eye(outputs)[y]) ** 2).sum(-1).mean()) for p, y in clients])
    if outputs == 2:
        assert_close(metrics.brier(*exact).tolist(), [2 * sklearn.brier_score_loss(y, p[:, 1], scale_by_half=True) for p, y in clients])


# What must not matter, and what must


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_padding_is_never_read(name):
    """Each client alone, unpadded, has the same value as among padded others, whatever stands in the padding."""
    probs, labels, mask = federation()
    measure = CLASSIFICATION[name]
    alone = torch.cat([measure(p[None], y[None], torch.ones(1, len(y), dtype=torch.bool)) for p, y in each(probs, labels, mask)])
    assert_close(measure(probs, labels, mask), alone)
    garbage = torch.where(mask[..., None], probs, 7.0), torch.where(mask, labels, 99), mask
    assert_close(measure(*garbage), alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_order_does_not_matter(name):
    """Permuting examples changes nothing, permuting clients permutes, permuting classes changes nothing."""
    probs, labels, mask = federation()
    measure, rng = CLASSIFICATION[name], torch.Generator().manual_seed(1)
    base = measure(probs, labels, mask)
    rows, clients, classes = (torch.randperm(n, generator=rng) for n in probs.shape[1::-1] + probs.shape[2:])
    assert_close(measure(probs[:, rows], labels[:, rows], mask[:, rows]), base)
    assert_close(measure(probs[clients], labels[clients], mask[clients]), base[clients])
    moved = classes.argsort()[labels.clamp_min(0)]
    assert_close(measure(probs[..., classes], moved, mask), base)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_pooled_is_one_client_with_everything(name):
    """`pooled` equals the measure of the clients' examples, concatenated."""
    probs, labels, mask = federation()
    measure = CLASSIFICATION[name]
    together = probs[mask][None], labels[mask][None], torch.ones(1, int(mask.sum()), dtype=torch.bool)
    assert_close(metrics.pooled(measure, probs, labels, mask), measure(*together).item())


def test_float32_and_numpy_are_taken_and_nothing_is_changed():
    """Inputs of other types give float64 results and stay as they were."""
    probs, labels, mask = federation()
    before = probs.clone()
    assert metrics.nll(probs.float(), labels.int(), mask).dtype == torch.float64
    assert_close(metrics.nll(probs.numpy(), labels.numpy(), mask.numpy()), metrics.nll(probs, labels, mask))  # type: ignore[arg-type]
    assert_close(probs, before, equal_nan=True, rtol=0, atol=0)


def test_a_client_without_examples_is_nan_and_left_out():
    """Its own value is NaN; the summary is that of the others."""
    probs, labels, mask = federation()
    empty = mask.clone()
    empty[2] = False
    others = [0, 1, 3, 4]
    for name, measure in CLASSIFICATION.items():
        values = measure(probs, labels, empty)
        assert values.isnan().tolist() == [False, False, True, False, False], name
    kept = metrics.classification_summary(probs[others], labels[others], mask[others])
    assert metrics.classification_summary(probs, labels, empty) == pytest.approx(kept)


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 3)])
def test_nobody_at_all(shape):
    """No client, no row, or no example: NaN throughout, and no error."""
    summary = metrics.classification_summary(torch.rand(shape), torch.zeros(shape[:2]).long(), torch.zeros(shape[:2]).bool())
    assert all(math.isnan(value) for value in summary.values())
    assert metrics.reliability_bins(torch.rand(shape), torch.zeros(shape[:2]).long(), torch.zeros(shape[:2]).bool()).examples == 0


def test_a_diverged_client_is_seen():
    """One prediction that is not finite: NaN for its client and for every mean, the other clients keep theirs."""
    probs, labels, mask = federation()
    broken = probs.clone()
    broken[1, 0, 2] = math.inf
    for name, measure in CLASSIFICATION.items():
        before, after = measure(probs, labels, mask), measure(broken, labels, mask)
        assert after.isnan().tolist() == [False, True, False, False, False], name
        assert_close(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert all(math.isnan(value) for value in metrics.classification_summary(broken, labels, mask).values())
    with pytest.raises(ValueError, match=r"clients \[1\].*diverged"):
        metrics.reliability_bins(broken, labels, mask)


def test_bottom_decile_counts_from_the_worst():
    """Position floor(J / 10) in ascending order, from 0."""
    assert metrics.bottom_decile(torch.arange(100.0).flip(0)) == 10
    assert metrics.bottom_decile(torch.arange(9.0)) == 0
    assert metrics.bottom_decile(np.array([3.0, math.nan, 1.0, 2.0] + [5.0] * 7)) == 2
    assert math.isnan(metrics.bottom_decile(torch.tensor([])))
    with pytest.raises(ValueError, match="one number a client"):
        metrics.bottom_decile(torch.zeros(2, 2))


def test_summary_is_made_of_the_measures():
    """Means over clients, the decile, and the pot."""
    case = federation(clients=12)
    summary = metrics.classification_summary(*case, bins=10)
    for name, measure in CLASSIFICATION.items():
        options = {"bins": 10} if name in ("ece", "mce") else {}
        assert summary[name] == pytest.approx(measure(*case, **options).mean().item())
        if name not in ("macro_f1", "auroc"):
            assert summary[f"pooled_{name}"] == pytest.approx(metrics.pooled(measure, *case, **options))
    assert summary["accuracy_decile"] == metrics.accuracy(*case).sort().values[1]
    pot = {"pooled_accuracy", "pooled_nll", "pooled_ece", "pooled_mce", "pooled_brier"}
    assert set(summary) == {*CLASSIFICATION, "accuracy_decile", *pot}
    assert all(type(value) is float for value in summary.values())


def test_table_has_a_row_per_client():
    """Columns of equal length with the clients' own values."""
    case = federation()
    table = metrics.per_client_table(*case)
    assert table["client"].tolist() == [0, 1, 2, 3, 4]
    assert table["examples"].tolist() == case[2].sum(-1).tolist()
    for name, measure in CLASSIFICATION.items():
        np.testing.assert_allclose(table[name], measure(*case).numpy())


def test_bins_add_up():
    """The diagram's own errors are those of the pooled measures, and every example is in a bin."""
    case = federation()
    bins = metrics.reliability_bins(*case, bins=7)
    assert bins.examples == case[2].sum() == bins.count.sum()
    assert bins.ece == pytest.approx(metrics.pooled(metrics.ece, *case, bins=7))
    assert bins.mce == pytest.approx(metrics.pooled(metrics.mce, *case, bins=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, y, m: (p[0], y, m), r"probs must be \[J, N, O\]"),
        (lambda p, y, m: (p, y[:, 1:], m), "labels must be"),
        (lambda p, y, m: (p, y, m[1:]), "mask must be"),
        (lambda p, y, m: (p, y, m.float()), "mask must be bool"),
        (lambda p, y, m: (p, y.double(), m), "integer"),
        (lambda p, y, m: (p, y + 1, m), r"labels must lie in \[0, 4\).*got \d to 4"),
        (lambda p, y, m: (p, y - 1, m), "got -1"),
        (lambda p, y, m: (p.log(), y, m), "softmax"),
    ],
)
def test_errors_name_the_remedy(change, message):
    """Every measure checks its input the same way."""
    for measure in [*CLASSIFICATION.values(), metrics.classification_summary, metrics.reliability_bins]:
        with pytest.raises(ValueError, match=message):
            measure(*change(*federation()))


def test_option_errors():
    """Bins, norms and levels are checked."""
    case = federation()
    for measure in (metrics.ece, metrics.mce, metrics.reliability_bins):
        with pytest.raises(ValueError, match="bins"):
            measure(*case, bins=0)
    with pytest.raises(ValueError, match="norm must be"):
        metrics.ece(*case, norm="l3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level"):
        metrics.coverage(*regression(), 90)


# Regression


def regression(outputs: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gaussian predictions and targets of 4 clients; padded rows are NaN."""
    rng = torch.Generator().manual_seed(3)
    mean, noise = torch.randn(2, 4, 50, outputs, generator=rng, dtype=torch.float64)
    variance = 0.1 + torch.rand(4, 50, outputs, generator=rng, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor([50, 30, 20, 41])[:, None]
    targets = mean + 1.2 * variance.sqrt() * noise
    pad = ~mask[..., None]
    return mean.masked_fill(pad, math.nan), variance.masked_fill(pad, -1), targets.masked_fill(pad, math.nan), mask


def test_regression_agrees_with_scipy():
    """Density and interval of the normal distribution, client by client."""
    norm = pytest.importorskip("scipy.stats").norm
    mean, variance, targets, mask = regression()
    for j, rows in enumerate(mask):
        m, s, t = mean[j][rows].numpy(), variance[j][rows].sqrt().numpy(), targets[j][rows].numpy()
        assert metrics.rmse(mean, targets, mask)[j].item() == pytest.approx(np.sqrt(((t - m) ** 2).mean()))
        assert metrics.gaussian_nll(mean, variance, targets, mask)[j].item() == pytest.approx(-norm.logpdf(t, m, s).sum(-1).mean())
        for level in (0.5, 0.9, 0.95):
            low, high = norm.interval(level, m, s)
            assert metrics.coverage(mean, variance, targets, mask, level)[j].item() == pytest.approx(((low <= t) & (t <= high)).mean())


def test_regression_by_hand():
    """One client, errors 3 and 4 of standard deviation 1."""
    mean, targets, mask = torch.zeros(1, 2, 1), torch.tensor([[3.0, -4.0]]), torch.ones(1, 2).bool()
    assert metrics.rmse(mean, targets, mask).item() == pytest.approx(math.sqrt(12.5))
    assert metrics.gaussian_nll(mean, mean + 1, targets, mask).item() == pytest.approx(6.25 + 0.5 * math.log(2 * math.pi))
    assert metrics.coverage(mean, mean + 1, targets, mask, 0.999).item() == 0.5


def test_regression_summary():
    """Means over clients and the pot; targets may leave out the one output."""
    mean, variance, targets, mask = regression(outputs=1)
    summary = metrics.regression_summary(mean, variance, targets[..., 0], mask)
    keys = ["rmse", "nll", "coverage_50", "coverage_90"]
    assert list(summary) == [*keys, *(f"pooled_{key}" for key in keys)]
    assert summary["rmse"] == pytest.approx(metrics.rmse(mean, targets, mask).mean().item())
    assert summary["pooled_rmse"] == pytest.approx(((targets - mean)[mask] ** 2).mean().sqrt().item())
    m, v, t, k = (value[mask][None] for value in (mean, variance, targets, mask))
    assert summary["pooled_coverage_90"] == pytest.approx(metrics.coverage(m, v, t, k).item())
    nobody = metrics.regression_summary(mean, variance, targets, torch.zeros_like(mask))
    assert all(math.isnan(value) for value in nobody.values())
    mean[0, 0] = math.inf
    assert math.isnan(metrics.regression_summary(mean, variance, targets, mask)["rmse"])
    assert metrics.rmse(mean, targets, mask).isnan().tolist() == [True, False, False, False]


def test_regression_errors():
    """Shapes, variances and targets are checked at the boundary."""
    mean, variance, targets, mask = regression()
    with pytest.raises(ValueError, match="only where there is one output"):
        metrics.rmse(mean, targets[..., 0], mask)
    with pytest.raises(ValueError, match="variance must have the shape"):
        metrics.gaussian_nll(mean, variance[..., :1], targets, mask)
    with pytest.raises(ValueError, match="variance must be > 0"):
        metrics.gaussian_nll(mean, 0 * variance, targets, mask)
    with pytest.raises(ValueError, match="targets must be finite"):
        metrics.rmse(mean, targets, torch.ones_like(mask))
    with pytest.raises(ValueError, match="mask must be"):
        metrics.rmse(mean, targets, mask[..., None])
    with pytest.raises(ValueError, match="mean must be"):
        metrics.rmse(mean[0], targets, mask)
