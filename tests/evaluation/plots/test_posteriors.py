"""What diagrams of posteriors contain, without looking at them."""

import numpy as np
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl.evaluation import plots

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def laplace(inputs: int = 4, **options: object) -> bf.posteriors.Laplace:
    torch.manual_seed(0)
    x = torch.randn(30, inputs)
    return bf.posteriors.Laplace.fit(nn.Linear(inputs, 2), x, precision=1.0, **options)  # pyright: ignore[reportArgumentType]


def test_marginals_are_quantiles_of_the_draws():
    """A Gaussian's own within the noise of its draws; samples as they are; weights by name."""
    fitted = laplace()
    samples = fitted.sample(200)
    mine = Figure().add_subplot()
    ax = plots.marginals({"Gaussian": fitted, "draws": samples}, weights=[1, 8], ax=mine, title="t")
    assert [text.get_text() for text in ax.get_yticklabels()] == ["weight[0, 1]", "bias[0]"]
    wide, half, *others = [np.array(lines.get_segments()) for lines in ax.collections]
    mean, variance = (t[[1, 8]].numpy() for t in fitted.moments())
    for lines, z in ((wide, 1.6449), (half, 0.6745)):
        for end, sign in ((0, -1), (1, 1)):
            wanted = mean + sign * z * variance**0.5
            np.testing.assert_allclose(lines[:, end, 0], wanted, atol=0.08 * variance.max() ** 0.5)
    flat = samples.draws[0][:, [1, 8]].numpy()
    np.testing.assert_allclose(others[0][:, :, 0], np.quantile(flat, [0.05, 0.95], axis=0).T)
    np.testing.assert_allclose(others[1][:, :, 0], np.quantile(flat, [0.25, 0.75], axis=0).T)
    assert [line.get_label() for line in ax.lines] == ["Gaussian", "draws"]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), np.median(flat, axis=0))
    assert (ax, ax.get_title()) == (mine, "t")
    ax.figure.canvas.draw()
    assert len(plots.marginals({"a": laplace(20)}).get_yticklabels()) == 12
    with pytest.raises(ValueError, match=r"'a', 'b'.* different weights"):
        plots.marginals({"a": laplace(4), "b": laplace(5)})


def test_a_subnetwork_is_an_image_of_its_inputs():
    """Each input's share of weights that are selected; a square where they fill one."""
    chosen = torch.tensor([0, 4, 1, 3])  # weights [2, 4]: input 0 twice, inputs 1 and 3 once
    fitted = laplace(structure="subnetwork", indices=chosen.sort().values)
    ax = plots.subnetwork(fitted)
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), [[1.0, 0.5], [0.0, 0.5]])
    assert ax.get_title() == "4 of 10 weights"
    assert ax.get_xlabel() == "inputs of weight"
    row = plots.subnetwork(laplace(5), title="t")
    np.testing.assert_allclose(row.images[0].get_array(), np.ones((1, 5)))
    wide = plots.subnetwork(fitted, shape=(1, 4), ax=Figure().add_subplot())
    np.testing.assert_allclose(wide.images[0].get_array(), [[1.0, 0.5, 0.0, 0.5]])
    row.figure.canvas.draw()
