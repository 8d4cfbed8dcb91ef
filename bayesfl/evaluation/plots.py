"""Reliability diagrams, learning curves, risk-coverage curves, the coverage of conformal sets, and who learns from whom.

Matplotlib is imported only when something is drawn, and only its object-oriented interface is used: no backend is switched, no figure is
registered with pyplot, nothing is shown. Without `ax` a figure is made, to be saved by `axes.figure.savefig("diagram.png")`; to draw into
a figure of your own, pass `ax`. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfl.evaluation.calibration import Coverage
from bayesfl.evaluation.detection import RiskCoverage, doubt
from bayesfl.evaluation.detection import risk_coverage as risk_coverage_of
from bayesfl.evaluation.history import HEADLINES
from bayesfl.evaluation.metrics import ReliabilityBins, reliability_bins
from bayesfl.evaluation.report import is_share, mean_and_error, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Blue, vermilion, green, purple, orange, sky blue, black, yellow."""
_BLUE, _GREY, _INK = "#0072B2", "#8A8F94", "#333333"
_OVER: dict[str, Any] = {"color": "#F6CDB2", "edgecolor": "#D55E00", "hatch": "////", "label": "overconfident", "gid": "overconfident"}
_UNDER: dict[str, Any] = {"color": "#7FB9DF", "edgecolor": "#CFE7F7", "hatch": "....", "label": "underconfident", "gid": "underconfident"}
_DASHES = ("-", "--", ":", "-.")
_COVERAGE = ((0, "coverage"), (1, "size"))  # lines of the diagram of conformal sets
_SETTLED = 0.05  # a risk-coverage curve jumps before this share of the examples; its axis need not reach these peaks
_CLIENTS = 12  # panels that by="client" draws unless told which


def reliability(
    source: Any,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    bins: int = 15,
    by: Literal["pooled", "client"] = "pooled",
    clients: Sequence[int] | None = None,
    ax: "Axes | None" = None,
    title: str | None = None,
) -> Any:
    """Reliability diagram: accuracy by bins of confidence, and how many examples each bin holds.

    Blue bars are the accuracy of each bin. A shaded gap leads from their top to the bin's mean confidence: upwards, in vermilion, where
    the model claims more than it achieves; downwards, in sky blue, where it claims less. The expected calibration error is the mean of
    the gaps, weighted by the histogram beneath. Guo et al., "On calibration of modern neural networks", ICML 2017.

    Args:
        source: A simulation's result, whose personal predictions on its test data are used; or class probabilities, [J, N, O] or [N, O].
        labels: True classes, [J, N] or [N]; only where `source` is probabilities.
        mask: Which rows are examples, bool and shaped as `labels`; by default all.
        bins: Number of bins of equal width.
        by: `pooled`, one diagram of all examples; `client`, one per client.
        clients: Which clients, by number; by default all when pooled, and the first 12 that have examples by client.
        ax: Where to draw a pooled diagram; it makes room for the histogram beneath. By default a new figure.
        title: Of the diagram, or of the figure.

    Returns:
        The diagram's matplotlib Axes; by client an array of them, in the order of `clients`. `axes.figure` is the figure.

    Raises:
        ValueError: The shapes do not fit, or a client is not there.
    """
    probs, labels, mask = _predictions(source, labels, mask)
    total = len(probs)
    wrong = [j for j in clients or () if not 0 <= j < total]
    if wrong:
        raise ValueError(f"clients {wrong} are not there; the predictions are of clients 0 to {total - 1}")
    if by == "pooled":
        if clients is not None:
            chosen = list(clients)
            probs, labels, mask = probs[chosen], labels[chosen], mask[chosen]
        pooled = reliability_bins(probs, labels, mask, bins)
        if ax is None:
            return _panels({title or "": pooled}, 1, size=(3.8, 4.6))[1][0]
        _diagram(ax, _split(ax), pooled)
        ax.legend(handles=_key(), loc="upper left", fontsize="small", handlelength=1.3, edgecolor="none", framealpha=0.9, borderaxespad=0.2)
        ax.set_title(title or "")
        return ax
    if by != "client":
        raise ValueError(f"by must be 'pooled' or 'client', got {by!r}")
    if ax is not None:
        raise ValueError("by='client' makes a figure of its own; leave ax out, or draw one client with by='pooled', clients=[j], ax=ax")
    if clients is None:
        clients = mask.any(-1).nonzero().flatten().tolist()[:_CLIENTS]
    if not clients:
        raise ValueError("there is no client with examples to draw; check mask")
    panels = {f"client {j}": reliability_bins(probs[j : j + 1], labels[j : j + 1], mask[j : j + 1], bins) for j in clients}
    figure, axes = _panels(panels, min(4, len(panels)))
    if title:
        figure.suptitle(title)
    return axes


