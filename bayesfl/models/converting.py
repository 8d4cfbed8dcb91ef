"""Converting a network's batch norms to norms without statistics, which leave clients nothing to
average.
"""

from typing import Any

from torch import nn

from bayesfl.base.options import Count, declared
from bayesfl.base.warning import warn
from bayesfl.models.altered import altered
from bayesfl.models.copies import duplicate

LEAST, OF_VECTORS = 2, 16
"""Smallest number of channels in a group, and in a group for vectors: normalising one number
removes it, and normalising two leaves only their order.
"""
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@declared
def group_norm(module: nn.Module, *, groups: Count = 32) -> nn.Module:
    """Return a copy of a module with a group norm in place of each batch norm, whatever its mode;
    the module is not changed.

    A group norm looks at each example alone: there are no statistics to average, and every kernel
    and every method takes the network. Weights, biases, `eps` and frozen parameters stay. The
    statistics are dropped, so a network that was trained with them computes something else and
    needs more training. A norm has the largest number of groups that divides its channels and is at
    most `groups`, where a group has at least 2 channels, or all; and at least 16, or all, in the
    place of an `nn.BatchNorm1d`, which may see vectors. Maps of a single pixel are vectors, too, in
    which small groups lose almost all information: give fewer `groups`. `nn.SyncBatchNorm`,
    `nn.InstanceNorm1d` and so on stay as they are.

    Args:
        module: Any module with `nn.BatchNorm1d`, `2d` or `3d` among its parts, or one of these
            itself.
        groups: Largest number of groups of a norm, >= 1; 1 normalises all channels together.

    Raises:
        ValueError: A batch norm does more than torch's.

    Warns:
        UserWarning: A norm of vectors has so few channels that a group norm loses almost all
            information.

    References:
        Wu and He, "Group normalization", ECCV 2018: 32 groups, or 16 channels in each. Hsieh,
        Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine learning",
        ICML 2020, who take group norm where clients' labels differ.

    Example:
        >>> network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
        >>> bf.models.group_norm(network, groups=4)[1]
        GroupNorm(4, 8, eps=1e-05, affine=True, bias=True)
    """
    _check(module)
    made = duplicate(module)
    if isinstance(made, _BATCH):
        return _converted(made, groups)
    # `named_children` would leave out a norm that stands in two places of one part.
    places = [
        (part, key)
        for part in made.modules()
        for key, child in part._modules.items()
        if isinstance(child, _BATCH)
    ]
    new: dict[nn.Module, nn.Module] = {}
    for part, key in places:
        norm: Any = part._modules[key]
        part._modules[key] = new.setdefault(norm, _converted(norm, groups))
    return made


def _check(module: nn.Module) -> None:
    """Check that batch norms do what those of torch do and no more, and warn of those whose
    converted norm would leave little.

    Raises:
        ValueError: One is of a subclass, has hooks or a forward of its own, or has a weight or a
            bias that is computed.
    """
    for name, part in module.named_modules():
        if not isinstance(part, _BATCH):
            continue
        # A norm without weight or bias has the name, with None; one that computes them has not.
        computed = not {"weight", "bias"} <= part._parameters.keys()
        if type(part) not in _BATCH or computed or altered(part):
            raise ValueError(
                f"batch norm {name!r} ({type(part).__name__}) does more than torch's: it is of a "
                "subclass, or has hooks or weights that are computed, which a group norm in its "
                "place would lose; replace it by hand"
            )
        if isinstance(part, nn.BatchNorm1d) and part.num_features < OF_VECTORS:
            warn(
                f"batch norm {name!r} has {part.num_features} channels, too few for a group "
                "norm of vectors, which would lose almost all information; standardise inputs by "
                "fixed numbers in its place",
            )


def _converted(norm: Any, groups: int) -> nn.GroupNorm:
    """Return a group norm with a batch norm's own parameters, in its mode."""
    channels = norm.num_features
    most = min(groups, channels // (OF_VECTORS if isinstance(norm, nn.BatchNorm1d) else LEAST))
    made = nn.GroupNorm(
        max(d for d in range(1, max(most, 1) + 1) if channels % d == 0),
        channels,
        eps=norm.eps,
        affine=False,
    )
    made.affine, made.weight, made.bias = norm.affine, norm.weight, norm.bias
    return made.train(norm.training)
