"""A Pyro model's parameters, and its log density at a site's rows.

Pyro's handlers are one list for the whole process, so a model is traced under a lock; the parameter
store does not change.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map_only

from bayesfl.base.options import nearest
from bayesfl.base.protocols import Tensors
from bayesfl.stats.density.integral import InDouble, Integral, Parts, Unasked
from bayesfl.stats.density.local import Local, Rows
from bayesfl.stats.density.parameters import Parameter, constrained, unconstrained
from bayesfl.stats.density.plain import groups_of, in_double

_LOCK = threading.RLock()
MIDDLE = 15
"""Number of draws of the prior; the search begins at their median."""


def _doubled(msg: Any) -> None:
    if msg["value"].is_floating_point():
        msg["value"] = msg["value"].double()


@dataclass(frozen=True)
class Program:
    """A Pyro model at a site's rows.

    Args:
        model: The model.
        site: The site's name.
        args: The model's arguments.
        options: Its named arguments.
    """

    model: Callable[..., Any]
    site: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, model: Callable[..., Any], site: str, rows: Any) -> "Program":
        """Return the model at rows: a tuple of arguments, a mapping of named ones, or one."""
        model = copy.deepcopy(model).double() if isinstance(model, nn.Module) else model
        return cls(model, site, (), {}).at(_numbers(rows))

    def at(self, rows: Any) -> "Program":
        """Return the model at other rows."""
        named = isinstance(rows, dict)
        given = () if named else rows if isinstance(rows, tuple) else (rows,)
        return replace(self, args=given, options=rows if named else {})

    def nodes(self, values: Tensors, *given: Any, **options: Any) -> dict[str, Any]:
        """Return the model's sample statements by name, as Pyro traces them, at values of some.

        Args:
            values: The values.
            given: What the model is called with in place of the site's rows.
            options: The same, by name.
        """
        import pyro

        args, options = (given, options) if given or options else (self.args, self.options)
        in_float64 = pyro.poutine.messenger.Messenger()
        in_float64._pyro_post_sample = _doubled  # pyright: ignore
        with _LOCK, pyro.get_param_store().scope(), in_float64, InDouble():
            traced = pyro.poutine.trace(pyro.poutine.condition(self.model, values))
            found: Any = traced.get_trace(*args, **options).nodes
        if own := [name for name, node in found.items() if node["type"] == "param"]:
            raise ValueError(
                f"site {self.site!r}: {own[0]!r} is a pyro.param, which has no prior: make it "
                "pyro.sample, or PyroSample in a module, or a number"
            )
        return {
            name: node
            for name, node in found.items()
            if node["type"] == "sample" and type(node["fn"]).__name__ != "_Subsample"
        }

    def log_probs(self, values: Tensors) -> dict[str, Tensor]:
        """Return the log density of each sample statement at values of all parameters."""
        from pyro.distributions.util import scale_and_mask

        with Unasked(), InDouble():
            return {
                name: scale_and_mask(
                    node["fn"].log_prob(node["value"]), node["scale"], node["mask"]
                )
                for name, node in self.nodes(values).items()
            }

    def pointwise(self, values: Tensors) -> Tensors:
        """Return the log density of what is observed, {statement: [S, ...]}, at draws [S, ...]."""
        names = self.observed

        def one(values: Tensors) -> Tensors:
            found = self.log_probs(values)
            return {name: found[name] for name in names}

        return vmap(one)(values)

    @property
    def observed(self) -> list[str]:
        """Return the names of statements that are observed."""
        return list(self.outcomes)

    @cached_property
    def outcomes(self) -> Tensors:
        """Return what is observed, by statement."""
        with torch.random.fork_rng(devices=[]):
            found = self.nodes({})
        return {
            name: found[name]["value"].detach()
            for name in _observed(found)
            if found[name]["value"].numel()  # a `pyro.factor` has none
        }

    def made(self, values: Tensors) -> Tensors:
        """Return the `pyro.deterministic` values at draws [S, ...] of all parameters, by name."""

        def one(values: Tensors) -> Tensors:
            with Unasked():
                return {n: v["value"] for n, v in self.nodes(values).items() if _is_made(v)}

        return vmap(one, randomness="different")(values)

    def counted(self) -> np.ndarray:
        """Return which observed numbers count, [n]: those that no `poutine.mask` leaves out."""
        with torch.random.fork_rng(devices=[]):
            found = self.nodes({})
        masks = [
            torch.as_tensor(True if (mask := found[name]["mask"]) is None else mask).expand(
                found[name]["fn"].batch_shape
            )
            for name in self.observed
        ]
        return torch.cat([one.flatten() for one in masks]).numpy()

    @cached_property
    def plates(self) -> dict[str, list[str]]:
        """Return the names of the plates that each statement stands in, by its dimensions."""
        with torch.random.fork_rng(devices=[]):
            found = self.nodes({})
        return {
            name: [one.name for one in sorted(node["cond_indep_stack"], key=lambda one: one.dim)]
            for name, node in found.items()
        }

    def predicted(
        self, values: Tensors, seed: int, count: int, *given: Any, **options: Any
    ) -> Tensors:
        """Return draws of what the model samples beside values [S, ...], by name, [S, ...]: called
        with what is given, or with the site's rows, whose outcomes are drawn anew.

        Args:
            values: The values.
            seed: Seed of the draws.
            count: Their number S.
            given: What the model is called with in place of the site's rows.
            options: The same, by name.
        """
        again = () if given or options else self.observed
        given, options = _numbers((given, options))
        found = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for s in range(count):
                nodes = self.nodes({name: t[s] for name, t in values.items()}, *given, **options)
                drawn = {n: node["value"] for n, node in nodes.items() if n not in values}
                drawn |= {name: nodes[name]["fn"].sample() for name in again}
                found.append({n: t for n, t in drawn.items() if torch.is_tensor(t)})
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def parameters(
        self, shared: Sequence[str]
    ) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], Tensor, Tensor]:
        """Return the shared parameters in order, the site's own, and medians of their priors as
        numbers without a range, [q] and [d].

        Raises:
            ValueError: The model has what cannot be read; the message names it and the remedy.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            looks = [self.nodes({}) for _ in range(MIDDLE)]
        first = looks[0]
        latent = {
            name: self._parameter(name, node) for name, node in first.items() if _is_latent(node)
        }
        for other in looks[1:]:
            again = {n: self._parameter(n, node) for n, node in other.items() if _is_latent(node)}
            if again != latent:
                changed = sorted({*latent.items()} ^ {*again.items()}, key=str)[0][0]
                raise self._error(
                    f"{changed!r} has another shape or range, or is not there, at other values of "
                    "other parameters: make names, shapes and bounds the same for all, as by "
                    "a transform of a parameter with fixed bounds"
                )
        for name in shared:
            if name not in latent:
                near = nearest(name, list(latent), 1)
                told = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(latent)}"
                raise self._error(f"shared= names {name!r}, which is no parameter; {told}")
        observed = _observed(first)
        if not observed:
            raise self._error("nothing is observed: give obs= to the statement of the outcome")
        for name in observed:
            if not first[name]["fn"].support.check(first[name]["value"]).all():
                raise self._error(
                    f"{name!r} has observed values that its distribution, "
                    f"{first[name]['fn']}, cannot have"
                )
        rows = {frame.name for name in observed for frame in first[name]["cond_indep_stack"]}
        for name in shared:
            if inside := [f.name for f in first[name]["cond_indep_stack"] if f.name in rows]:
                raise self._error(
                    f"{name!r} is shared and stands in the plate {inside[0]!r} of rows, which "
                    "other sites do not have: sample it outside, or leave it out of shared="
                )
        for node in first.values():
            for frame in node["cond_indep_stack"]:
                if frame.full_size is not None and frame.size < frame.full_size:
                    raise self._error(
                        f"the plate {frame.name!r} has a subsample, so that other rows are left "
                        "out: take subsample_size= away"
                    )
        with torch.random.fork_rng(devices=[]):
            at = {name: first[name]["value"] for name in latent}
            one, other = self.log_probs(at), self.log_probs(at)
        for name, logs in one.items():
            if not torch.allclose(logs, other[name], rtol=0, atol=0, equal_nan=True):
                raise self._error(
                    f"the density of {name!r} is another one at each call, as the model draws "
                    "random numbers of its own: give each draw a pyro.sample statement"
                )
        ours = tuple(latent[name] for name in shared)
        own = tuple(one for name, one in latent.items() if name not in shared)
        middle = [
            torch.stack(
                [
                    unconstrained(of, {n: node["value"].double() for n, node in look.items()})
                    for look in looks
                ]
            )
            .median(0)
            .values
            for of in (ours, own)
        ]
        return ours, own, middle[0], middle[1]

    def local(self, shared: Sequence[str]) -> tuple[tuple[Parameter, ...], Local]:
        """Return the shared parameters, and the site's model of its density.

        Raises:
            ValueError: As by `parameters`; or the model cannot be computed for many draws at once,
                or a shared prior depends on the site's own parameters.
        """
        ours, own, begin, middle = self.parameters(shared)

        rows = Rows.of(self.options or self.args)

        def at(phi: Tensor, z: Tensor, *tensors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            values, log_jacobian = constrained(own, z)
            program = self.at(rows.having(tensors)) if tensors else self
            return program.log_probs(constrained(ours, phi)[0] | values), log_jacobian

        def density(phi: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
            logs, log_jacobian = at(phi, z, *tensors)
            return sum((t.sum() for n, t in logs.items() if n not in shared), log_jacobian)

        def prior(phi: Tensor, z: Tensor = middle) -> Tensor:
            logs, _ = at(phi, z)
            return sum((logs[name].sum() for name in shared), phi.new_zeros(()))

        try:
            both = vmap(prior)(begin.expand(2, -1), torch.stack([middle, middle + 1]))
            parts = Parts.of(density, begin, middle, groups_of(own))
        except RuntimeError as error:
            raise self._error(
                "it cannot be computed for many draws at once: what is done may not depend on a "
                "parameter's value, but by torch.where, nor write into a tensor or choose rows by "
                "a mask, as OrderedLogistic and Multinomial do: take Categorical or pyro.factor "
                f"({str(error).splitlines()[0]})"
            ) from error
        if not torch.isclose(both[0], both[1], rtol=1e-9, equal_nan=True):
            raise self._error(
                f"the prior of {', '.join(shared)} depends on the site's own parameters: list "
                "these in shared=, too, or make it depend on none"
            )
        integral = Integral(density, parts, middle[None], width=rows.longest)
        return ours, Local(integral, own, begin, prior, rows, self)

    def _parameter(self, name: str, node: Any) -> Parameter:
        if node["fn"].support.is_discrete:
            raise self._error(
                f"{name!r} is discrete, and cannot be moved along a slope: give its values by obs= "
                "if it is an outcome, else sum it out, as by pyro.distributions.MixtureSameFamily"
            )
        try:
            return Parameter.of(name, node["fn"].support, node["value"].shape)
        except ValueError as error:
            raise self._error(str(error)) from error

    def _error(self, why: str) -> ValueError:
        return ValueError(f"the model at site {self.site!r}: {why}")


def _numbers(rows: Any) -> Any:
    """Return rows, of torch or NumPy, as tensors in float64."""
    return in_double(tree_map_only(np.ndarray, torch.as_tensor, rows))


def _is_made(node: Any) -> bool:
    """Return whether a statement is `pyro.deterministic`, or a `Delta`, which is the same."""
    point = not node["is_observed"] and type(node["fn"]).__name__ == "Delta"
    return point or bool(node["infer"].get("_deterministic"))


def _observed(nodes: dict[str, Any]) -> list[str]:
    return [n for n, node in nodes.items() if node["is_observed"] and not _is_made(node)]


def _is_latent(node: Any) -> bool:
    return not node["is_observed"] and not _is_made(node)
