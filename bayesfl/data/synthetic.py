"""Synthetic federations, whose true model is known."""

import numpy as np
import torch

from bayesfl.base.checks import number, whole
from bayesfl.data.assembly import assemble
from bayesfl.data.federated import FederatedData
from bayesfl.data.names import generated
from bayesfl.data.sources import SourceInfo

MARFOQ = (
    "Marfoq, Neglia, Bellet, Kameni, Vidal, 'Federated multi-task learning under a mixture of distributions', NeurIPS 2021, "
    "github.com/omarfoq/FedEM"
)


def linear_mixture(
    *,
    clients: int = 300,
    components: int = 3,
    inputs: int = 150,
    alpha: float = 0.4,
    noise: float = 0.1,
    test: int = 2000,
    seed: int = 12345,
    validation: float = 0.0,
    calibration: float = 0.0,
) -> FederatedData:
    """Draw labels of two classes by one of M linear rules for each example; clients use the rules in different proportions.

        pi_j ~ Dirichlet(alpha 1_M),  theta_m ~ U[-1, 1]^d,  n_j = min(int(LogNormal(4, 2)) + 50, 1000),
        x ~ U[-1, 1]^d,  z ~ pi_j,  y = round(sigmoid(theta_z' x + e)),  e ~ N(0, noise^2):

    a threshold of the noisy score, no Bernoulli draw, so that one rule is nearly always right where it applies. With the default seed the
    300 sizes are those of the paper's experiment, 67,758 examples in all. `recipe["weights"]` has pi [J, M], `recipe["rules"]` theta
    [M, d].

    Args:
        clients: Number of clients J.
        components: Number of rules M.
        inputs: Number of inputs d.
        alpha: Concentration of the weights, > 0: the smaller, the more alike are a client's examples.
        noise: Standard deviation of the score's noise, >= 0.
        test: Number of test examples of each client; the authors take 5,000, which need 900 MB.
        seed: Seed of all draws, below 2^32. They come from NumPy's legacy generator, which gives the authors' sizes; the validation and
            calibration shares use the seed too.

    The other options are those of every recipe: `bayesfl.data.recipes.Options`.

    Raises:
        ValueError: A number lies outside its range.

    References:
        Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated multi-task learning under a mixture of distributions", NeurIPS 2021, experiments;
        sizes from the authors' code, github.com/omarfoq/FedEM.
    """
    for name, value in {"clients": clients, "components": components, "inputs": inputs, "test": test}.items():
        whole(name, value, least=1)
    if not (0 < number("alpha", alpha) < np.inf and 0 <= number("noise", noise) < np.inf):
        raise ValueError(f"alpha must be > 0 and noise >= 0, both finite, got {alpha} and {noise}")
    if whole("seed", seed, least=0) >= 2**32:
        raise ValueError(f"seed must be below 2**32, which NumPy's legacy generator takes, got {seed}")
    rng = np.random.RandomState(seed)
    sizes = np.minimum(rng.lognormal(4, 2, clients).astype(int) + 50, 1000)
    weights = rng.dirichlet(np.full(components, alpha), clients)
    if not np.isfinite(weights).all():
        raise ValueError(f"alpha is so small that its draws underflow: take 0.01 or more, got {alpha}")
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
        source=SourceInfo(name="linear mixture", licence="made up", citation=MARFOQ, url="https://github.com/omarfoq/FedEM"),
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
