"""Predictors: personal predictions that need more than a client's weights, such as its training
data or several models.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs, at, count
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.options import Count, Natural, Positive, Range, declared
from bayesfl.base.protocols import Batch, FittedPredictor, Server, Tensors, View
from bayesfl.base.warning import warn
from bayesfl.composition.priors import Parameter
from bayesfl.curvature import Curvature, Inverse, invert
from bayesfl.curvature.batches import Data
from bayesfl.curvature.covariance import Covariance
from bayesfl.curvature.dual import ONE, independent
from bayesfl.curvature.factors import BLOCK
from bayesfl.curvature.ggn import Piece
from bayesfl.curvature.roots import check_known
from bayesfl.curvature.stack import Stack, Subnetworks, stackable
from bayesfl.likelihoods import Categorical
from bayesfl.models.cutting import has_body
from bayesfl.posteriors import prior_precision as precision
from bayesfl.posteriors.full_gaussian import FullGaussian
from bayesfl.posteriors.heads import Head, Hierarchy, Rows, Scaled
from bayesfl.posteriors.laplace import last_layer
from bayesfl.posteriors.linearised import Link, kappa, predictive
from bayesfl.posteriors.pooled import PooledCurvature, Structure
from bayesfl.posteriors.selection import ALIKE, Evidence, Rule, check_rule, select, size_of

if TYPE_CHECKING:
    from bayesfl.composition.algorithm import Algorithm


PRECISIONS = precision.GRID[::2]
"""Precisions that are tried on validation data, from 1e-4 to 1e4 by decades; under the largest,
predictions are close to the MAP's.
"""
# Below this median kappa, the factor that shrinks logits, the prior and not the data determines the
# predictions.
SHRUNK = 0.3
POOLED = "laplace"
"""Key of the state of `PooledLaplace`'s survey in the entries that clients receive."""
HEAD = "own_head"
"""Name of the block with each client's own Gaussian under `Heads`."""
HIERARCHY, SCALED = "heads", "heads-scaled"
"""Names of the surveys that `Heads` needs."""
EXACT = "donot_use_mm_for_euclid_dist"
"""Mode of `torch.cdist` that subtracts before it squares; otherwise distances of near rows are
rounding errors.
"""
SHARES = tuple(k / 20 for k in range(20))
"""Shares of a client's own rows that `Neighbours` tries on validation data; under a share of 1 a
class without a near row would have probability 0.
"""


