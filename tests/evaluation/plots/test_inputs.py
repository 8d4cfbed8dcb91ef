"""What can be drawn: results, probabilities, one client's rows, and no regression."""

from types import SimpleNamespace

import pytest

from bayesfl.evaluation import plots
from bayesfl.evaluation.predictions import Predictions
from tests.evaluation.plots.made import bars, federation

pytest.importorskip("matplotlib")


def test_sources_are_equivalent():
    """Tensors, a tuple, a result, and one client's rows without a client axis or mask."""
    probs, labels, mask = federation()

    result = SimpleNamespace(
        data=SimpleNamespace(test=None, client_names=[str(j) for j in range(len(probs))]),
        predict=lambda data: Predictions(mask, 0 * probs[..., 0], probs=probs, labels=labels),
    )
    drawn = [
        plots.reliability(probs, labels, mask).axes[0],
        plots.reliability((probs, labels, mask)).axes[0],
        plots.reliability(result).axes[0],
    ]
    heights = [[bar.get_height() for bar in bars(ax, "accuracy")] for ax in drawn]
    assert heights[0] == heights[1] == heights[2]
    single = plots.reliability(probs[0][mask[0]], labels[0][mask[0]]).axes[0]
    chosen = plots.reliability(probs, labels, mask, clients=[0]).axes[0]
    assert [bar.get_height() for bar in bars(single, "accuracy")] == [
        bar.get_height() for bar in bars(chosen, "accuracy")
    ]
