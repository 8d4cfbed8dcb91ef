"""The network around a kernel: body and head apart, features that stand still."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

from bayesfl.engine import layers
from bayesfl.engine.network import Network, Passage, in_microbatches
from tests.engine.made import (
    KERNELS,
    STACKS,
    B,
    C,
    inputs,
    kernels,
    of_layers,
    owners,
    parameters,
    slopes_at,
    slow,
)


@kernels
@pytest.mark.parametrize("which", ["none", "body", "head"])
@pytest.mark.parametrize("trained", ["body", "head", "both"])
@pytest.mark.parametrize("most", [2, B])
def test_network_of_body_and_head(kernel, which, trained, most):
    """Outputs, and the slopes of what is trained, by their full names; a drawn head shares one pass
    through the body; and with two rows at once, which leaves one for the last.
    """
    module, shape = STACKS["body and head"]
    drawn = frozenset(name for name, _ in module.named_parameters() if name.startswith(which))
    wanted = frozenset(
        name
        for name, _ in module.named_parameters()
        if trained == "both" or name.startswith(trained)
    )
    leaves, x = parameters(module, drawn), inputs(shape, False)
    outputs, up, expected = slow(module, leaves, x, False)
    chunks = [slice(c, c + 1) for c in range(C)] if kernel == "live" else [slice(None)]
    for part in chunks:
        slopes = {name: torch.full_like(leaves[name][part], torch.nan) for name in wanted}
        found = Network(module, in_microbatches(KERNELS[kernel], most))(
            {name: leaf[part] for name, leaf in leaves.items()}, x[part], slopes
        )
        assert found.lifted == up
        assert_close(found.outputs, outputs[part])
        assert found.back(slopes_at(outputs)[part]) is None
        for key in wanted:
            assert_close(slopes[key], expected[key][part])


def test_still_features_are_computed_once():
    """While neither inputs nor body change, the body runs once; for fewer clients once again; and
    always where it is trained.
    """
    module, shape = STACKS["body and head"]
    leaves, x, calls = parameters(module), inputs(shape, False), []

    def counting(part: nn.Module) -> Passage:
        passage = layers.kernel(part)
        return lambda *rest: calls.append(part) or passage(*rest)

    head = of_layers(module, ["head"])
    for wanted, still, bodies in (
        (head, True, 2),
        (head, False, 4),
        (of_layers(module, owners(module)), True, 4),
    ):
        calls.clear()
        network = Network(module, counting, still=still)
        slopes = {name: torch.empty_like(leaves[name]) for name in wanted}
        for active in (C, C, 2, 2):
            found = network(*tree_map(lambda t, a=active: t[:a], (leaves, x, slopes)))
            assert_close(found.outputs, slow(module, leaves, x, False)[0][:active])
        assert sum(part is module.body for part in calls) == bodies
        assert sum(part is module.head for part in calls) == 4
