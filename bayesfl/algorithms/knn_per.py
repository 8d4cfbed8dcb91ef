"""kNN-Per: a client predicts from the common model and from its own rows that are nearest to the
new one.

    $p(c | x) = lam p_kNN(c | x) + (1 - lam) p_w(c | x)$,

    $p_kNN(c | x)$ proportional to the sum over the k nearest rows i of
    $exp(-d_i / scale) [y_i = c]$,

where $d_i$ is the squared distance between features, the inputs of the model's head, divided by
their number. The common model is FedAvg's; rows and their features stay on the client.

Each client chooses lam in [0, 1) on its own validation rows, as in the paper, in steps of 0.05 (the
authors' code: of 0.01). The default of `scale` is that of the authors' code.

Source: Marfoq, Neglia, Kameni, Vidal, "Personalized federated learning through local memorization",
ICML 2022, equations 5 to 8.
"""

from dataclasses import replace
from typing import Annotated, Literal

from bayesfl.algorithms.fedavg import fedavg
from bayesfl.composition import Algorithm, Neighbours, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def knn_per(
    model: options.Split,
    *,
    k: options.Count = 10,
    scale: options.Positive = 1.0,
    share: Annotated[float, options.Range(0, 1, "[]")] | Literal["own", "common"] = "own",
    epochs: options.Epochs = 5,
    batch_size: options.BatchSize = 50,
    optimiser: options.Optimiser = SGD(1e-2, momentum=0.9),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by kNN-Per: FedAvg, and predictions from each client's nearest rows in its
    features.

    Args:
        k: Number of nearest rows; all rows if a client has fewer.
        scale: Divisor of distances.
        share: Share lam of the rows in the prediction: a number; each client's `own`, chosen on its
            validation rows; or one `common` to all, chosen by sums over the validation rows of all
            clients: the largest share within one standard error of the best.

    Example:
        >>> clients = bf.data.concept_drift("digits", clients=4, validation=0.2)
        >>> model = bf.models.mlp(64, hidden=8, outputs=5)
        >>> result = bf.simulate(bf.algorithms.knn_per(model), clients, rounds=1)
        >>> result.predict().probs.shape[-1]
        5
    """
    plain = fedavg(
        model, epochs=epochs, batch_size=batch_size, optimiser=optimiser, likelihood=likelihood
    )
    return replace(plain, predictor=Neighbours(k, scale, share))
