"""The network and its likelihood in files of posteriors, so that a posterior is only loaded for its
own module.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass

from torch import nn

from bayesfl import likelihoods
from bayesfl.base.described import digest_of, network
from bayesfl.base.layout import Layout
from bayesfl.base.protocols import Likelihood


def network_of(module: nn.Module, covered: Iterable[str]) -> str:
    """Return a digest of a module's layers, and of the parameters and buffers that are not in
    `covered`.
    """
    inside = set(covered)
    everything = (*module.named_parameters(), *module.named_buffers())
    rest = {name: t for name, t in everything if name not in inside}
    return digest_of({**network(module), "rest": rest})


def likelihood_text(likelihood: Likelihood) -> str:
    """Return a likelihood's class and options as JSON."""
    said = (
        asdict(likelihood) if is_dataclass(likelihood) and not isinstance(likelihood, type) else {}
    )
    return json.dumps({"class": type(likelihood).__name__, **said}, default=float)


def likelihood_of(
    path: str | os.PathLike[str], stored: str, given: Likelihood | None
) -> Likelihood:
    """Return the likelihood that a file describes.

    Raises:
        ValueError: `given` is another likelihood, or is None while the stored class is unknown
            here.
    """
    found = json.loads(stored)
    known = {name: getattr(likelihoods, name) for name in likelihoods.__all__}
    name = found.pop("class")
    if given is None and name in known:
        return known[name](**found)
    if given is None or likelihood_text(given) != stored:
        raise ValueError(
            f"{str(path)!r} was fitted with the likelihood {stored}, got {given}: pass that one as "
            f"likelihood=, which may be left out for {list(known)}"
        )
    return given


def check_network(
    path: str | os.PathLike[str], stored: str, names: list[str], module: nn.Module, layout: Layout
) -> None:
    """Check that a file belongs to this module, and to the parameters that a layout covers.

    Raises:
        ValueError: It belongs to others.
    """
    own = list(layout.names)
    if names == own and stored == network_of(module, own):
        return
    raise ValueError(
        f"{str(path)!r} was made for other layers or options, other weights or buffers besides, or "
        f"for other weights than {own}: it covers {names}; load it for the model as it was"
    )