def reliability_compare(entries: Mapping[str, Any], *, bins: int = 15, columns: int | None = None) -> "Figure":
    """Reliability diagrams of several methods side by side, on one scale.

    Args:
        entries: {method: a simulation's result, or (probs, labels, mask)} as in `reliability`.
        bins: Number of bins of equal width.
        columns: Diagrams in a row; by default up to 4.

    Returns:
        A matplotlib Figure, to be saved by `.savefig`.

    Raises:
        ValueError: There is no entry, or one does not fit.
    """
    if not entries:
        raise ValueError("entries is empty: give at least one {method: result or (probs, labels, mask)}")
    panels = {name: reliability_bins(*_predictions(entry, None, None), bins) for name, entry in entries.items()}
    return _panels(panels, min(4, len(panels)) if columns is None else columns, alike=True)[0]


def learning_curves(
    histories: Mapping[str, Any],
    *,
    metric: str | None = None,
    x: str = "round",
    ax: "Axes | None" = None,
    title: str | None = None,
) -> "Axes":
    """A measure against the rounds, one line a method; of several seeds the mean, and a band of one standard error to each side.

    Args:
        histories: {method: a history, or a list of histories, one a seed}. A history has arrays of equal length under `x` and `metric`,
            as a mapping or data frame, or is a result with such a `history`. Rounds that were not evaluated, NaN, are left out; of several
            seeds the rounds count at which all were evaluated.
        metric: What to draw; by default the personal accuracy, of regressions the personal RMSE. Accuracies and coverages are shown in
            percent.
        x: What to draw it against.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: A history has no such column, or nothing was evaluated.
    """
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    if not isinstance(histories, Mapping):
        raise ValueError(f"histories must be {{method: history}}, got {type(histories).__name__}; name it, as in {{'mine': result}}")
    if not histories:
        raise ValueError("histories is empty: give at least one {method: history}")
    runs = {
        name: [getattr(h, "history", h) for h in (history if isinstance(history, (list, tuple)) else [history])]
        for name, history in histories.items()
    }
    columns = {name: [_columns(name, run) for run in seeds] for name, seeds in runs.items()}
    if metric is None:
        metric = _headline([keys for seeds in columns.values() for keys in seeds])
    ax = _figure((5.6, 3.6)).add_subplot() if ax is None else ax
    looks = cycle([(colour, dash) for dash in _DASHES for colour in OKABE_ITO[:7]])
    for name, (colour, dash) in zip(runs, looks, strict=False):
        seeds = [_curve(name, run, keys, x, metric) for run, keys in zip(runs[name], columns[name], strict=True)]
        common = sorted(set.intersection(*(set(seed) for seed in seeds))) if seeds else []
        if not common:
            raise ValueError(f"{name!r}: {metric!r} was evaluated at no round" + (" that all seeds share" if len(seeds) > 1 else ""))
        stats = np.array([mean_and_error([seed[at] for seed in seeds]) for at in common])
        marker = "o" if len(common) <= 15 else ""
        ax.plot(common, stats[:, 0], color=colour, linestyle=dash, marker=marker, markersize=3.5, linewidth=1.8, label=name)
        if len(seeds) > 1:
            low, high = stats[:, 0] - stats[:, 1], stats[:, 0] + stats[:, 1]
            ax.fill_between(common, low, high, color=colour, alpha=0.18, linewidth=0)
    if is_share(metric):
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if x == "round":
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    ax.set_xlabel(words(x))
    ax.set_ylabel(words(metric))
    ax.set_title(title or "")
    _clean(ax)
    ax.grid(True, color="0.9", linewidth=0.8)
    if len(histories) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