@dataclass(frozen=True)
@declared(
    idle={("structure", other): ("share", "selection", "seed") for other in ("full", "diagonal")}
)
class LinearisedLaplace:
    """Predict from a Laplace approximation around a client's own weights, fitted to its training
    data, with the linearised network.

    Any method can have it: `replace(bf.algorithms.fedper(model), predictor=LinearisedLaplace())` is
    FedPer with a Laplace body.

    The curvature is computed from the client's *own* rows. If all clients' rows trained the
    weights, as in FedAvg, the posterior is too wide: two to five times for a linear model that
    eight clients share (docs/studies/truth.md). `PooledLaplace` uses all clients' rows.

    Args:
        block: Name of the block with uncertain weights, while others are constants; None for the
            first of the method's `parts`.
        structure: `full` (the whole block, in the dual form where N O is less than its weights),
            `subnetwork`, or `diagonal`.
        precision: Prior precision, for a likelihood that is a sum over the data: a number; a
            function (given, view) that returns a number or one for each weight, [D], such as a
            precision that the server has learnt; or None to choose one number for all clients on
            their validation data, under the link of the predictions.
        share: Share of the block's weights that are in a subnetwork, in (0, 1].
        selection: Rule that chooses each client's subnetwork, one of `bayesfl.selection`.
        seed: Seed of rules that draw; these give all clients the same subnetwork.
        link: How the Gaussian over the logits becomes probabilities: in closed form by `contrasts`,
            or `per_class` as in the papers on linearised networks (see
            `bayesfl.posteriors.linearised.predictive`); or by the method's number of `draws`. If
            that number is not 0, or a caller passes one, draws replace the closed form.
        centre: Whether logits are centred over classes, see `Laplace.linearised`; `per_class` alone
            depends on it.

    Raises:
        ValueError: `link` is not `per_class` and `centre` is False, or `selection` is unknown.

    Example:
        >>> from dataclasses import replace
        >>> plain = bf.algorithms.fedper(bf.models.mlp(64, hidden=8, outputs=10))
        >>> rule = bf.predictors.LinearisedLaplace(structure="diagonal", precision=10.0)
        >>> method = replace(plain, predictor=rule)
        >>> method.predictor.grid  # the prior precisions that are tried
        (10.0,)
    """

    block: str | None = None
    structure: Literal["full", "subnetwork", "diagonal"] = "full"
    precision: Annotated[float | Parameter | None, Range(0)] = None
    share: Annotated[float, Range(0, 1, "]")] = 0.05
    selection: Annotated[str | Rule, check_rule] = "wasserstein"
    seed: Natural = 0
    link: Link | Literal["draws"] = "contrasts"
    centre: bool = True
    tunes = "predictive_precision"
    reads = ()
    needs_data = True

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm; warn if all clients predict with one network.
        """
        _refuse_copies(self, algorithm)
        if self.block is not None and self.block not in algorithm.parts:
            raise ValueError(
                f"block {self.block!r} is not among the predictor's parts {algorithm.parts}; name "
                "one of them, or pass None for the first"
            )
        _check_linearised(self, algorithm)
        if not getattr(algorithm.likelihood, "plain", True):
            raise ValueError(
                f"{algorithm.likelihood} is a training loss without a Laplace approximation; use "
                f"{type(algorithm.likelihood).__name__}()"
            )
        own = algorithm.finetune or any(algorithm.blocks[part].keep for part in algorithm.parts)
        if not own and algorithm.shared_parts() == algorithm.parts:
            warn(
                "clients predict with the server's network, which all clients' rows have trained, "
                "but LinearisedLaplace uses the curvature of one client's rows: the posterior is "
                "too wide; use result.laplace() after training, or PooledLaplace()",
            )

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidate precisions, see `Predictor`; none if `precision` is a function."""
        if callable(self.precision):
            return ()
        return PRECISIONS if self.precision is None else (float(self.precision),)

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`."""
        own = self.precision(given, view) if callable(self.precision) else self.grid[0]
        layout = self._layout(algorithm)
        size = size_of(self.share, layout.size) if self.structure == "subnetwork" else layout.size
        step = max(1, BLOCK // (8 * size**2))  # factors in memory at once

        @cache
        def known() -> tuple[Curvature, Data | Piece, Tensor]:
            curvature = self._curvature(algorithm, view)
            rows = curvature.held(data, extra=size)
            return curvature, rows, curvature.diagonal(rows)

        @lru_cache(maxsize=1)  # because factors take most of the memory
        def inverses(values: tuple[float | None, ...]) -> list[Inverse]:
            curvature, rows, diagonal = known()
            precisions = [own if value is None else value for value in values]
            if self.structure == "diagonal":
                return [independent(curvature, curvature.vector(p), diagonal) for p in precisions]
            return [
                invert(
                    curvature,
                    rows,
                    some[0],
                    indices=indices,
                    diagonal=diagonal,
                    scale=ONE
                    if len(values) == 1
                    else diagonal.new_tensor([some[0] / p for p in some]),
                )
                for indices, alike in (
                    self._chosen(curvature, diagonal, precisions, size)
                    if self.structure == "subnetwork"
                    else [(None, precisions)]
                )
                for some in (alike[start : start + step] for start in range(0, len(alike), step))
            ]

        return _Linearised(self, algorithm, view, inverses)

    def together(self, algorithm: "Algorithm", view: View, x: Inputs) -> int:
        """Return the number of clients that are fitted at once, if one of them has this `view` and
        the training rows `x`, and the others as many rows or fewer; 1 if they cannot be.

        Predictions of a predictor with this method are in closed form, not by draws and not at the
        means.
        """
        curvature = self._curvature(algorithm, view)
        alike = self.structure == "subnetwork" and self.selection in ALIKE
        if not (alike and stackable(curvature, x)):
            return 1
        size = size_of(self.share, curvature.size)
        factors = BLOCK // (8 * size**2 * max(1, len(self.grid)))
        return min(factors, curvature.at_once(at(x, slice(1)), size) // count(x))

    def of_several(
        self, algorithm: "Algorithm", given: Server, views: View, data: Batch
    ) -> FittedPredictor:
        """Return the predictor of C clients: it predicts at [C N, *] inputs, N of each client in
        turn.

        Args:
            algorithm: The method.
            given: The entries that every client received.
            views: The clients' views, [C, ...].
            data: Their training rows, x [C, N, *], and the `weight` [C, N] of these, 0 for rows
                that pad a client.
        """
        curvature = self._curvature(algorithm, tree_map(lambda t: t[0], views))
        stack = Stack(curvature, algorithm.leaves(algorithm.parts, views))
        rows, diagonal = stack.held(data["x"], data["weight"])
        if callable(self.precision):
            each = [tree_map(lambda t, c=c: t[c], views) for c in range(len(diagonal))]
            own = torch.stack([curvature.vector(self.precision(given, view)) for view in each])
        else:
            own = self.grid[0]
        ((chosen, _),) = self._chosen(stack, diagonal, [own], size_of(self.share, rows.size))

        @lru_cache(maxsize=1)
        def inverses(values: tuple[float | None, ...]) -> list[Subnetworks]:
            first, *others = (own if value is None else value for value in values)
            scale = diagonal.new_tensor([1, *(first / p for p in others)]) if others else ONE
            return [stack.invert(rows, first, indices=chosen, diagonal=diagonal, scale=scale)]

        return _Linearised(self, algorithm, views, inverses)

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return the tensors from which `restored` predicts without training data, see
        `StoredPredictor`.
        """
        (inverse,) = fitted.inverses((value,))
        covariance = (
            inverse
            if isinstance(inverse, Covariance)
            else Covariance.of(cast(Inverse, inverse), limit=limit)
        )
        return covariance.tensors()

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor, made from `tensors`, see `StoredPredictor`."""
        covariance = Covariance.restored(self._curvature(algorithm, view), tensors)
        return _Linearised(self, algorithm, view, lambda _: [covariance])

    def _curvature(self, algorithm: "Algorithm", view: View) -> Curvature:
        return Curvature(
            algorithm.network(view), algorithm.likelihood, pattern=self._layout(algorithm)
        )

    def _layout(self, algorithm: "Algorithm") -> Layout:
        return algorithm.layout(algorithm.parts[0] if self.block is None else self.block)

    def _chosen(
        self, curvature: Curvature | Stack, diagonal: Tensor, precisions: list[Any], size: int
    ) -> Iterator[tuple[Tensor, list[Any]]]:
        """Yield the indices of subnetworks, each with the precisions under which it is chosen."""
        alike = self.selection in ALIKE and not callable(self.precision)
        for one in self.grid[:1] if alike else precisions:
            variance, loc = 1 / curvature.vector(one), curvature.weights
            evidence = Evidence(loc, diagonal, variance, self.seed)
            chosen = select(self.selection, evidence, size)
            yield chosen, precisions if alike else [one]


class _Untuned:
    """Define the defaults of a predictor that tunes no number and needs the client's view alone."""

    tunes = ""
    grid = ()
    reads = ()
    centre = True
    needs_data = False

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return nothing, because the view has all weights, see `StoredPredictor`."""
        return {}

    def restored(
        self: Any, algorithm: "Algorithm", view: View, tensors: Tensors
    ) -> FittedPredictor:
        """Return one client's predictor, see `StoredPredictor`."""
        return self(algorithm, {}, view, {})


@dataclass(frozen=True)
@declared
class LinearisedBelief(_Untuned):
    """Predict from the Gaussian posteriors of blocks, with the network linearised around their
    means.

    It fits every block with a posterior that draws, such as `pfedvem`'s head, a mean field over all
    weights, or online Laplace; for a `FullGaussian` it uses all covariances. It needs neither
    training nor validation data. Draws of many weights leave the region of the trained network and
    may predict other classes. Under link="contrasts" the linearised network predicts the classes of
    its mean. A posterior that is too wide still makes predictions underconfident.

    Args:
        block: Name of the block with uncertain weights, while others are constants at their means;
            None for all of the method's `parts` that draw, as independent.
        link: As in `LinearisedLaplace`.
        centre: As in `LinearisedLaplace`.

    References:
        Immer, Korzepa, Bauer, "Improving predictions of Bayesian neural nets via local
        linearization", AISTATS 2021.

    Example:
        >>> from dataclasses import replace
        >>> plain = bf.algorithms.pfedvem(bf.models.mlp(64, hidden=8, outputs=10))
        >>> replace(plain, predictor=bf.predictors.LinearisedBelief("head")).predictor.block
        'head'
    """

    block: str | None = None
    link: Link | Literal["draws"] = "contrasts"
    centre: bool = True
    precision = None

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm.
        """
        _refuse_copies(self, algorithm)
        drawn = [name for name in algorithm.parts if algorithm.blocks[name].stochastic]
        if not drawn or self.block not in (None, *drawn):
            holds = (
                "no block holds" if self.block is None else f"block {self.block!r} does not hold"
            )
            raise ValueError(
                f"{holds} a Gaussian: among the parts {algorithm.parts}, those that draw are "
                f"{drawn}; name one of them, or use LinearisedLaplace(), which computes a Gaussian "
                "from training data"
            )
        _check_linearised(self, algorithm)

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`."""
        names = (
            [part for part in algorithm.parts if algorithm.blocks[part].stochastic]
            if self.block is None
            else [self.block]
        )
        variances: Tensors = {}
        roots: list[Tensors] = []
        for name in names:
            layout, posterior = algorithm.layout(name), algorithm.blocks[name].posterior
            variance = posterior.moments(view[name])[1]
            if isinstance(posterior, FullGaussian):
                roots.append(layout.leaves(posterior.cholesky(view[name]).mT))
                variance = torch.zeros_like(variance)
            variances |= layout.leaves(variance)
        layout = Layout(algorithm.model, tuple(variances))
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
        variance = layout.ravel(variances).double().clamp_max(1e29)
        rows = [variance.new_zeros(0, len(variance))]
        for root in roots:
            count = len(next(iter(root.values())))
            nothing = {key: t.new_zeros(count, *t.shape) for key, t in variances.items()}
            rows.append(layout.ravel(nothing | root).double())
        every = torch.ones_like(variance, dtype=torch.bool)
        covariance = Covariance(curvature, variance, torch.cat(rows).mT, 1, every, None)
        return _Linearised(self, algorithm, view, lambda _: [covariance])


@dataclass(frozen=True)
@declared(idle={("structure", "last_layer"): ("pattern",)})
class PooledLaplace(_Untuned):
    """Predict from the Laplace approximation of the server's model on the training rows of *all*
    clients, with the linearised network.

    A survey sums the clients' curvatures (`bayesfl.posteriors.pooled`). Every client, also one that
    joins later, predicts from the posterior of a fit to the pooled rows. `Result.laplace` computes
    it after training, for any method with one network on the server. As a method's predictor,
    `replace(bf.algorithms.fedavg(model), predictor=PooledLaplace())`, it surveys clients at each
    evaluation, also over Flower.

    Args:
        structure: Which covariances are kept: `last_layer`, all of the last layer's weights;
            `diagonal`, none; `kfac`, two factors for each layer; `full`, all.
        precision: Prior precision of every weight, for a likelihood that is a sum over the rows; or
            `evidence` for the one of largest log marginal likelihood.
        pattern: Pattern over the names of the uncertain parameters, such as `head.*`; others are
            constants.

    Raises:
        ValueError: `structure` is `last_layer` and a pattern is given.

    Example:
        >>> from dataclasses import replace
        >>> plain = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> clients = bf.data.iid("digits", clients=2)
        >>> method = replace(plain, predictor=bf.predictors.PooledLaplace(precision=1.0))
        >>> bf.simulate(method, clients, rounds=1).posterior
        Laplace(full, 90 of 90 weights, 1438 examples, precision 1)
    """

    structure: Structure = "last_layer"
    precision: Annotated[float, Range(0)] | Literal["evidence"] = "evidence"
    pattern: Pattern = "*"
    link: ClassVar[Link] = "contrasts"

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm.
        """
        check_known(algorithm.likelihood)
        kept = [name for name in algorithm.parts if algorithm.blocks[name].keep]
        if kept or algorithm.finetune or algorithm.shared_parts() != algorithm.parts:
            what = f"keep {kept}" if kept else "fine-tune, or predict by several networks"
            raise ValueError(
                f"clients {what}, but a pooled Laplace approximation needs one network that the "
                "server sends to all: train without it, and use result.laplace()"
            )
        self._layout(algorithm)

    def asks(
        self, algorithm: "Algorithm", server: Server, known: Mapping[str, Tensors]
    ) -> tuple[str, PooledCurvature] | None:
        """Return the name of the next survey that predictions need and the survey, here that of
        clients' curvature; None after the last one.

        The surveys run before clients predict, in a simulation and over a network. A survey's
        `reads` names its input: `rows`, as `LocalRows`; `predictions`, as `LocalPredictions` under
        the states known so far; or the last layer, `head`, as `LocalHeads` from the predictor's own
        `rows(algorithm, view, x, y)`, which needs the model for the first question only. The
        predictor finds the last states in `given`, by name. They are absent if clients predict
        before aggregation, or at the means.

        Args:
            algorithm: The method.
            server: The server's state, or what it sends to every client.
            known: The last states of the surveys so far, by their names.
        """
        return None if POOLED in known else (POOLED, self.question(algorithm, server))

    def question(self, algorithm: "Algorithm", given: Server) -> PooledCurvature:
        """Return the survey of clients' curvature.

        Args:
            algorithm: The method.
            given: Entries that every client receives, or the server's state.
        """
        own = {name: algorithm.centre(name, given) for name in algorithm.whole(algorithm.parts)}
        return PooledCurvature(
            algorithm.network(own | {"n": next(iter(own.values()))["loc"].new_ones(())}),
            self.structure,
            self.precision,
            self._layout(algorithm),
            algorithm.likelihood,
        )

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`; `given` has the survey's state as
        `POOLED`. Before models are aggregated there is none, and a client predicts at the mean.
        """
        if POOLED not in given:
            return lambda x, **_: _at_mean(algorithm, view, x)
        return self.restored(algorithm, view, given[POOLED])

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return the survey's state, see `StoredPredictor`."""
        for name, t in fitted.state.items():
            if t.nbytes > limit:
                raise MemoryError(f"its {name} takes {t.nbytes} bytes, more than {limit}")
        return fitted.state

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor, see `StoredPredictor`."""

        @cache
        def inverse() -> Any:
            # All clients have the server's weights, so that a view has them, too.
            return self.question(algorithm, view).posterior(tensors).inverse

        return _Linearised(self, algorithm, view, lambda _: [inverse()], tensors)

    def _layout(self, algorithm: "Algorithm") -> Layout:
        last = self.structure == "last_layer"
        return Layout(algorithm.model, last_layer(algorithm.model) if last else self.pattern)


@dataclass(frozen=True)
class Heads(_Untuned):
    """Predict with each client's own head, a Gaussian of all weights of the network's last layer,
    the block `own_head`; `bf.with_heads` makes such methods.

    Surveys estimate a normal prior that all heads share, and how much of the heads' uncertainty
    helps predictions (`bayesfl.posteriors.heads`). A client's Gaussian is the posterior given its
    training rows under this prior, also for a client that joins later.

    Example:
        >>> plain = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10))
        >>> bf.with_heads(plain).predictor
        Heads()
    """

    link: ClassVar[Link] = "contrasts"
    precision = None
    needs_data = True

    def check(self, algorithm: "Algorithm") -> None:
        """Raise TypeError for a likelihood of unknown curvature."""
        check_known(algorithm.likelihood)

    def asks(
        self, algorithm: "Algorithm", server: Server, known: Mapping[str, Tensors]
    ) -> tuple[str, Hierarchy | Scaled] | None:
        """Return the next survey: first of the heads' common prior, then of the widths of the prior
        and of the predictions, see `PooledLaplace.asks`.
        """
        head = self._head(algorithm)
        if HIERARCHY not in known:
            centre = server[HEAD]["loc"].double().cpu()
            return HIERARCHY, Hierarchy(head, algorithm.layout(HEAD).sizes, centre)
        return None if SCALED in known else (SCALED, Scaled(head, _on_cpu(known[HIERARCHY])))

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`; `given` has the surveys' states as
        `HIERARCHY` and `SCALED`. Without them a client predicts with the head that all share.
        """
        if SCALED not in given:
            return lambda x, **_: _at_mean(algorithm, view, x)
        prior, scaled = _on_cpu(given[HIERARCHY]), _on_cpu(given[SCALED])
        prior["tau"] = prior["tau"] * scaled["scale"]
        rows = self.rows(algorithm, view, data["x"], data["y"])
        found = FullGaussian().of_moments(*self._head(algorithm).posterior(rows, prior))
        own = {name: t.to(view[HEAD]["loc"]) for name, t in found.items()}
        return self.restored(algorithm, view | {HEAD: own}, {"width": scaled["width"]})

    def rows(self, algorithm: "Algorithm", view: View, x: Inputs, y: Tensor) -> Rows:
        """Return the statistics of a client's rows for its last layer.

        Raises:
            ValueError: The linear layer that the network declares last does not compute its
                outputs.
        """
        layout = algorithm.layout(HEAD)
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
        found = curvature.last_layer(x)
        if found is None:
            raise ValueError(
                f"the linear layer that the network declares last, {layout.names}, does not "
                "compute its outputs: declare the one that does last in __init__; its weights keep "
                "their names"
            )
        features = found[0]
        if len(layout.names) == 2:
            features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        return Rows(features.cpu(), y.cpu())

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return the factor of the Gaussian's width, see `StoredPredictor`; the Gaussian itself is
        in the predictor's view.
        """
        return fitted.state

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor from the Gaussian in its view, see `StoredPredictor`."""
        layout = algorithm.layout(HEAD)
        root = tensors["width"].double() * FullGaussian().cholesky(view[HEAD]).double()
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
        every = root.new_ones(layout.size, dtype=torch.bool)
        covariance = Covariance(curvature, root.new_zeros(layout.size), root, 1, every, None)
        return _Linearised(self, algorithm, view, lambda _: [covariance], tensors)

    @staticmethod
    def _head(algorithm: "Algorithm") -> Head:
        layout = algorithm.layout(HEAD)
        outputs = layout.shapes[layout.names[0]][0]
        return Head(outputs, len(layout.names) == 2, algorithm.likelihood)


def _on_cpu(state: Tensors) -> Tensors:
    return {name: t.cpu() for name, t in state.items()}


@dataclass(frozen=True)
class Mixture(_Untuned):
    """Predict with all copies of a block together: sum_m pi_m p(y | x, copy m), each copy at its
    mean.

    Probabilities are averaged, not logits. For targets, the result has the moments of the mixture.
    The ends of quantile intervals are averaged. Copies of weight 0 do not contribute.

    Args:
        block: Name of the block with copies.
        weights: Name of the mixture weights pi [M] in a client's view.

    Example:
        >>> bf.algorithms.fedem(bf.models.mlp(64, hidden=8, outputs=10)).predictor
        Mixture(block='components', weights='pi')
    """

    block: str
    weights: str

    @property
    def reads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the name of the weights, see `StoredPredictor`."""
        return (self.weights,)

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError if the predictor does not fit the algorithm."""
        if self.block not in algorithm.parts or algorithm.blocks[self.block].copies is None:
            raise ValueError(
                f"block {self.block!r} must be one of the predictor's parts {algorithm.parts} and "
                "have copies"
            )

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`."""
        pi = view[self.weights]
        copies = pi.nonzero().flatten().tolist()
        views = [algorithm.of_copy(algorithm.parts, view, m) for m in copies]

        def predict(x: Inputs, **_: Any) -> Tensors:
            found = [_at_mean(algorithm, one, x) for one in views]
            stacked = {name: torch.stack([one[name] for one in found], -1) for name in found[0]}
            return _mixed(stacked, pi[copies])

        return predict

    def mixed(self, found: Tensors, view: View) -> Tensors:
        """Return the predictions of clients [C, N, ...] from those of their copies at the means,
        [C, M, N, ...].
        """
        return _mixed({name: t.movedim(1, -1) for name, t in found.items()}, view[self.weights])


