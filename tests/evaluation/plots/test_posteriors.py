"""What diagrams of posteriors contain, without looking at them."""

from typing import Any

import numpy as np
import pytest
import torch

import bayesfl as bf
from bayesfl.evaluation import plots

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


class Told:
    """Predicts what a function says of the inputs."""

    def __init__(self, told: Any) -> None:
        self.predict = told


def test_a_curve_has_a_band_of_itself_and_one_of_outcomes():
    """Of a normal distribution's level, over the inputs and a quarter of their range beyond."""

    def told(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": 2 * x, "variance": 4 + x.square(), "epistemic": x[:, 0].square()}

    x = torch.tensor([[-1.0], [3.0]])
    ax = plots.predictions(
        Told(told), x, torch.tensor([5.0, 6.0]), level=0.95, points=9, title="t"
    ).axes[0]
    at = np.linspace(-2, 4, 9)
    mean, drawn = ax.lines
    np.testing.assert_allclose(mean.get_xydata(), np.stack([at, 2 * at], 1), atol=1e-6)
    np.testing.assert_allclose(drawn.get_xydata(), [[-1, 5], [3, 6]])
    for band, sd in zip(ax.collections, (abs(at), (4 + at**2) ** 0.5), strict=True):
        corners = band.get_paths()[0].vertices
        for sign in (-1, 1):
            wanted = np.stack([at, 2 * at + sign * 1.959964 * sd], 1)
            assert all(np.isclose(corners, row, atol=1e-5).all(1).any() for row in wanted)
        assert len({tuple(row) for row in corners.round(4)}) <= 18
    shown = [text.get_text() for text in ax.get_legend().get_texts()]
    assert shown == ["mean", "95% of the curve", "95% of outcomes"]
    ax.figure.canvas.draw()
    with pytest.raises(ValueError, match=r"\[N, 1\] or \[N, 2\].* got \[2, 3\]"):
        plots.predictions(Told(told), torch.zeros(2, 3))
    several = Told(lambda x: told(x) | {"mean": x.expand(-1, 2)})
    with pytest.raises(ValueError, match="2 outputs"):
        plots.predictions(several, x)


def test_classes_have_curves_of_one_input_and_two_inputs_a_map():
    def classes(x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = x[:, 0].clamp(0.01, 0.99)
        return {"probs": torch.stack([first, 1 - first], 1), "epistemic": first}

    ax = plots.predictions(Told(classes), torch.tensor([[0.0], [1.0]]), points=7).axes[0]
    at = np.linspace(-0.25, 1.25, 7)
    assert [line.get_label() for line in ax.lines] == ["class 0", "class 1"]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), at, atol=1e-6)
    np.testing.assert_allclose(ax.lines[1].get_ydata(), 1 - at.clip(0.01, 0.99), atol=1e-6)
    square = torch.tensor([[0.0, 10.0], [1.0, 14.0]])
    ax = plots.predictions(Told(classes), square, points=7).axes[0]
    p = at.clip(0.01, 0.99)
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    (mesh,) = ax.collections
    np.testing.assert_allclose(mesh.get_array(), np.tile(entropy, (7, 1)), atol=1e-6)
    assert ax.get_ylim()[0] < 9.01

    def numbers(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": x[:, :1], "variance": x[:, 1:].square(), "epistemic": x[:, 0]}

    ax = plots.predictions(Told(numbers), square, points=7, ax=Figure().add_subplot()).axes[0]
    deviations = np.tile(np.linspace(9, 15, 7)[:, None], (1, 7))
    np.testing.assert_allclose(ax.collections[0].get_array(), deviations, atol=1e-5)
    ax.figure.canvas.draw()


def test_predictions_of_a_client_are_drawn():
    x, y = torch.randn(40, 2), torch.arange(40) % 3
    clients = bf.data.from_arrays([x, x], [y, y])
    method = bf.algorithms.fedavg(bf.models.mlp(2, hidden=3, outputs=3))
    client = bf.simulate(method, clients, rounds=1, evaluate_every=None, progress=False).client(0)
    assert plots.predictions(client, x, points=4).axes[0].get_xlabel() == "first input"