def risk_coverage(entries: Mapping[str, Any], *, ax: "Axes | None" = None, title: str | None = None) -> "Axes":
    """Risk-coverage curves: the share of errors among the answers, when a share of the examples is answered, the least doubtful first.

    One line a method, over all examples of all clients; lower is better, and the right end is the error rate. The legend has the area
    under each curve (AURC). Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.

    Args:
        entries: {method: a simulation's result, or (probs, labels, mask)}, whose doubt is 1 - the largest probability; or, by any other
            score, what `bf.detection.risk_coverage` gives.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: There is no entry, or one does not fit or has no examples.
    """
    from matplotlib.ticker import PercentFormatter

    if not entries:
        raise ValueError("entries is empty: give at least one {method: result, (probs, labels, mask) or risk-coverage curve}")
    curves = {name: _risks(entry) for name, entry in entries.items()}
    empty = [name for name, curve in curves.items() if not len(curve.risk)]
    if empty:
        raise ValueError(f"{empty} have no examples; check mask")
    ax = _figure((5.0, 3.6)).add_subplot() if ax is None else ax
    looks = cycle([(colour, dash) for dash in _DASHES for colour in OKABE_ITO[:7]])
    for (name, curve), (colour, dash) in zip(curves.items(), looks, strict=False):
        label = f"{name} (AURC {100 * curve.aurc:.2f}%)"
        ax.plot(curve.coverage, curve.risk, color=colour, linestyle=dash, linewidth=1.8, label=label)
    ax.set(xlim=(0, 1), xlabel="examples answered", ylabel="errors among the answers", title=title or "")
    ax.set_ylim(0, 1.1 * max(1e-3, *(float(curve.risk[curve.coverage >= _SETTLED].max()) for curve in curves.values())))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    _clean(ax)
    ax.grid(True, color="0.9", linewidth=0.8)
    ax.legend(frameon=False, fontsize="small", loc="best")
    return ax


def coverage(entries: "Coverage | Mapping[str, Coverage]", *, level: float = 0.9, title: str | None = None) -> "Figure":
    """Coverage of conformal sets client by client, and how many classes the sets hold.

    A point is the share of a client's labels inside their set; the line is what was asked for, 1 - alpha. The bar behind each point is
    where chance alone, the calibration's and the test's, would put a client like those that the threshold was made for, with probability
    `level`: points outside it, in vermilion, are of clients that are served worse or better than promised. Beneath stand the mean numbers
    of classes in a set.

    Args:
        entries: What `Conformal.evaluate` gives; {name: that} for several side by side.
        level: Probability of the bars, in (0, 1).
        title: Of the figure.

    Returns:
        A matplotlib Figure, to be saved by `.savefig`.

    Raises:
        ValueError: There is no entry, or one has no test examples.
    """
    named = {"": entries} if isinstance(entries, Coverage) else dict(entries)
    if not named:
        raise ValueError("entries is empty: give the coverage of conformal sets, or {name: coverage}")
    empty = [name for name, found in named.items() if not bool(found.tested.any())]
    if empty:
        raise ValueError(f"{empty} have no test examples; check mask")
    most = max(len(found.share) for found in named.values())
    figure = _figure((max(3.2, 1.2 + 0.16 * most) * len(named) + 0.4, 3.9))
    grid = figure.add_gridspec(2, len(named), height_ratios=(3, 1))
    uppers, lowers = ([figure.add_subplot(grid[line, column], label=kind) for column in range(len(named))] for line, kind in _COVERAGE)
    for (name, found), upper, lower in zip(named.items(), uppers, lowers, strict=True):
        _covered(upper, lower, found, level)
        upper.set_title(name, fontsize="medium")
    bottom = min(ax.get_ylim()[0] for ax in uppers)
    widest = max(float(found.size[found.tested > 0].max()) for found in named.values())
    for ax, beneath in zip(uppers, lowers, strict=True):
        ax.set_ylim(bottom, 1.02)
        beneath.set_ylim(0, 1.08 * max(widest, 1.0))
        ax.tick_params(labelleft=ax is uppers[0])
        beneath.tick_params(labelleft=beneath is lowers[0])
    uppers[0].set_ylabel("labels inside their set")
    lowers[0].set_ylabel("set size", fontsize="small")
    handles, labels = uppers[0].get_legend_handles_labels()
    columns = len(handles) if figure.get_figwidth() > 6.5 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small", handlelength=1.3)
    if title:
        figure.suptitle(title)
    return figure


