"""LG-FedAvg: personal bodies and a shared head, the reverse of FedPer.

The paper starts from a model trained by FedAvg; for this, train one and pass the module with its
weights.

Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act
globally: federated learning with local and global representations", arXiv:2001.01523, 2020.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def lg_fedavg(
    model: options.BodyAndHead,
    *,
    epochs: options.Epochs = 1,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(5e-2, momentum=0.5),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by LG-FedAvg: the server averages the head; bodies stay on their clients,
    and new clients train one.

    Args:
        optimiser: Optimiser of the clients' steps; the paper's rate is 0.05 on MNIST and 0.1 on
            CIFAR-10.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> method = bf.algorithms.lg_fedavg(model)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['head.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    both = ("body", "head")
    rest = {"batch_size": batch_size, "optimiser": optimiser}
    return Algorithm(
        model,
        {"body": Block("body.*", pool=None, keep=True), "head": Block("head.*")},
        (Descend(Energy(both, both, likelihood="mean"), epochs=epochs, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("body", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )
