"""Options that methods share, with their meanings; and `method`, which checks them and stores the
method's name and options in the algorithm.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias

from torch import nn

from bayesfl.base import protocols
from bayesfl.base.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    INVERTIBLE,
    Count,
    Idle,
    Natural,
    Positive,
    Range,
    arguments,
    documented,
    instance,
)
from bayesfl.composition.algorithm import Algorithm, Made
from bayesfl.composition.invariance import Estimator
from bayesfl.composition.phases import ClientEpochs
from bayesfl.models.altered import cut
from bayesfl.models.cutting import has_body
from bayesfl.optim import SGD, check_optimiser
from bayesfl.optim import Optimiser as AnyOptimiser

__all__ = [
    "AT_LEAST_0",
    "AT_LEAST_1",
    "INVERTIBLE",
    "NEARLY_SHARE",
    "Count",
    "Idle",
    "Natural",
    "Positive",
    "Range",
    "method",
]

NEARLY_SHARE = Range(0, 1 + 1e-3, "[]")
"""Range of a share of a client, which may exceed 1 by rounding."""
P = ParamSpec("P")


def trains_no_body(model: nn.Module) -> bool:
    """Return whether a model is all head: it trains no parameter named `body.*`."""
    return not has_body(model)


def check_sgd(name: str, value: object) -> None:
    """Raise TypeError if an optimiser is not SGD; a method's equations contain its rate and
    momentum.
    """
    instance(name, value, SGD, "its rate and momentum are part of the method")


def check_split(name: str, value: object) -> None:
    """Raise ValueError if a model is not a `SplitModel`; only such models have known features."""
    if not isinstance(value, nn.Module) or not cut(value):
        raise ValueError(
            f"{name} must be a bf.models.SplitModel, because the method reads its features, got "
            f"{type(value).__name__}; build it by bf.models, or use bf.models.split"
        )


def check_plain_sgd(name: str, value: object) -> None:
    """Raise as `check_sgd`, or ValueError if SGD has a momentum; a client's change is then not the
    sum of its gradients.
    """
    check_sgd(name, value)
    if isinstance(value, SGD) and value.momentum:
        raise ValueError(
            f"{name} must have no momentum, got {value.momentum}: the method computes mean "
            "gradients from a client's change; use SGD(rate)"
        )


ALL_HEAD: Idle = {("model", trains_no_body): ("body_epochs", "body_optimiser", "batch_size")}

Model: TypeAlias = Annotated[nn.Module, "Any module."]
BodyAndHead: TypeAlias = Annotated[
    nn.Module,
    "A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`.",
]
Split: TypeAlias = Annotated[
    nn.Module,
    check_split,
    "A `bf.models.SplitModel`; its features are the inputs of its head.",
]
MaybeAllHead: TypeAlias = Annotated[
    nn.Module,
    "A `bf.models.SplitModel`, or any module whose parameters are named `body.*` and `head.*`. It "
    "may consist of a head only, as `bf.models.mlp(inputs, outputs=2, hidden=())`; the body's "
    "options then raise an error.",
]
Likelihood: TypeAlias = Annotated[
    protocols.Likelihood, "Distribution of y given the model's outputs."
]

Epochs: TypeAlias = Annotated[
    int | ClientEpochs,
    AT_LEAST_1,
    "Number of passes over a client's data each round, or a function (client, generator) -> number "
    "for devices that differ.",
]
BodyEpochs: TypeAlias = Annotated[
    int,
    AT_LEAST_1,
    "Number of passes over a client's data for the body each round, with the head fixed.",
]
FullBatchSteps: TypeAlias = Annotated[
    int,
    AT_LEAST_1,
    "Number of full-batch steps on the head each round, which the authors' code calls epochs; also "
    "for a client that joins.",
]
AdaptEpochs: TypeAlias = Annotated[
    int, AT_LEAST_1, "Number of passes over its data of a client that joins later."
]
FinetuneEpochs: TypeAlias = Annotated[
    int, AT_LEAST_1, "Number of passes over a client's data, on all parameters, before it predicts."
]
Steps: TypeAlias = Annotated[int, AT_LEAST_1, "Number of mini-batches of a client in a round."]
BatchSize: TypeAlias = Annotated[
    int | None, AT_LEAST_1, "Number of examples of a step; None for all of the client's."
]
Draws: TypeAlias = Annotated[int, AT_LEAST_1, "Number of posterior draws of a step."]

Optimiser: TypeAlias = Annotated[
    AnyOptimiser,
    check_optimiser,
    "Optimiser of the clients' steps, one of `bf.optim`; its state is reset in each phase of a "
    "round.",
]
KeptOptimiser: TypeAlias = Annotated[
    AnyOptimiser,
    check_optimiser,
    "Optimiser of the clients' steps, one of `bf.optim`; its state is kept from round to round.",
]
HeadOptimiser: TypeAlias = Annotated[
    AnyOptimiser, check_optimiser, "Optimiser of the head; its state starts anew each round."
]
PlainSGD: TypeAlias = Annotated[
    SGD, check_plain_sgd, "Optimiser of the clients' steps, without momentum."
]
BodyOptimiser: TypeAlias = Annotated[
    AnyOptimiser, check_optimiser, "Optimiser of the body; its state starts anew each round."
]
FinetuneOptimiser: TypeAlias = Annotated[
    AnyOptimiser | None, check_optimiser, "Optimiser of fine-tuning; None for `optimiser`."
]

Damping: TypeAlias = Annotated[
    float | None,
    Range(0, 1, "]"),
    "Step of a client's factor towards its new value, in natural parameters, in (0, 1]; None for 1 "
    "/ J, so that J clients at once never overshoot. 1 is for cohorts of one.",
]
Strength: TypeAlias = Annotated[float, AT_LEAST_0]
Kept: TypeAlias = Annotated[
    float, Range(0, 1, "["), "Share of the old body and centre that the server keeps, in [0, 1)."
]
ScaleRate: TypeAlias = Annotated[
    float,
    AT_LEAST_0,
    "Rate of the standard deviations of q_j, as a multiple of the rate of the means; 0 fixes them.",
]
LikelihoodScale: TypeAlias = Annotated[
    Literal["sum", "mean"],
    "Whether the head's likelihood is the `sum` over the client's data, or their `mean` with the "
    "whole KL or penalty, as in the paper's energy; this tempers the likelihood by 1 / n_j.",
]

Gamma: TypeAlias = Annotated[
    float,
    AT_LEAST_0,
    "Weight of a client's squared slopes from round `anneal` on; 0 is FedAvg with a ridge. With J "
    "clients of equal size it corresponds to gamma / J with all data together.",
]
Anneal: TypeAlias = Annotated[
    int,
    AT_LEAST_0,
    "Number of rounds after which the penalty's weight changes from min(1, gamma) to gamma; a run "
    "with at most this number of rounds does not reach it.",
]
SlopeEstimator: TypeAlias = Annotated[
    Estimator,
    "Estimator of the squared slopes from mini-batches, see `bayesfl.invariance.squared_slopes`.",
]
Ridge: TypeAlias = Annotated[
    float,
    AT_LEAST_0,
    "Strength of the ridge l2 |w|^2, which is divided by max(1, gamma_t), like the other terms.",
]
Eta: TypeAlias = Annotated[
    float, AT_LEAST_0, "Step size of the logarithms of the environments' weights, per nat of loss."
]
Environments: TypeAlias = Annotated[int, AT_LEAST_1, "Largest number of environments of a client."]
LossExamples: TypeAlias = Annotated[
    int | None,
    AT_LEAST_1,
    "Number of a client's training examples in the measurement of its losses: the same examples "
    "every round, in equal shares from its environments and evenly spaced; at least "
    "`environments`, None for all.",
]


def method(
    *, revision: int = 1, idle: Idle = types.MappingProxyType({})
) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Declare a function that makes a method: check its options, complete its docstring, and store
    its name and options in the algorithm.

    A saved run recognises its method by name and options, so that the code can be refactored.

    Args:
        revision: Number that rises whenever the method's results change under the same options.
        idle: Options without effect under another one; passing them raises an error.
    """

    def decorate(function: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        @functools.wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
            found = arguments(function, args, kwargs, idle)
            if found is None:
                return function(*args, **kwargs)
            algorithm = function(*found.args, **found.kwargs)
            options: dict[str, Any] = {
                name: value
                for name, value in found.arguments.items()
                if not isinstance(value, nn.Module)
            }
            object.__setattr__(algorithm, "made", Made(function, revision, options))
            return algorithm

        return documented(made, function)

    return decorate


def without(function: Callable[..., Any], *options: str) -> inspect.Signature:
    """Return a function's signature without some options, for a function that sets these and passes
    on the others.
    """
    whole = inspect.signature(function)
    return whole.replace(parameters=[p for p in whole.parameters.values() if p.name not in options])