def collaboration(
    weights: Tensor | np.ndarray, *, groups: Sequence[int] | None = None, ax: "Axes | None" = None, title: str | None = None
) -> "Axes":
    """Who learns from whom: the darker, the more of the column's client is in what the row's client gets.

    Args:
        weights: Of J clients, [J, J] >= 0, as FedPAC's `result.server["head"]["weights"]`; a row of 0 is a client that was never there.
        groups: Where it is known which clients are alike, the group of each, [J]: clients stand in the order of their groups, with lines
            between these, so that weights within groups are blocks on the diagonal.
        ax: Where to draw; by default a new figure.
        title: Of the axes.

    Returns:
        The matplotlib Axes. `axes.figure` is the figure.

    Raises:
        ValueError: The weights are not square, not finite or negative, or `groups` has another length.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shown = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights, dtype=float)
    if shown.ndim != 2 or shown.shape[0] != shown.shape[1] or not len(shown):
        raise ValueError(f"weights must be square, a row and a column for each client, got shape {list(shown.shape)}")
    if not (np.isfinite(shown).all() and (shown >= 0).all()):
        raise ValueError(f"weights must be finite and >= 0, got {shown.min():.3g} to {shown.max():.3g}")
    if groups is not None and len(groups) != len(shown):
        raise ValueError(f"groups must name one group for each of {len(shown)} clients, got {len(groups)}")
    order = np.arange(len(shown)) if groups is None else np.argsort(np.asarray(groups), kind="stable")
    ax = _figure((4.6, 4.0)).add_subplot() if ax is None else ax
    image = ax.imshow(
        shown[np.ix_(order, order)], cmap=LinearSegmentedColormap.from_list("", ["white", _BLUE]), vmin=0, vmax=shown.max() or 1
    )
    if groups is not None:
        kinds = np.asarray(groups)[order]
        for place in np.flatnonzero(kinds[1:] != kinds[:-1]) + 0.5:
            ax.axhline(place, color="0.5", linewidth=0.8)
            ax.axvline(place, color="0.5", linewidth=0.8)
    named = np.arange(0, len(shown), max(1, -(-len(shown) // 20)))
    ax.set_xticks(named, [str(order[place]) for place in named])
    ax.set_yticks(named, [str(order[place]) for place in named])
    ax.tick_params(color="0.5", labelsize="x-small")
    ax.set(xlabel="whose model", ylabel="client", title=title or "")
    ax.figure.colorbar(image, ax=ax, label="weight", shrink=0.85)
    return ax


def _columns(name: str, history: Any) -> list[str]:
    """Names of a history's columns."""
    columns = getattr(history, "columns", None)  # of a History or a data frame
    if columns is None and not isinstance(history, Mapping):
        raise ValueError(f"{name!r}: a history must be a result, a result's history, or columns by name, got {type(history).__name__}")
    return list(history if columns is None else columns)


def _headline(columns: Sequence[Sequence[str]]) -> str:
    """The measure that all runs have and that sums one up."""
    for measure in HEADLINES:
        if all(measure in keys for keys in columns):
            return measure
    shared = [key for key in (columns[0] if columns else ()) if all(key in keys for keys in columns)]
    raise ValueError(
        f"metric must be given: not every history has {HEADLINES[0]!r}, nor every one {HEADLINES[1]!r}, which are written where a run is "
        f"evaluated; columns that all have are {shared}"
    )


def _curve(name: str, history: Any, columns: Sequence[str], x: str, metric: str) -> dict[float, float]:
    """{round: value} of one seed, without the rounds that were not evaluated."""
    for key in (x, metric):
        if key not in columns:
            raise ValueError(f"{name!r}: the history has no {key!r}; it has {list(columns)}")
    at, values = (np.asarray(history[key], dtype=np.float64) for key in (x, metric))
    if at.shape != values.shape or at.ndim != 1:
        raise ValueError(f"{name!r}: {x!r} and {metric!r} must be of one length, got shapes {at.shape} and {values.shape}")
    return {float(a): float(v) for a, v in zip(at, values, strict=True) if np.isfinite(v)}


