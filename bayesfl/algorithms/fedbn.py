"""FedBN: every client keeps its norms, with their weights, biases and statistics; the server
averages everything else with equal weights.

Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch
normalization", ICLR 2021, algorithm 1. The paper has batch norms; here the weights and biases of
layer, group and instance norms stay, too. The authors' code recognises a norm by `bn` in its name;
here its class counts.
"""

from glob import escape

from torch import nn

from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, equal, options
from bayesfl.likelihoods import Categorical
from bayesfl.models.modes import norms, trainable
from bayesfl.optim import SGD

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@options.method()
def fedbn(
    model: options.Model,
    *,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 32,
    optimiser: options.Optimiser = SGD(1e-2),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedBN: the server averages everything except the norms, which stay on
    their clients.

    A client that joins later receives the averaged weights and trains only its own norms on its
    data, from their start; in the paper only norms differ between clients, and no client sends its
    norms.

    Args:
        model: Any module with torch's norms, `nn.BatchNorm2d`, `nn.GroupNorm`, `nn.LayerNorm` and
            so on. At least one must have trainable weights; for the others only the statistics stay
            with a client.

    Raises:
        ValueError: `model` has no norm with trainable weights, or uses one in two places.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        >>> method = bf.algorithms.fedbn(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    patterns, both = _patterns(model), ("w", "norms")
    rest = {"batch_size": batch_size, "optimiser": optimiser}
    return Algorithm(
        model,
        {
            "w": Block(tuple(f"!{one}" for one in patterns), pool=Mean(equal)),
            "norms": Block(patterns, pool=None, keep=True),
        },
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("norms", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )


def _patterns(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of the norms: names of trainable parameters, and of modules without these
    that have statistics of batches.
    """
    own = [
        leaf
        for name, part in model.named_modules()
        if isinstance(part, NORMS)
        for leaf in trainable(name, part)
    ]
    if not own:
        raise ValueError(
            f"model {type(model).__name__} has no norm with trainable weights (nn.BatchNorm2d, "
            "nn.LayerNorm, ...), so no weight would stay with a client; use bf.algorithms.fedavg, "
            "or norms with affine=True"
        )
    places = [
        name
        for name, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, NORMS)
    ]
    if twice := sorted(
        set(places) - {name for name, part in model.named_modules() if isinstance(part, NORMS)}
    ):
        raise ValueError(
            f"the norm {twice[0]!r} is in the model under two names; give each place its own norm"
        )
    still = [name for name, part in norms(model).items() if not trainable(name, part)]
    return (
        *map(escape, own),
        *map(escape, still),
        *(f"{escape(name)}.running_*" for name in still),
    )