def _mixed(stacked: Tensors, pi: Tensor) -> Tensors:
    """Return the prediction of a mixture from those of its copies, [..., M], and their weights pi
    [M], or [C, M] for several clients; copies of weight 0 do not contribute.
    """

    def weighed(t: Tensor) -> Tensor:
        shares = pi.reshape(*pi.shape[:-1], *[1] * (t.dim() - pi.dim()), -1)
        return torch.where(shares > 0, t * shares, 0.0).sum(-1)

    mean = {name: weighed(t) for name, t in stacked.items()}
    if "variance" in mean:
        apart = stacked["mean"] - mean["mean"].unsqueeze(-1)
        mean["variance"] = mean["variance"] + weighed(apart.square())
    return mean


@dataclass(frozen=True, eq=False)
class _Linearised:
    """Predict for one client with the linearised network, see `FittedPredictor`.

    Args:
        rule: The method's predictor.
        algorithm: The method.
        view: The client's view.
        inverses: Function from prior precisions that are tried, or None, to the covariances of the
            weights.
        state: Stored results of the surveys that `PooledLaplace` and `Heads` need.
    """

    rule: "LinearisedLaplace | LinearisedBelief | PooledLaplace | Heads"
    algorithm: "Algorithm"
    view: View
    inverses: Callable[[tuple[float | None, ...]], list[Any]]
    state: Tensors = field(default_factory=dict)

    def __call__(
        self,
        x: Inputs,
        *,
        value: float | tuple[float, ...] | None = None,
        noise: Tensor | None = None,
        plain: bool = False,
    ) -> Tensors:
        """Return the prediction, see `FittedPredictor`."""
        if plain:
            return _at_mean(self.algorithm, self.view, x)
        several = isinstance(value, tuple)
        found = [
            self._of(inverse, x, noise) for inverse in self.inverses(value if several else (value,))
        ]
        joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        return joined if several else {name: t[0] for name, t in joined.items()}

    def _of(self, inverse: Any, x: Inputs, noise: Tensor | None) -> Tensors:
        """Return the predictions under the covariances of an inverse, [G, N, ...]; warn if the
        prior determines them, under a given precision.
        """
        rule, likelihood = self.rule, self.algorithm.likelihood
        mean, covariance = inverse.predict(
            {"x": x}, centre=rule.centre and isinstance(likelihood, Categorical)
        )
        # Kappa is defined for logits, not for the variance of targets.
        classes = likelihood.task == "classification"
        fixed = rule.precision not in (None, "evidence") and classes
        if fixed and self._shrunk(covariance.diagonal(dim1=-2, dim2=-1)):
            which = (
                "the precision that the method computes"
                if callable(rule.precision)
                else f"predictive_precision={rule.precision}"
            )
            warn(
                f"{which} lets the prior determine the predictions (the median kappa is below "
                f"{SHRUNK}); choose a precision on validation data: predictive_precision=None "
                "under an isotropic prior",
            )
        link: Link = "contrasts" if rule.link == "draws" else rule.link
        count = covariance.shape[:-3].numel()
        noise = None if noise is None else noise.repeat(1, count, 1)
        return {
            name: t.to(self.view["n"]).unflatten(0, (count, -1))
            for name, t in predictive(
                likelihood, mean.repeat(count, 1), covariance.flatten(0, -3), noise, link=link
            ).items()
        }

    def _shrunk(self, variance: Tensor) -> bool:
        """Return whether the logits of a client, of variances [G, N, O], shrink to the prior's."""
        clients = self.view["n"].numel()
        each = kappa(variance).unflatten(-2, (clients, -1)).movedim(-3, 0).flatten(1)
        return bool((each.median(1).values < SHRUNK).any())