def _predictions(source: Any, labels: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What to score, [J, N, O], [J, N] and [J, N], of a result or of what was given."""
    if hasattr(source, "predict") and hasattr(source, "data"):
        if labels is not None or mask is not None:
            raise ValueError("a result brings its own labels and mask; leave them out, or pass probabilities instead of the result")
        test = source.data.test
        probs = source.predict(test).probs
        if probs is None:
            raise ValueError("a reliability diagram needs class probabilities, and this result is of regression; look at its coverage")
        return (probs, *test.padded_labels())
    if labels is None and isinstance(source, (tuple, list)) and len(source) == 3:
        source, labels, mask = source
    if labels is None:
        raise ValueError("probabilities need labels: pass (probs, labels, mask), or a simulation's result")
    probs, labels = torch.as_tensor(source), torch.as_tensor(labels)
    mask = torch.ones_like(labels, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return (probs[None], labels[None], mask[None]) if probs.dim() == 2 else (probs, labels, mask)


def _risks(entry: Any) -> RiskCoverage:
    """The curve of a result, of (probs, labels, mask), or as it is."""
    if isinstance(entry, RiskCoverage):
        return entry
    probs, labels, mask = (t.cpu() for t in _predictions(entry, None, None))
    reliability_bins(probs, labels, mask)  # says what does not fit
    return risk_coverage_of(doubt(probs), probs.argmax(-1) == labels, mask)


def _covered(ax: "Axes", beneath: "Axes", found: Coverage, level: float) -> None:
    """Coverage by client in `ax`, mean set sizes in `beneath`."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    some = (found.tested > 0).numpy()
    client, share = np.arange(len(some))[some], found.share.numpy()[some]
    low, high = (t.numpy()[some] for t in found.chance(level))
    ax.bar(client, high - low, 0.6, bottom=low, color="#D9DDE1", linewidth=0, label=f"{100 * level:.0f}% by chance", gid="chance")
    inside = (low <= share) & (share <= high)
    for which, colour, marker, label in ((inside, _BLUE, "o", "a client"), (~inside, "#D55E00", "D", "a client beyond chance")):
        ax.plot(client[which], share[which], marker, color=colour, markersize=4.5, label=label, gid=label)
    ax.axhline(1 - found.alpha, linestyle=(0, (4, 3)), color=_INK, linewidth=1, label=f"asked for: {100 * (1 - found.alpha):g}%")
    lowest = min(float(share.min()), float(low.min()))
    ax.set(xlim=(-0.7, len(some) - 0.3), ylim=(max(0.0, lowest - 0.05), 1.02))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.tick_params(labelbottom=False)
    beneath.bar(client, found.size.numpy()[some], 0.6, color=_GREY, edgecolor="white", linewidth=0.6, gid="size")
    beneath.set(xlim=ax.get_xlim(), xlabel="client")
    beneath.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    beneath.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    for axes in (ax, beneath):
        _clean(axes)
        axes.grid(True, axis="y", color="0.9", linewidth=0.8)


def _figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=150, layout="constrained")


def _panels(
    panels: Mapping[str, ReliabilityBins], columns: int, *, size: tuple[float, float] = (3.0, 3.4), alike: bool = False
) -> tuple["Figure", np.ndarray]:
    """A grid of diagrams, the outer ones with the words; `alike` gives their histograms one scale."""
    if columns < 1:
        raise ValueError(f"columns is a number of diagrams in a row, >= 1; got {columns}")
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure((max(size[0] * columns, 3.6) + 0.4, size[1] * lines + 0.5))
    grid = figure.add_gridspec(2 * lines, columns, height_ratios=(4, 1) * lines)
    tallest = max(int(bins.count.max()) for bins in panels.values()) if alike else None
    axes = np.empty(len(panels), dtype=object)
    for place, (name, bins) in enumerate(panels.items()):
        line, column = divmod(place, columns)
        axes[place] = ax = figure.add_subplot(grid[2 * line, column])
        beneath = figure.add_subplot(grid[2 * line + 1, column], sharex=ax, label="histogram")
        _diagram(ax, beneath, bins, across=place + columns >= len(panels), up=column == 0, tallest=tallest)
        ax.set_title(name, fontsize="medium")
    figure.legend(handles=_key(), loc="outside lower center", ncols=3, frameon=False, fontsize="small", handlelength=1.3)
    return figure, axes


