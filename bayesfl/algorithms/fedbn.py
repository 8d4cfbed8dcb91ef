"""FedBN: every client keeps its norms, their weights, biases and statistics; the server averages all else, each client weighing the same.

Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021, algorithm 1.
The paper has batch norms; here the weights and biases of layer, group and instance norms stay, too. The authors' code knows a norm by `bn`
in its name, here its class tells.

>>> import bayesfl as bf
>>> from torch import nn
>>> clients = bf.data.concept_drift("digits", clients=4)
>>> model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, clients.classes))
>>> result = bf.simulate(bf.algorithms.fedbn(model), clients, rounds=1)
"""

from glob import escape

from torch import nn

from bayesfl.base.checks import instance
from bayesfl.base.protocols import Likelihood
from bayesfl.composition import Algorithm, Block, Descend, Energy, Mean, equal
from bayesfl.likelihoods import Categorical
from bayesfl.models.modes import norms, trainable
from bayesfl.optim import SGD, Rate

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def fedbn(
    model: nn.Module,
    *,
    epochs: int = 1,
    batch_size: int | None = 32,
    lr: Rate = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    adapt_epochs: int = 20,
    likelihood: Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by FedBN: the server averages all but the norms, which stay on their clients.

    A client that joins later takes the averaged weights and trains norms of its own on its data, from the start's, with all else held:
    the norms are what the paper lets differ by client, and nobody else's leave their clients.

    Args:
        model: Any module with norms of torch's, `nn.BatchNorm2d`, `nn.GroupNorm`, `nn.LayerNorm` and so on, one of which has trainable
            weights at least; of the others the statistics alone stay with a client.
        epochs: Number of passes over a client's data each round.
        batch_size: Number of examples of a step; None for all of the client's.
        lr: Learning rate, or a schedule (round, rounds) -> rate.
        momentum: Momentum of SGD, in [0, 1); its velocity starts anew each round.
        weight_decay: L2 coefficient; its term is added to the gradient.
        adapt_epochs: Number of passes of a client that joins later, on its norms.
        likelihood: Distribution of y given the model's outputs.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: `model` has no norm with trainable weights, or has one in two places.
    """
    patterns, both = _patterns(model), ("w", "norms")
    rest = {"batch_size": batch_size, "optimiser": SGD(lr, momentum, weight_decay)}
    return Algorithm(
        model,
        {"w": Block(tuple(f"!{one}" for one in patterns), pool=Mean(equal)), "norms": Block(patterns, pool=None, keep=True)},
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("norms", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )


def _patterns(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of the norms: names of trainable parameters, and of modules without these that follow the statistics of batches."""
    instance("model", model, nn.Module, "build one, as torchvision.models.resnet18()")
    own = [leaf for name, part in model.named_modules() if isinstance(part, NORMS) for leaf in trainable(name, part)]
    if not own:
        raise ValueError(
            f"model {type(model).__name__} has no norm with trainable weights (nn.BatchNorm2d, nn.LayerNorm, ...), so that no weight would "
            "stay with a client; take bf.algorithms.fedavg, or norms with affine=True"
        )
    places = [name for name, part in model.named_modules(remove_duplicate=False) if isinstance(part, NORMS)]
    if twice := sorted(set(places) - {name for name, part in model.named_modules() if isinstance(part, NORMS)}):
        raise ValueError(f"the norm {twice[0]!r} stands in the model under another name, too; give each place a norm of its own")
    still = [name for name, part in norms(model).items() if not trainable(name, part)]
    return (*map(escape, own), *map(escape, still), *(f"{escape(name)}.running_*" for name in still))