@dataclass(frozen=True)
@declared
class Neighbours:
    """Predict from the model and from a client's own nearest rows.

    Args:
        k: Number of nearest rows; all rows if a client has fewer.
        scale: Divisor of distances.
        share: Share lam of the rows in the prediction: a number; `own`, the share with the largest
            mean log likelihood of the client's validation rows, 0 for a client without any; or
            `common`, one for all clients, chosen on the validation rows of all.

    Example:
        >>> bf.algorithms.knn_per(bf.models.mlp(64, hidden=8, outputs=5), share=0.5).predictor
        Neighbours(k=10, scale=1.0, share=0.5)
    """

    k: Count = 10
    scale: Positive = 1.0
    share: Annotated[float, Range(0, 1, "[]")] | Literal["own", "common"] = "own"
    tunes = "share"
    reads = ()
    needs_data = True

    @property
    def validates(self) -> bool:
        """Return whether each client chooses its own share, see `Predictor`."""
        return self.share == "own"

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the shares that are tried for all clients, see `Predictor`."""
        if isinstance(self.share, str):
            return SHARES if self.share == "common" else ()
        return (self.share,)

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError if rows cannot vote, or there are no features."""
        if not isinstance(algorithm.likelihood, Categorical) or not has_body(algorithm.model):
            raise ValueError(
                "neighbours are found in a network's features, and vote for classes: use "
                "likelihood=Categorical() and a bf.models.SplitModel with a trained body"
            )

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`."""
        features: Any = algorithm.features(algorithm.leaves(algorithm.parts, view), data["x"])[0]
        rows = {"features": features, "labels": data["y"]}
        if self.validates:
            x, y = data["validation"]["x"], data["validation"]["y"]
            probs = self._predict(algorithm, view, rows, x, value=SHARES)["probs"]
            losses = -probs[:, torch.arange(len(y)), y].log().sum(1)
            rows["share"] = losses.new_tensor(SHARES)[losses.argmin()]
        return self.restored(algorithm, view, rows)

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return the features and labels of the client's rows, and its own share if it has one, see
        `StoredPredictor`.
        """
        return fitted.args[-1]

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor from its rows' features, see `StoredPredictor`."""
        return partial(self._predict, algorithm, view, tensors)

    def _predict(
        self,
        algorithm: "Algorithm",
        view: View,
        rows: Tensors,
        x: Inputs,
        *,
        value: Any = None,
        noise: Tensor | None = None,
        plain: bool = False,
    ) -> Tensors:
        """Return the predictions at `x`; with `plain`, the model's alone."""
        features, outputs = algorithm.features(algorithm.leaves(algorithm.parts, view), x)
        share = 0.0 if plain else rows.get("share", self.grid[:1]) if value is None else value
        lam = torch.as_tensor(share, dtype=outputs.dtype, device=outputs.device)[..., None, None]
        mixed = lam * self._votes(rows, features, outputs) + (1 - lam) * outputs.softmax(-1)
        found = algorithm.likelihood.predictive(mixed.log().unsqueeze(-3))
        return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}

    def _votes(self, rows: Tensors, features: Any, outputs: Tensor) -> Tensor:
        """Return p_kNN [N, O] at features [N, F] from rows' `features` [n, F] and `labels` [n]."""
        held, labels = rows["features"].to(features), rows["labels"]
        apart = torch.cdist(features, held, compute_mode=EXACT).square() / features.shape[-1]
        near, places = apart.topk(min(self.k, len(labels)), largest=False)
        weights = (-near / self.scale).softmax(-1)
        return torch.zeros_like(outputs).scatter_add(-1, labels[places], weights)


def _at_mean(algorithm: "Algorithm", view: View, x: Inputs) -> Tensors:
    """Return the prediction at `x` [N, *] with one client's blocks at their means; its epistemic
    part is NaN.
    """
    found = algorithm.likelihood.predictive(
        algorithm.outputs(algorithm.leaves(algorithm.parts, view), x).unsqueeze(0)
    )
    return found | {"epistemic": torch.full_like(found["epistemic"], torch.nan)}


def _check_linearised(rule: "LinearisedLaplace | LinearisedBelief", algorithm: "Algorithm") -> None:
    """Raise TypeError for a likelihood of unknown curvature, ValueError for draws without a
    number.
    """
    check_known(algorithm.likelihood)
    if rule.link == "draws" and not algorithm.draws:
        raise ValueError(
            "link='draws' needs a number of draws for predictions: dataclasses.replace(method, "
            "draws=100, predictor=...); the option draws of methods such as pfedvem is for "
            "training steps. Or use link='contrasts'"
        )


def _refuse_copies(rule: "LinearisedLaplace | LinearisedBelief", algorithm: "Algorithm") -> None:
    """Raise ValueError if a method predicts with several copies, because the rule linearises one
    network.
    """
    if (copies := algorithm.copies(algorithm.parts)) is not None:
        several = next(part for part in algorithm.parts if algorithm.blocks[part].copies)
        raise ValueError(
            f"{type(rule).__name__} linearises one network, and block {several!r} has {copies} "
            f"copies; use Mixture({several!r}, 'pi'), with the name of the mixture's weights for "
            "'pi'"
        )
