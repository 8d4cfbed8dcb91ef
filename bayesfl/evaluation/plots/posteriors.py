"""Diagrams of posteriors: predictions over one or two inputs."""

from statistics import NormalDist
from typing import Any

import torch

from bayesfl.base.options import Count, Share
from bayesfl.evaluation.plots.look import (
    BLUE,
    INK,
    Axes,
    Figure,
    finish,
    lines,
    literal,
    new_figure,
)


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
) -> "Figure":
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
        The matplotlib Figure, that of `ax` if given.

    Raises:
        ValueError: `x` has more than two inputs, or the model has several numeric outputs.

    >>> x = torch.linspace(-1, 1, 30)[:, None]
    >>> given = {"likelihood": bf.likelihoods.Gaussian(), "precision": 1.0}
    >>> fitted = bf.posteriors.Laplace.fit(nn.Linear(1, 1), x, x.sin(), **given)
    >>> ax = bf.plots.predictions(fitted, x, x.sin()).axes[0]
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
