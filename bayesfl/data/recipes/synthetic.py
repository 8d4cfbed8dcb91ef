"""Synthetic federations, whose true model is known."""

from typing import Annotated

import numpy as np
import torch

from bayesfl.base.options import Count, NotNegative, Positive, Range, declared
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import generated
from bayesfl.data.recipes import shared
from bayesfl.data.sources import SourceInfo


@declared
def linear_mixture(
    *,
    clients: shared.Clients = 300,
    components: Count = 3,
    inputs: Count = 150,
    alpha: Positive = 0.4,
    noise: NotNegative = 0.1,
    test: shared.TestRows = 2000,
    seed: Annotated[
        int, Range(0, 2**32, "[", why="NumPy's legacy generator takes seeds below 2**32")
    ] = 12345,
    validation: shared.Validation = 0.0,
    calibration: shared.Calibration = 0.0,
) -> FederatedData:
    """Draw labels of two classes by one of M linear rules for each example; clients use the rules
    in different proportions.

        pi_j ~ Dirichlet(alpha 1_M),  theta_m ~ U[-1, 1]^d,
        n_j = min(int(LogNormal(4, 2)) + 50, 1000),
        x ~ U[-1, 1]^d,  z ~ pi_j,  y = round(sigmoid(theta_z' x + e)),  e ~ N(0, noise^2):

    a threshold of the noisy score, no Bernoulli draw, so that one rule is nearly always right where
    it applies. With the default seed the 300 sizes are those of the paper's experiment, 67,758
    examples in all. `recipe["weights"]` has pi [J, M], `recipe["rules"]` theta [M, d].

    Args:
        clients: Number of clients J.
        components: Number of rules M.
        inputs: Number of inputs d.
        alpha: Concentration of the weights, > 0: the smaller, the more alike are a client's
            examples.
        noise: Standard deviation of the score's noise, >= 0.
        test: Number of test examples of each client; the authors take 5,000, which need 900 MB.
        seed: Seed of all draws, below 2^32. They come from NumPy's legacy generator, which gives
            the authors' sizes; the validation and calibration shares use the seed too.

    Raises:
        ValueError: `alpha` is so small that its draws underflow; NumPy raises it.

    References:
        Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of
        distributions", NeurIPS 2021, experiments; sizes from the authors' code,
        github.com/omarfoq/FedEM.

    Example:
        >>> bf.data.linear_mixture(clients=3, inputs=5, test=20)
        FederatedData(linear mixture, 3 clients; train 347, test 60)
    """
    rng = np.random.RandomState(seed)
    sizes = np.minimum(rng.lognormal(4, 2, clients).astype(int) + 50, 1000)
    weights = rng.dirichlet(np.full(components, alpha), clients)
    rules = rng.uniform(-1, 1, (components, inputs))
    total = int(sizes.sum()) + clients * test
    x, y = torch.empty(total, inputs), torch.empty(total, dtype=torch.long)
    rows: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    start = 0
    for size, pi in zip(sizes, weights, strict=True):
        for split, n in (("train", int(size)), ("test", test)):
            points = rng.uniform(-1, 1, (n, inputs))
            which = rng.permutation(np.repeat(np.arange(components), rng.multinomial(n, pi)))
            score = (points @ rules.T)[np.arange(n), which] + noise * rng.standard_normal(n)
            x[start : start + n] = torch.from_numpy(points)
            y[start : start + n] = torch.from_numpy((score > 0).astype(np.int64))
            rows[split].append(np.arange(start, start + n))
            start += n
    return assemble(
        x,
        y,
        rows,
        outputs=2,
        task="classification",
        names=generated(clients),
        class_names=None,
        source=SourceInfo(
            name="linear mixture",
            licence="made up",
            citation="Marfoq, Neglia, Bellet, Kameni, Vidal, 'Federated multi-task learning under "
            "a mixture of distributions', NeurIPS 2021, github.com/omarfoq/FedEM",
            url="https://github.com/omarfoq/FedEM",
        ),
        recipe={
            "recipe": "linear_mixture",
            "clients": clients,
            "components": components,
            "inputs": inputs,
            "alpha": alpha,
            "noise": noise,
            "test": test,
            "weights": weights.tolist(),
            "rules": rules.tolist(),
        },
        validation=validation,
        calibration=calibration,
        seed=seed,
    )
