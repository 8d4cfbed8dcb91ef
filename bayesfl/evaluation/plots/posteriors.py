"""Diagrams of posteriors: weights' marginals beside those of another posterior, and predictions
over one or two inputs.
"""

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from bayesfl.base.options import Count, Share
from bayesfl.evaluation.plots.look import BLUE, INK, Axes, finish, lines, literal, new_figure
from bayesfl.posteriors.sampling.samples import Drawn, Samples

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Ends of the 90 % and 50 % intervals of a marginal, and its median."""


@literal
def marginals(
    entries: Mapping[str, Samples | Drawn],
    *,
    weights: Sequence[int] | None = None,
    draws: int = 4000,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """Draw marginals of single weights, one posterior beside another: the median, a thick line for
    the 50 % interval and a thin one for that of 90 %.

    An overconfident approximation has shorter lines than a reference such as `bf.posteriors.nuts`.

    Args:
        entries: {name: `Samples`, or a Gaussian such as a `Laplace`, from which draws are made},
            all for the same weights.
        weights: Indices of the weights in their flat vector; None for the first 12.
        draws: Number of draws of a Gaussian.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: The posteriors are for different weights.

    >>> x, y = torch.randn(30, 2), torch.arange(30) % 2
    >>> model = nn.Linear(2, 2)
    >>> fitted = bf.posteriors.Laplace.fit(model, x, y, precision=1.0)
    >>> ax = bf.plots.marginals({"Laplace": fitted})
    >>> ax.get_yticklabels()[1].get_text()
    'weight[0, 1]'
    """
    samples = {
        name: one if isinstance(one, Samples) else one.sample(draws)
        for name, one in entries.items()
    }
    first, *others = (one.layout for one in samples.values())
    if any(other.shapes != first.shapes for other in others):
        raise ValueError(f"the posteriors {list(entries)} are of different weights")
    places = range(min(12, first.size)) if weights is None else weights
    names = [
        name if not shape else f"{name}[{', '.join(map(str, place))}]"
        for name, shape in first.shapes.items()
        for place in np.ndindex(*shape)
    ]
    if ax is None:
        ax = new_figure((5.4, (0.9 + (0.16 + 0.13 * len(samples)) * len(places)))).add_subplot()
    step = 0.7 / len(samples)
    for line, (one, look) in enumerate(zip(samples.values(), lines(samples), strict=True)):
        colour, label = look["color"], look["label"]
        flat = one.draws.flatten(0, 1)[:, list(places)].double().cpu().numpy()
        low, lower, middle, upper, high = np.quantile(flat, QUANTILES, axis=0)
        y = np.arange(len(places)) + (line - (len(samples) - 1) / 2) * step
        ax.hlines(y, low, high, color=colour, linewidth=1)
        ax.hlines(y, lower, upper, color=colour, linewidth=3)
        ax.plot(middle, y, "o", color=colour, markeredgecolor="white", markersize=5, label=label)
    ax.set_yticks(range(len(places)), [names[place] for place in places])
    ax.set_ylim(len(places) - 0.5, -0.5)  # the first weight on top
    return finish(ax, title, grid="x", legend=True, xlabel="weight")


@literal
def predictions(
    posterior: Any,
    x: Any,
    y: Any = None,
    *,
    level: Share = 0.9,
    points: Count = 100,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """Draw predictions over the inputs: over one input a curve with a band, or each class's
    probability; over two inputs a map of the uncertainty.

    The dark band is for the curve alone, the light one for new outcomes; each contains `level` of a
    normal distribution. A map shows the entropy of the class probabilities in nats, or the standard
    deviation of a new outcome.

    Args:
        posterior: A posterior of `bf.posteriors`, a client's model `result.client(name)`, or any
            other object with `predict`.
        x: Inputs [N, 1] or [N, 2]. The diagram goes beyond them by a quarter of their range.
        y: Outcomes [N], which are drawn over one input; None to leave them out.
        level: Probability of a band.
        points: Number of points along each input.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: `x` has more than two inputs, or the model has several numeric outputs.

    >>> x = torch.linspace(-1, 1, 30)[:, None]
    >>> given = {"likelihood": bf.likelihoods.Gaussian(), "precision": 1.0}
    >>> fitted = bf.posteriors.Laplace.fit(nn.Linear(1, 1), x, x.sin(), **given)
    >>> ax = bf.plots.predictions(fitted, x, x.sin())
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['mean', '90% of the curve', '90% of outcomes']
    """
    rows = torch.as_tensor(x)
    if rows.dim() != 2 or rows.shape[1] not in (1, 2):
        raise ValueError(f"x must be [N, 1] or [N, 2], got {list(rows.shape)}")
    ax = new_figure((5.4, 3.6)).add_subplot() if ax is None else ax
    low, high = rows.amin(0), rows.amax(0)
    room = (high - low) / 4
    steps = torch.linspace(0, 1, points, dtype=rows.dtype)[:, None]
    sides = (low - room + steps * (high - low + 2 * room)).unbind(1)
    found = posterior.predict(torch.cartesian_prod(*sides).view(-1, len(sides)))
    told: Any = found if isinstance(found, dict) else vars(found)
    kept: Any = {name: t.double().cpu() for name, t in told.items() if isinstance(t, torch.Tensor)}
    probs = kept.get("probs")
    if probs is None and kept["mean"].shape[1] > 1:
        outputs = kept["mean"].shape[1]
        raise ValueError(
            f"a model with {outputs} outputs has no single curve; use a model with one output"
        )
    if len(sides) == 2:
        unsure = kept["variance"].sqrt() if probs is None else torch.special.entr(probs).sum(-1)
        image = ax.pcolormesh(*sides, unsure.view(points, points).T, cmap="viridis", vmin=0)
        label = "standard deviation" if probs is None else "entropy (nats)"
        ax.figure.colorbar(image, ax=ax, label=label)
        return finish(ax, title, xlabel="first input", ylabel="second input")
    (at,) = sides
    if probs is not None:
        looks = lines(f"class {k}" for k in range(probs.shape[1]))
        for row, look in zip(probs.T, looks, strict=True):
            ax.plot(at, row, **look)
        return finish(ax, title, grid="y", legend=True, xlabel="input", ylabel="probability")
    mean = kept["mean"][:, 0]
    ax.plot(at, mean, color=BLUE, label="mean")
    z = NormalDist().inv_cdf((1 + level) / 2)
    for of, key, alpha in (("the curve", "epistemic", 0.45), ("outcomes", "variance", 0.2)):
        reach = z * kept[key].view(-1).clamp_min(0).sqrt()
        ends, label = (mean - reach, mean + reach), f"{level:.0%} of {of}"
        ax.fill_between(at, *ends, color=BLUE, alpha=alpha, linewidth=0, label=label)
    if y is not None:
        ax.plot(rows[:, 0], torch.as_tensor(y).reshape(-1), ".", color=INK, markersize=4)
    return finish(ax, title, grid="y", legend=True, xlabel="input", ylabel="outcome")
