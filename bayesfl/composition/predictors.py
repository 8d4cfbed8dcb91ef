"""Predictors: personal predictions that need more than a client's weights, such as its training
data or several models.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs, at, count, pieces
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
from bayesfl.posteriors.mixture import responsibilities
from bayesfl.posteriors.pooled import PooledCurvature, Structure
from bayesfl.posteriors.selection import ALIKE, Evidence, Rule, check_rule, select, size_of

if TYPE_CHECKING:
    from bayesfl.composition.algorithm import Algorithm


PRECISIONS = precision.GRID[::2]
"""Precisions that are tried on validation data, from 1e-4 to 1e4 by decades; under the largest,
predictions are close to the MAP's.
"""
# below this median kappa (factor by which logits shrink) the prior, not the data, determines the
# predictions
SHRUNK = 0.3
POOLED = "laplace"
"""Under this name clients are told the state of the survey that `PooledLaplace` needs."""
HEAD = "own_head"
"""The name of the block of which each client has a Gaussian under `Heads`."""
HIERARCHY, SCALED = "heads", "heads-scaled"
"""The names of the surveys that `Heads` needs."""
EXACT = "donot_use_mm_for_euclid_dist"
"""Differences before squares: the distances of near rows would be rounding otherwise."""
SHARES = tuple(k / 20 for k in range(21))
"""Shares of a client's own rows that `Neighbours` tries on validation data."""
PIECE = 2**21  # bytes of inputs that pass through the copies of a mixture at once