def _diagram(
    ax: "Axes", beneath: "Axes", bins: ReliabilityBins, *, across: bool = True, up: bool = True, tallest: int | None = None
) -> None:
    """One reliability diagram in `ax` and its histogram in `beneath`, which shares the x axis.

    Args:
        ax: Where the bars go.
        beneath: Where the histogram goes.
        bins: What to draw.
        across: Whether to write along the x axis.
        up: Whether to write along the y axes.
        tallest: Count that the histogram's axis reaches; by default its own largest.
    """
    from matplotlib.ticker import MaxNLocator

    left, width, filled = bins.edges[:-1], np.diff(bins.edges), bins.count > 0
    height = np.where(filled, bins.accuracy, 0.0)
    ax.bar(left, height, width, align="edge", color=_BLUE, alpha=0.85, edgecolor="white", linewidth=0.6, label="accuracy", gid="accuracy")
    low, high = np.fmin(bins.accuracy, bins.confidence), np.fmax(bins.accuracy, bins.confidence)
    over = filled & (bins.confidence >= bins.accuracy)
    for which, look in ((over, _OVER), (filled & ~over, _UNDER)):
        ax.bar(left[which], (high - low)[which], width[which], bottom=low[which], align="edge", linewidth=0.6, **look)
    ax.plot([0, 1], [0, 1], linestyle=(0, (4, 3)), color=_INK, linewidth=1, gid="diagonal")
    ax.set(xlim=(0, 1), ylim=(0, 1))
    _clean(ax)
    ax.grid(True, axis="y", color="0.9", linewidth=0.8)
    numbers = f"ECE {100 * bins.ece:.1f}%\nMCE {100 * bins.mce:.1f}%\nn = {bins.examples:,}" if bins.examples else "no examples"
    ax.text(
        0.97,
        0.04,
        numbers.replace(",", "\u2009"),
        transform=ax.transAxes,
        ha="right",
        va="bottom",
        fontsize="small",
        linespacing=1.4,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
    )
    beneath.bar(left, bins.count, width, align="edge", color=_GREY, edgecolor="white", linewidth=0.6, gid="count")
    if tallest:
        beneath.set_ylim(0, 1.05 * tallest)
    beneath.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
    beneath.set_xticks(np.linspace(0, 1, 6))
    _clean(beneath)
    ax.tick_params(labelbottom=False, labelleft=up)
    beneath.tick_params(labelbottom=across, labelleft=up or tallest is None)
    if across:
        beneath.set_xlabel("confidence")
    if up:
        ax.set_ylabel("accuracy")
        beneath.set_ylabel("examples", fontsize="small")


def _key() -> list[Any]:
    """What the colours of a diagram mean, for its legend."""
    from matplotlib.patches import Patch

    gaps = [
        Patch(facecolor=k["color"], edgecolor=k["edgecolor"], hatch=k["hatch"], linewidth=0.6, label=k["label"]) for k in (_OVER, _UNDER)
    ]
    return [Patch(facecolor=_BLUE, alpha=0.85, label="accuracy"), *gaps]


def _split(ax: "Axes") -> "Axes":
    """New axes in the lowest part of where `ax` stood, sharing its x axis."""
    spec, figure = ax.get_subplotspec(), ax.figure
    if spec is not None:
        upper, lower = spec.subgridspec(2, 1, height_ratios=(4, 1), hspace=0.04)
        ax.set_subplotspec(upper)
        return figure.add_subplot(lower, sharex=ax, label="histogram")
    box = ax.get_position()
    fifth = box.height / 5
    ax.set_position((box.x0, box.y0 + 1.15 * fifth, box.width, box.height - 1.15 * fifth))
    return figure.add_axes((box.x0, box.y0, box.width, fifth), sharex=ax, label="histogram")


def _clean(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("0.5")
    ax.tick_params(color="0.5", labelsize="small")
    ax.set_axisbelow(True)
