"""The posterior of one module's weights as a differentiable density: the likelihood of the data, in
batches, and a Gaussian prior.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bayesfl.base.inputs import Inputs, at, count, in_precision, named
from bayesfl.base.layout import Layout, Pattern
from bayesfl.base.protocols import Likelihood
from bayesfl.base.random import Purpose, generator
from bayesfl.base.targets import IGNORE, Targets
from bayesfl.curvature.batches import Data, labelled, one_batch
from bayesfl.curvature.ggn import check_outputs
from bayesfl.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    MultiLabel,
    Poisson,
    Quantiles,
    Tokens,
)
from bayesfl.models.copies import duplicate
from bayesfl.models.remedies import explained
from bayesfl.models.weights import call_at, refuse_unseen
from bayesfl.posteriors.linearised import as_labels


@dataclass(frozen=True, eq=False)
class Target:
    """Describe the posterior p(w | x, y), proportional to p(y | x, w) N(w; centre, 1 / precision),
    of the weights of one module; made by `Target.of`.

    Args:
        model: A copy of the module, in evaluation mode, whose own parameters get no gradients.
        layout: The parameter that each of the D weights belongs to.
        likelihood: Distribution of y given the module's outputs.
        loc: The module's own weights, [D].
        precision: Precision of the prior, [D].
        centre: Mean of the prior, [D].
        data: Inputs and labels, or batches of them; None if they are not kept.
        examples: Number N of examples.
        passed: Number of batches in a pass over the data, if they come in batches; 0 otherwise.
        width: Shape of the outputs for one example.
    """

    model: nn.Module
    layout: Layout
    likelihood: Likelihood
    loc: Tensor
    precision: Tensor
    centre: Tensor
    data: tuple[Any, Any]
    examples: int = 0
    passed: int = 0
    width: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Data,
        y: Tensor | None,
        likelihood: Likelihood | None,
        *,
        precision: float | Tensor,
        centre: float | Tensor,
        pattern: Pattern,
    ) -> "Target":
        """Make the target of a module, which is not changed, and of its data.

        Raises:
            ValueError: There are no data, they can be read only once, or they do not fit the
                module's outputs and the likelihood; the outputs depend on weights that are not
                parameters; `precision` or `centre` has another size, or `precision` is not > 0.
        """
        layout = Layout(model, pattern)
        model = duplicate(model).eval().requires_grad_(False)
        loc = layout.ravel(dict(model.named_parameters()))
        precision, centre = (
            torch.as_tensor(value).detach().double().expand(layout.size).to(loc)
            for value in (precision, centre)
        )
        likelihood = Categorical() if likelihood is None else likelihood
        return cls(model, layout, likelihood, loc, precision, centre, (x, y)).on(x, y)

    def on(self, x: Data, y: Tensor | None) -> "Target":
        """Return the same target with these data.

        Raises:
            ValueError: See `of`; or there is another number of examples than the target has.
        """
        examples, passed, width = 0, 0, ()
        for inputs, labels in labelled(x, y, self.loc):
            with torch.no_grad(), explained(inputs):
                outputs = self.outputs(self.loc, in_precision(inputs, self.loc.dtype))
                fitting = _floats(checked(self.likelihood, outputs, labels), self.loc.dtype)
                losses = self.likelihood.nll(outputs, fitting)
            if losses.isnan().any():
                read = [*named(inputs), ("y", labels), ("the model's weights", self.loc)]
                raise ValueError(
                    "the likelihood of examples is NaN before the first step; there is NaN in "
                    f"{', '.join(name for name, t in read if t.isnan().any()) or 'the outputs'}: "
                    "leave these rows out, or impute them"
                )
            if not examples:
                refuse_unseen(self.model, in_precision(inputs, self.loc.dtype))
            examples, passed = examples + count(inputs), passed + 1
            width = tuple(outputs.shape[1:])
        if not examples or next(labelled(x, y, self.loc), None) is None:
            raise ValueError(
                "there are no data, or they can be read only once, as an iterator: pass inputs and "
                "labels, a list of batches (x, y) or a DataLoader"
            )
        if self.examples not in (0, examples):
            raise ValueError(
                f"the posterior was fitted to {self.examples} examples, but these are {examples}; "
                "pass the examples of the fit"
            )
        passed = 0 if one_batch(x) else passed
        return replace(self, data=(x, y), examples=examples, passed=passed, width=width)

    def outputs(self, w: Tensor, x: Inputs) -> Tensor:
        """Compute the module's outputs [B, O] at weights `w` [D]."""
        return call_at(self.model, self.layout.leaves(w), x)

    def nll(self, w: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """Compute the negative log likelihood of a batch at weights `w` [D], in nats, scaled to
        estimate the sum over all N examples.

        Batches that a user passes need not be random. Each is scaled by the number of batches in a
        pass, whatever its size, so that every example has the same weight.
        """
        losses = self.likelihood.nll(self.outputs(w, x), y)
        return losses.sum() * (self.passed or self.examples / len(losses))

    def prior(self, w: Tensor) -> Tensor:
        """Compute the negative log density of the prior at weights `w` [D], in nats."""
        squares = self.precision * (w - self.centre).square()
        return 0.5 * (squares - (self.precision / (2 * math.pi)).log()).sum()

    def slope(self, w: Tensor, x: Inputs, y: Tensor) -> Tensor:
        """Compute the gradient [D] at `w` of the negative log joint density's mean over all N
        examples, in nats, estimated by a batch.
        """
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(((self.nll(w, x, y) + self.prior(w)) / self.examples), w)[0]

    def batches(
        self, batch_size: int | None, seed: int, *, chain: int = 0
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield batches of inputs and labels without end.

        Args:
            batch_size: Size of the batches into which each pass over inputs and labels is split, in
                a new order for each pass; None for all at once. Batches that a user passes stay
                unchanged.
            seed: Seed of the orders.
            chain: Number of the chain; each chain has different orders.

        Raises:
            ValueError: `batch_size` is given in addition to batches.
        """
        whole = one_batch(self.data[0])
        if batch_size is not None and not whole:
            raise ValueError(
                "batch_size splits inputs and labels, but the given batches have their own sizes: "
                "leave it out"
            )
        if batch_size is None:
            once = list(self.once()) if whole else []
            while True:
                yield from once or self.once()
        ((x, y),) = self.once()
        epoch = 0
        while True:
            rng = generator(seed, Purpose.PERMUTATION, phase=chain, index=epoch)
            order = torch.from_numpy(rng.permutation(self.examples)).to(y.device)
            for rows in order.split(batch_size):
                yield at(x, rows), y[rows]
            epoch += 1

    def once(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield inputs and labels once, in the model's precision and in the likelihood's form."""
        for x, y in labelled(*self.data, self.loc):
            labels = checked(self.likelihood, torch.empty(count(x), *self.width, device="meta"), y)
            yield in_precision(x, self.loc.dtype), _floats(labels, self.loc.dtype)


def _floats(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return targets in a precision; labels stay whole numbers."""
    return y.to(dtype) if y.is_floating_point() else y


def checked(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Convert labels or targets to the form that the likelihood takes with outputs `f`; keep them
    for a user's own likelihood.

    Raises:
        ValueError: The outputs `f` or `y` do not fit the likelihood.
    """
    if isinstance(likelihood, Quantiles):
        raise ValueError(
            f"{likelihood} is a loss and not a density, so there is nothing to sample; use "
            "Gaussian() or another likelihood"
        )
    if isinstance(likelihood, Gaussian | Poisson):
        numbers = y.double().reshape(len(y), -1)
        wanted = likelihood.width(Targets("regression", numbers.shape[1], numbers))
        if len(y) != len(f) or tuple(f.shape[1:]) != wanted:
            raise ValueError(
                f"targets must be one row for each of the {len(f)} inputs, and the model's outputs "
                f"for them {['N', *wanted]} under {likelihood}; got {list(y.shape)} and "
                f"{list(f.shape)}"
            )
        return numbers
    if isinstance(likelihood, Tokens | MultiLabel):
        labels = y.long()
        classes = f.shape[-1] if isinstance(likelihood, Tokens) else 2
        wanted = likelihood.width(Targets("classification", classes, labels))
        wrong = (labels != y) | (labels < 0) & (labels != IGNORE) | (labels >= classes)
        if len(y) != len(f) or tuple(f.shape[1:]) != wanted or bool(wrong.any()):
            raise ValueError(
                f"labels must be whole numbers from 0 to {classes - 1}, or {IGNORE}, for each of "
                f"the {len(f)} inputs and outputs {list(f.shape)}; got {list(y.shape)} from "
                f"{float(y.min()):g} to {float(y.max()):g}"
            )
        return labels
    if not isinstance(likelihood, Categorical | Bernoulli):
        return y
    if f.dim() != 2:
        raise ValueError(f"the model must give outputs [N, O], got shape {list(f.shape)}")
    check_outputs(likelihood, f.shape[1])
    return as_labels(y, len(f), max(2, f.shape[1]))