@dataclass(frozen=True)
@declared(
    idle={("structure", other): ("share", "selection", "seed") for other in ("full", "diagonal")}
)
class LinearisedLaplace:
    """Predict from a Laplace approximation around a client's own weights, fitted to its training
    data, with the linearised network.

    Any method can have it: `replace(bf.algorithms.fedper(model), predictor=LinearisedLaplace())` is
    FedPer with a Laplace body.

    The curvature is that of the client's *own* rows, also around weights that were trained on the
    rows of all, as FedAvg's: the posterior is then too wide, two to five times for a linear
    model that eight clients share (docs/studies/truth.md). `PooledLaplace` has the rows of all.

    Args:
        block: Name of the block whose weights are uncertain, while the others are constants; None
            for the first of the method's `parts`.
        structure: `full` (the whole block, in the dual form where N O is less than its weights),
            `subnetwork`, or `diagonal`.
        precision: Prior precision, for a likelihood that is a sum over the data: a number; a
            function of what the client received and its view, for one that the server has learnt,
            returning a number or one for each weight, [D]; or None to choose a number for all
            clients on their validation data, under the link by which they predict.
        share: Share of the block's weights that are in a subnetwork, in (0, 1].
        selection: Rule that chooses the subnetwork, one of `bayesfl.selection`, used anew for every
            client.
        seed: Seed of rules that draw, which give all clients the same subnetwork.
        link: How the Gaussian over the logits becomes probabilities: in closed form by `contrasts`,
            or `per_class` as in the papers on linearised networks (see
            `bayesfl.posteriors.linearised.predictive`); or by the method's number of `draws`. Where
            that number is not 0, or a caller asks for draws, they take the place of a closed form.
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

    def __repr__(self) -> str:
        return _of_rows(self, "each client's own")

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm; warn where all clients predict with one network.
        """
        _refuse_copies(self, algorithm)
        self.check_one(algorithm)
        own = algorithm.finetune or any(algorithm.blocks[part].keep for part in algorithm.parts)
        if not own and algorithm.shared_parts() == algorithm.parts:
            warn(
                "clients predict with the server's network, which the rows of all have trained, "
                "and LinearisedLaplace has the curvature of one client's rows: the posterior is "
                "too wide; take result.laplace() after training, or PooledLaplace()",
            )

    def check_one(self, algorithm: "Algorithm") -> None:
        """Raise as `check` does, for the predictor of one of a method's copies."""
        if self.block is not None and self.block not in algorithm.parts:
            raise ValueError(
                f"block {self.block!r} is none of the predictor's parts {algorithm.parts}; name "
                "one of them, or None for the first"
            )
        _check_linearised(self, algorithm)
        if not getattr(algorithm.likelihood, "plain", True):
            raise ValueError(
                f"{algorithm.likelihood} is a training loss without a Laplace approximation; "
                f"take {type(algorithm.likelihood).__name__}()"
            )

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidate precisions, see `Predictor`; none where a function gives the
        precision.
        """
        if callable(self.precision):
            return ()
        return PRECISIONS if self.precision is None else (float(self.precision),)

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`; a `weight` [N] in `data` says how many
        times each example counts.
        """
        own = self.precision(given, view) if callable(self.precision) else self.grid[0]
        layout, weight = self._layout(algorithm), data.get("weight")
        size = size_of(self.share, layout.size) if self.structure == "subnetwork" else layout.size
        step = max(1, BLOCK // (8 * size**2))  # factors that are held at once

        @cache
        def known() -> tuple[Curvature, Data | Piece, Tensor]:
            curvature = self._curvature(algorithm, view)
            rows = curvature.held(data, weight, extra=size)
            return curvature, rows, curvature.diagonal(rows, weight=weight)

        @lru_cache(maxsize=1)  # as factors take most of the memory
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
                    weight=weight,
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
        """Return the number of clients whose subnetworks are fitted at once, see
        `JoinedPredictor`.
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
        """Return the predictor of several clients, see `JoinedPredictor`."""
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
        """Return the tensors by which `restored` predicts without training data, see
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
        """Return one client's predictor, made of `tensors`, see `StoredPredictor`."""
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
    """Declare what holds of a predictor that tunes no number, unless it says otherwise."""

    tunes = ""
    grid = ()
    reads = ()
    centre = True
    needs_data = False


@dataclass(frozen=True)
@declared
class LinearisedBelief(_Untuned):
    """Predict from the Gaussians that blocks already hold, with the network linearised around their
    means.

    Any block whose posterior draws can have it, as that of `pfedvem`, of a mean-field posterior on
    all weights, or of online Laplace; of a `FullGaussian` all covariances count. It needs no
    training data and no validation data. Where weights are many, draws of them leave the region in
    which the network is as it was trained, and may predict other classes; under link="contrasts"
    the linearised network keeps the classes of its mean. A belief that is too wide makes it
    underconfident all the same.

    Args:
        block: Name of the only block whose Gaussian counts, the others being constants, at their
            means; None for all of the method's `parts` that draw, which are independent.
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
        self.check_one(algorithm)

    def check_one(self, algorithm: "Algorithm") -> None:
        """Raise as `check` does, for the predictor of one of a method's copies."""
        drawn = [name for name in algorithm.parts if algorithm.blocks[name].stochastic]
        if not drawn or self.block not in (None, *drawn):
            holds = (
                "no block holds" if self.block is None else f"block {self.block!r} does not hold"
            )
            raise ValueError(
                f"{holds} a Gaussian: of the parts {algorithm.parts} those that draw are {drawn}; "
                "name one of them, or take LinearisedLaplace(), which makes a Gaussian of "
                "training data"
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

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return nothing, since the belief is all, see `StoredPredictor`."""
        return {}

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor, see `StoredPredictor`."""
        return self(algorithm, {}, view, {})


@dataclass(frozen=True)
@declared(idle={("structure", "last_layer"): ("pattern",)})
class PooledLaplace(_Untuned):
    """Predict from the Laplace approximation of the server's model on the training rows of *all*
    clients, with the linearised network.

    The clients' curvatures are summed by a survey (`bayesfl.posteriors.pooled`), so that every
    client predicts by the posterior that a fit to the pooled rows would have; one that joins later
    does, too. `Result.laplace` makes it after training, of any method that has one network on the
    server. As a method's predictor, `replace(bf.algorithms.fedavg(model),
    predictor=PooledLaplace())`, it asks at each evaluation, also over Flower.

    Args:
        structure: Which covariances are kept: `last_layer`, all of the last layer's weights;
            `diagonal`, none; `kfac`, two factors for each layer; `full`, all.
        precision: Prior precision of every weight, for a likelihood that is a sum over the rows; or
            `evidence` for the one of largest log marginal likelihood.
        pattern: Which parameters are covered, a pattern over their names such as `head.*`; the
            others are constants.

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

    def __repr__(self) -> str:
        return _of_rows(self, "all clients'")

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm.
        """
        check_known(algorithm.likelihood)
        kept = [name for name in algorithm.parts if algorithm.blocks[name].keep]
        if kept or algorithm.finetune or algorithm.shared_parts() != algorithm.parts:
            what = f"keep {kept}" if kept else "fine-tune, or predict by several networks"
            raise ValueError(
                f"clients {what}, and a pooled Laplace approximation is one of the network that "
                "the server sends to all: train without it, and take result.laplace()"
            )
        self._layout(algorithm)

    def asks(
        self, algorithm: "Algorithm", server: Server, known: Mapping[str, Tensors]
    ) -> tuple[str, PooledCurvature] | None:
        """Return the survey of clients' curvature, once, see `AskingPredictor`."""
        return None if POOLED in known else (POOLED, self.question(algorithm, server))

    def question(self, algorithm: "Algorithm", given: Server) -> PooledCurvature:
        """Return the survey of clients' curvature.

        Args:
            algorithm: The method.
            given: What every client receives, or the server's state.
        """
        return PooledCurvature(
            algorithm.network(self._view(algorithm, given)),
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

    def _view(self, algorithm: "Algorithm", given: Server) -> View:
        own = {name: algorithm.centre(name, given) for name in algorithm.whole(algorithm.parts)}
        return own | {"n": next(iter(own.values()))["loc"].new_ones(())}

    def _layout(self, algorithm: "Algorithm") -> Layout:
        last = self.structure == "last_layer"
        return Layout(algorithm.model, last_layer(algorithm.model) if last else self.pattern)


@dataclass(frozen=True)
class Heads(_Untuned):
    """Predict with a head of each client's own, a Gaussian of all the weights of the block
    `own_head`, which is the network's last layer; `bf.with_heads` makes methods that have it.

    The clients' surveys find what their heads have in common, a normal prior, and how much of the
    heads' uncertainty helps predictions (`bayesfl.posteriors.heads`). A client's Gaussian is that
    of its training rows under this prior; so one that joins later has a head, too.

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
        """Return the next survey: of what heads have in common, and then of how wide their prior
        and their predictions are, see `AskingPredictor`.
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
        """Return what a client's rows say of its last layer.

        Raises:
            ValueError: The linear layer that the network declares last does not make its outputs.
        """
        layout = algorithm.layout(HEAD)
        curvature = Curvature(algorithm.network(view), algorithm.likelihood, pattern=layout)
        found = curvature.last_layer(x)
        if found is None:
            raise ValueError(
                f"the linear layer that the network declares last, {layout.names}, does not make "
                "its outputs: declare the one that does last in __init__; its weights keep their "
                "names"
            )
        features = found[0]
        if len(layout.names) == 2:
            features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        return Rows(features.cpu(), y.cpu())

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return how much of the Gaussian's width counts, see `StoredPredictor`; the Gaussian
        itself is in the predictor's view.
        """
        return fitted.state

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor by the Gaussian in its view, see `StoredPredictor`."""
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


def _of_rows(rule: "LinearisedLaplace | PooledLaplace", whose: str) -> str:
    """Return a predictor's options, and of whose rows its curvature is, as text."""
    options = ", ".join(f"{of.name}={getattr(rule, of.name)!r}" for of in fields(rule))
    return f"{type(rule).__name__}({options}; the curvature of {whose} rows)"


@dataclass(frozen=True)
class Mixture:
    """Predict with all copies of a block together: sum_m pi_m p(y | x, copy m), each copy at its
    mean or by a posterior of its own.

    Probabilities are averaged, not logits; for targets, the result has the moments of the mixture;
    of intervals by quantiles the ends are averaged. Copies of weight 0 take no part.

    `Mixture("components", "pi", each=LinearisedLaplace())` makes a Laplace approximation of each of
    FedEM's components, under one precision, which is chosen for the predictions of the mixture.
    That of copy m is fitted to the client's training data, where example i counts by its
    responsibility q_im = pi_m p(y_i | x_i, w_m) / sum_k pi_k p(y_i | x_i, w_k), as in EM's M step,
    so its precision is sum_i q_im J_i' Lambda_i J_i plus the prior's, and a copy that explains no
    example keeps the prior. The responsibilities are constants: the curvature of the mixture's
    likelihood itself has further terms, since they move with the weights.

    With `each`, `epistemic` is the entropy of the mixture's probabilities less `aleatoric`, the
    mean over copies, by pi, of their own, and at least 0; by draws it is the mutual information of
    label and (copy, weights). So it holds what the copies disagree on, although more data may never
    tell which of them makes an example. For targets it is the variance of the outputs over copies
    and weights, summed over O. It is NaN without `each`, and under link="per_class". Draws of all
    copies use the same normals.

    Args:
        block: Name of the block with copies.
        weights: Name of the mixture weights pi [M] in a client's view.
        each: Predictor of one copy, `LinearisedLaplace` or `LinearisedBelief`; None for its mean.

    Example:
        >>> bf.algorithms.fedem(bf.models.mlp(64, hidden=8, outputs=10)).predictor
        Mixture(block='components', weights='pi', each=None)
    """

    block: str
    weights: str
    each: LinearisedLaplace | LinearisedBelief | None = None

    @property
    def tunes(self) -> str:
        """Return the name of the number that `each` tunes, see `Predictor`."""
        return "" if self.each is None else self.each.tunes

    @property
    def grid(self) -> tuple[float, ...]:
        """Return the candidates of `each`, see `Predictor`."""
        return () if self.each is None else self.each.grid

    @property
    def needs_data(self) -> bool:
        """Return whether `each` needs training data, see `StoredPredictor`."""
        return self.each is not None and self.each.needs_data

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the name of the weights, see `StoredPredictor`."""
        return (self.weights,)

    def check(self, algorithm: "Algorithm") -> None:
        """Raise ValueError, or TypeError for a likelihood of unknown curvature, if the predictor
        does not fit the algorithm.
        """
        if self.block not in algorithm.parts or algorithm.blocks[self.block].copies is None:
            raise ValueError(
                f"block {self.block!r} must be one of the predictor's parts {algorithm.parts} and "
                "have copies"
            )
        if self.each is not None:
            self.each.check_one(algorithm)

    def __call__(
        self, algorithm: "Algorithm", given: Server, view: View, data: Batch
    ) -> FittedPredictor:
        """Return one client's predictor, see `Predictor`."""
        views = self._views(algorithm, view)

        def fit() -> dict[int, FittedPredictor]:
            assert self.each is not None
            shares = (
                self._responsibilities(algorithm, view, data, list(views))
                if self.each.needs_data
                else {}
            )
            return {
                m: self.each(algorithm, given, one, data | shares.get(m, {}))
                for m, one in views.items()
            }

        return _Mixed(algorithm, view[self.weights], views, None if self.each is None else fit)

    def stored(self, fitted: Any, value: float | None, *, limit: int) -> Tensors:
        """Return the tensors of `each` for every copy, named by its number, see
        `StoredPredictor`.
        """
        if self.each is None:
            return {}
        return {
            f"{m}_{k}": t
            for m, one in fitted.each.items()
            for k, t in self.each.stored(one, value, limit=limit).items()
        }

    def restored(self, algorithm: "Algorithm", view: View, tensors: Tensors) -> FittedPredictor:
        """Return one client's predictor, made of `tensors`, see `StoredPredictor`."""
        views = self._views(algorithm, view)
        if self.each is None:
            return _Mixed(algorithm, view[self.weights], views, None)
        own = {
            m: {k.removeprefix(f"{m}_"): t for k, t in tensors.items() if k.startswith(f"{m}_")}
            for m in views
        }
        each = {m: self.each.restored(algorithm, one, own[m]) for m, one in views.items()}
        return _Mixed(algorithm, view[self.weights], views, lambda: each)

    def mixed(self, found: Tensors, view: View) -> Tensors:
        """Return the predictions of clients [C, N, ...] by those of their copies at the means,
        [C, M, N, ...].
        """
        return _mixed({name: t.movedim(1, -1) for name, t in found.items()}, view[self.weights])

    def _views(self, algorithm: "Algorithm", view: View) -> dict[int, View]:
        """Return, for each copy of weight > 0, the view of a client that has it alone, with its
        share of the client's n examples.
        """
        pi = view[self.weights]
        return {
            m: algorithm.of_copy(algorithm.parts, view, m) | {"n": view["n"] * pi[m]}
            for m in pi.nonzero().flatten().tolist()
        }

    def _responsibilities(
        self, algorithm: Any, view: View, data: Batch, copies: list[int]
    ) -> dict[int, Tensors]:
        """Return how much each example counts for each of these copies, [N], as the `weight` of a
        batch.
        """
        every = pieces({"x": data["x"], "y": data["y"]}, PIECE)
        losses = torch.cat(
            [algorithm.losses_of_copies(algorithm.parts, view, some)[copies] for some in every], -1
        )
        q, _ = responsibilities(view[self.weights][copies], losses)
        return {m: {"weight": one} for m, one in zip(copies, q.unbind(-1), strict=True)}


class _Mixed:
    """One client's predictor by several copies together, see `FittedPredictor`.

    Args:
        algorithm: The method.
        pi: Mixture weights [M].
        views: A view for each copy that takes part.
        fit: Function that makes the predictor of each of these; None for their means.
    """

    def __init__(
        self,
        algorithm: "Algorithm",
        pi: Tensor,
        views: dict[int, View],
        fit: Callable[[], dict[int, FittedPredictor]] | None,
    ) -> None:
        self._algorithm, self._views, self._fit = algorithm, views, fit
        self._pi = pi[list(views)]

    @cached_property
    def each(self) -> dict[int, FittedPredictor]:
        """Return the copies' predictors, by number."""
        return {} if self._fit is None else self._fit()

    def __call__(
        self,
        x: Inputs,
        *,
        value: float | tuple[float, ...] | None = None,
        noise: Tensor | None = None,
        plain: bool = False,
    ) -> Tensors:
        if plain or self._fit is None:
            found = [_at_mean(self._algorithm, view, x) for view in self._views.values()]
        else:
            found = [one(x, value=value, noise=noise) for one in self.each.values()]
        stacked = {name: torch.stack([one[name] for one in found], -1) for name in found[0]}
        return _mixed(stacked, self._pi)


def _mixed(stacked: Tensors, pi: Tensor) -> Tensors:
    """Return the prediction of a mixture by those of its copies, [..., M], and their weights pi
    [M], or [C, M] of several clients; copies of weight 0 take no part.
    """

    def weighed(t: Tensor) -> Tensor:
        shares = pi.reshape(*pi.shape[:-1], *[1] * (t.dim() - pi.dim()), -1)
        return torch.where(shares > 0, t * shares, 0.0).sum(-1)

    mean = {name: weighed(t) for name, t in stacked.items()}
    if "aleatoric" in mean:
        entropy = torch.special.entr(mean["probs"]).sum(-1)
        return mean | {"epistemic": (entropy - mean["aleatoric"]).clamp_min(0)}
    if "probs" in mean:
        return mean
    spread = weighed((stacked["mean"] - mean["mean"].unsqueeze(-1)).square())
    if "variance" in mean:
        mean["variance"] = mean["variance"] + spread
    return mean | {"epistemic": mean["epistemic"] + spread.sum(-1)}


@dataclass(frozen=True, eq=False)
class _Linearised:
    """One client's predictor by the linearised network, see `FittedPredictor`.

    Args:
        rule: The method's predictor.
        algorithm: The method.
        view: The client's view.
        inverses: Function from prior precisions that are tried, or None, to the covariances of the
            weights.
        state: What is stored of the surveys that `PooledLaplace` and `Heads` need.
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
        """Return the predictions by the covariances of an inverse, [G, N, ...]; warn where they are
        the prior's, under a precision that was given.
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
                f"{which} leaves the predictions to the prior (the median kappa is below "
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
        n = self.view["n"].reshape(-1)
        each = kappa(variance).unflatten(-2, (len(n), -1)).movedim(-3, 0).flatten(1)
        # A copy that made no example has the prior under any precision.
        return bool(((each.median(1).values < SHRUNK) & (n >= 1)).any())


@dataclass(frozen=True)
@declared
class Neighbours:
    """Predict by the model and by a client's own nearest rows.

    Args:
        k: Number of rows that count; all where a client has fewer.
        scale: Number by which distances are divided.
        share: Share lam of the rows in the prediction: a number; `own`, that of the largest mean
            log likelihood of the client's validation rows, 0 for a client without any; or `common`,
            one for all clients, chosen on the validation rows of all.

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
        """Raise ValueError where rows cannot vote, or there are no features."""
        if not isinstance(algorithm.likelihood, Categorical) or not has_body(algorithm.model):
            raise ValueError(
                "neighbours are found by a network's features, and vote for classes: take "
                "likelihood=Categorical() and a bf.models.SplitModel whose body is trained"
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
        """Return one client's predictor by its rows' features, see `StoredPredictor`."""
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
        """Return p_kNN [N, O] at features [N, F] by rows' `features` [n, F] and `labels` [n]."""
        held, labels = rows["features"].to(features), rows["labels"]
        apart = torch.cdist(features, held, compute_mode=EXACT).square() / features.shape[-1]
        near, places = apart.topk(min(self.k, len(labels)), largest=False)
        weights = (-near / self.scale).softmax(-1)
        return torch.zeros_like(outputs).scatter_add(-1, labels[places], weights)


def _at_mean(algorithm: "Algorithm", view: View, x: Inputs) -> Tensors:
    """Return the prediction at `x` [N, *] by one client's blocks at their means; its epistemic part
    is NaN.
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
            "link='draws' needs the number of a prediction's draws: dataclasses.replace(method, "
            "draws=100, predictor=...), which is not the number that a function such as pfedvem "
            "takes for its steps; or take link='contrasts'"
        )


def _refuse_copies(rule: "LinearisedLaplace | LinearisedBelief", algorithm: "Algorithm") -> None:
    """Raise ValueError if an algorithm predicts by several copies, of which the rule linearises
    one.
    """
    if (copies := algorithm.copies(algorithm.parts)) is not None:
        several = next(part for part in algorithm.parts if algorithm.blocks[part].copies)
        raise ValueError(
            f"a linearised network is one model, and block {several!r} has {copies} copies; "
            f"take Mixture({several!r}, 'pi', each={type(rule).__name__}()), with the "
            "name of the mixture's weights for 'pi'"
        )
