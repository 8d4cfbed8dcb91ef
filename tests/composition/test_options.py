"""Options of methods: every one is told in the docstring, and what is made knows of which method
and options it is made.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

import bayesfl as bf
from bayesfl.algorithms import PAPERS
from bayesfl.composition import options
from bayesfl.optim import SGD
from tests.cases import CASES, Case

ALIASES = {
    "irm_ft": ("irm_l2", {"lam": 0.0}),
    "fedsi_fac": ("fedsi", {"structure": "diagonal"}),
    "fedsi_full": ("fedsi", {"structure": "full"}),
}
"""Methods that take all others of another one's options -> that one, and what they set."""


def told(make: Callable[..., bf.Algorithm]) -> dict[str, str]:
    """The arguments of a docstring: name -> the first line of what it says."""
    lines = (make.__doc__ or "").partition("\nArgs:\n")[2].split("\n\n")[0].split("\n")
    return dict(
        line.strip().split(":", 1) for line in lines if line.startswith("    ") and line[4] != " "
    )


@pytest.mark.parametrize("name", ALIASES)
def test_methods_that_take_all_others_options(name: str):
    """They show these, without those that they set."""
    other, fixed = ALIASES[name]
    shown = inspect.signature(getattr(bf.algorithms, name)).parameters
    taken = inspect.signature(getattr(bf.algorithms, other)).parameters
    assert list(shown) == [key for key in taken if key not in fixed]


@pytest.mark.parametrize("name", [name for name in PAPERS if name not in ALIASES])
def test_every_option_is_told(name: str):
    """In the order of the signature, in words."""
    make, _, _ = PAPERS[name]
    assert list(told(make)) == list(inspect.signature(make).parameters)
    assert all(text.strip() for text in told(make).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_made_knows_its_method(case: Case, model: nn.Module):
    """Name, revision, and all options but the model, in their order, with the defaults; what is
    changed by hand knows none.
    """
    name, fixed = ALIASES.get(case.name, (case.name, {}))
    make = getattr(bf.algorithms, name)
    algorithm = getattr(bf.algorithms, case.name)(case.of(model), **case.options)
    defaults = {
        key: one.default
        for key, one in inspect.signature(make).parameters.items()
        if key != "model"
    }
    made = algorithm.made
    assert made is not None
    assert (made.function, made.revision) == (inspect.unwrap(make), 1)
    assert list(made.options.items()) == list({**defaults, **fixed, **case.options}.items())
    assert replace(algorithm).made is replace(algorithm, draws=3).made is None


def test_a_method_of_ones_own(model: nn.Module):
    """Its revision is recorded, numbers as Python's own; another method inside it, and its record,
    are not.
    """

    @options.method(revision=3)
    def own(
        model: options.Model, *, epochs: options.Epochs = 1, optimiser: options.Optimiser = SGD(0.1)
    ) -> bf.Algorithm:
        """Train it."""
        return replace(bf.algorithms.fedavg(model, epochs=2 * epochs, optimiser=optimiser), draws=0)

    made = own(model, epochs=np.int64(2)).made
    assert made is not None
    assert (made.function, made.revision) == (inspect.unwrap(own), 3)
    assert made.options == {"epochs": 2, "optimiser": SGD(0.1)}
    assert type(made.options["epochs"]) is int
    assert list(told(own)) == ["model", "epochs", "optimiser"]
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        own(model, epochs=0)
    assert bf.Algorithm(model, {"w": bf.Block()}, (), parts=("w",)).made is None
