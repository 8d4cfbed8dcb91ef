"""What diagrams of clients contain, without looking at them."""

import numpy as np
import pytest
import torch

from bayesfl.evaluation import plots
from bayesfl.evaluation.calibration.padded import conformal
from tests.evaluation.plots.made import bars, federation

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def test_coverage_shows_clients_and_chance():
    """A point and a size for each client with test examples, its interval behind; who is beyond chance looks different."""
    probs, labels, mask = case = federation()
    found = conformal(*case, by="pooled").evaluate(*case)
    figure = plots.coverage({"a": found, "b": conformal(*case, by="client").evaluate(*case)}, title="t")
    upper = [ax for ax in figure.axes if ax.get_label() == "coverage"]
    lower = [ax for ax in figure.axes if ax.get_label() == "size"]
    assert [ax.get_title() for ax in upper] == ["a", "b"]
    assert len({ax.get_ylim() for ax in upper}) == len({ax.get_ylim() for ax in lower}) == 1
    client = [0, *range(2, 14)]
    inside, outside = (next(line for line in upper[0].lines if line.get_gid() == gid) for gid in ("a client", "a client beyond chance"))
    drawn = dict(zip((*inside.get_xdata(), *outside.get_xdata()), (*inside.get_ydata(), *outside.get_ydata()), strict=True))
    assert drawn == pytest.approx({j: found.share[j].item() for j in client})
    low, high = found.chance(0.9)
    assert {int(j) for j in outside.get_xdata()} == {j for j in client if not low[j] <= found.share[j] <= high[j]}
    np.testing.assert_allclose([bar.get_y() for bar in bars(upper[0], "chance")], low[client])
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in bars(upper[0], "chance")], high[client])
    np.testing.assert_allclose([bar.get_height() for bar in bars(lower[0], "size")], found.size[client])
    (asked,) = [line for line in upper[0].lines if str(line.get_label()).startswith("asked")]
    assert list(asked.get_ydata()) == [0.9, 0.9]
    assert figure.get_suptitle() == "t"
    figure.canvas.draw()
    plots.coverage(found).canvas.draw()
    with pytest.raises(ValueError, match="entries is empty"):
        plots.coverage({})
    with pytest.raises(ValueError, match="no test examples"):
        plots.coverage(conformal(*case).evaluate(probs, labels, torch.zeros_like(mask)))


def test_collaboration_shows_groups_as_blocks():
    """Clients stand in the order of their groups, labelled by their own numbers, lines between groups; without groups as they come."""
    weights = torch.tensor([[0.6, 0.0, 0.4, 0.0], [0.1, 0.9, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0], [0.0, 0.3, 0.0, 0.7]])
    mine = Figure().add_subplot()
    ax = plots.collaboration(weights, groups=[0, 1, 0, 1], ax=mine, title="t")
    assert ax is mine
    (image,) = ax.images
    order = [0, 2, 1, 3]
    np.testing.assert_allclose(image.get_array(), weights.numpy()[order][:, order])
    assert image.get_clim() == (0, pytest.approx(0.9))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "2", "1", "3"]
    across, down = ax.lines
    assert list(across.get_ydata()) == list(down.get_xdata()) == [1.5, 1.5]
    assert ax.get_title() == "t"
    ax.figure.canvas.draw()
    plain = plots.collaboration(weights.numpy())
    np.testing.assert_allclose(plain.images[0].get_array(), weights)
    assert not plain.lines
    plots.collaboration(torch.zeros(30, 30)).figure.canvas.draw()
    with pytest.raises(ValueError, match=r"weights .*got shape \[4, 3\]"):
        plots.collaboration(weights[:, :3])
    with pytest.raises(ValueError, match=r"finite and >= 0, got -0\.9"):
        plots.collaboration(-weights)
    with pytest.raises(ValueError, match=r"groups .*4 clients, got 2"):
        plots.collaboration(weights, groups=[0, 1])


def test_clients_stand_under_their_names():
    """In both diagrams, in the order in which they are drawn; of many clients some are named, each at its own place."""
    case = federation()
    found = conformal(*case).evaluate(*case)
    town = [f"town {j}" for j in range(14)]
    sizes = [ax for ax in plots.coverage({"a": found, "b": found}, names=town).axes if ax.get_label() == "size"]
    assert [[text.get_text() for text in ax.get_xticklabels()] for ax in sizes] == [town, town]
    weights = torch.eye(4)
    ax = plots.collaboration(weights, groups=[0, 1, 0, 1], names=["a", "b", "c", "d"])
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [text.get_text() for text in labels] == ["a", "c", "b", "d"]
    many = plots.collaboration(torch.eye(50), names=[f"town {j}" for j in range(50)])
    assert [(int(x), text.get_text()) for x, text in zip(many.get_xticks(), many.get_xticklabels(), strict=True)] == [
        (j, f"town {j}") for j in range(0, 50, 3)
    ]
    for refused in (lambda: plots.coverage(found, names=["a"]), lambda: plots.collaboration(weights, names=["a"])):
        with pytest.raises(ValueError, match=r"names.*(14|4) clients, got 1"):
            refused()
