"""IVON: mean-field variational inference by natural gradients; its precision is a running mean of
the curvature, which is estimated from gradients only.
"""

import torch
from torch import Tensor, nn

from bayesfl.base.layout import Pattern
from bayesfl.base.options import Count, Natural, Positive, declared
from bayesfl.base.protocols import Likelihood
from bayesfl.base.random import Purpose
from bayesfl.curvature.batches import Data
from bayesfl.optim import Decay, Rate, cosine, rate_at
from bayesfl.posteriors.mean_field import MeanField
from bayesfl.posteriors.sampling.target import Target
from bayesfl.posteriors.variational import Variational, normals


@declared
def ivon(
    model: nn.Module,
    x: Data,
    y: Tensor | None = None,
    *,
    precision: float | Tensor,
    centre: float | Tensor = 0.0,
    likelihood: Likelihood | None = None,
    pattern: Pattern = "*",
    steps: Count = 2000,
    batch_size: Count | None = None,
    rate: Rate = cosine(0.1),
    betas: tuple[Decay, Decay] = (0.9, 0.995),
    curvature: Positive = 1.0,
    seed: Natural = 0,
) -> Variational:
    """Fit the Gaussian of a mean and a precision for each weight that is closest to the posterior
    of a module's weights, at the cost of two gradients a step; the module is not changed.

    With the mean m, the curvature h of the loss's mean over N examples, $d = precision / N$, and
    $s = (N (h + d))^(-1/2)$, a step computes the gradient g' at $m + s e$ and $m - s e$, e standard
    normal, and

        $h' = g' (w - m) / s^2$,

        $g <- b1 g + (1 - b1) g'$,

        $h <- b2 h + (1 - b2) h' + (1 - b2)^2 (h - h')^2 / (2 (h + d))$,

        $m <- m - rate (g / (1 - b1^t) + d (m - centre)) / (h + d)$,

    with g' and h' the means over the two. The last term of h keeps $h + d$ above 0.

    Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan, Moellenhoff,
    "Variational learning is effective for large deep networks", ICML 2024, algorithm 1, where a
    step has one draw.

    Args:
        model: See `MeanField.fit`.
        x: See `MeanField.fit`.
        y: See `MeanField.fit`.
        precision: See `MeanField.fit`.
        centre: See `MeanField.fit`.
        likelihood: See `MeanField.fit`.
        pattern: See `MeanField.fit`.
        steps: Number of steps.
        batch_size: Number of examples of a step, for inputs and labels; None for all of them.
        rate: The rate, a number or a schedule over the steps.
        betas: b1 of gradients, and b2 of curvature, in [0, 1). The paper's b2, 1 - 1e-5, is for
            some hundred thousand steps.
        curvature: h at the start, > 0.
        seed: Seed of the draws and of the order of examples.

    Raises:
        ValueError: See `MeanField.fit`.

    Example:
        >>> x, y = torch.randn(30, 2), torch.arange(30) % 3
        >>> fitted = bf.posteriors.ivon(nn.Linear(2, 3), x, y, precision=1.0, steps=100)
        >>> fitted
        MeanField(9 weights, 30 examples)
        >>> fitted.predict(x)["probs"].shape
        torch.Size([30, 3])
    """
    b1, b2 = betas
    target = Target.of(model, x, y, likelihood, precision=precision, centre=centre, pattern=pattern)
    n = target.examples
    family, m, decay = MeanField(), target.loc.clone(), target.precision / n
    g, h, history = torch.zeros_like(m), torch.full_like(m, curvature), []
    belief = family.of_natural(n * (h + decay), n * (h + decay) * m)
    batches = target.batches(batch_size, seed)
    for step, (inputs, labels) in zip(range(steps), batches, strict=False):
        noise = normals(seed, Purpose.NOISE, step, len(m), m)
        s = (n * (h + decay)).rsqrt()
        slopes, energies = [], []
        for e in noise:
            w = (m + s * e).requires_grad_()
            with torch.enable_grad():
                nll = target.nll(w, inputs, labels)
                slopes.append(torch.autograd.grad(nll / n, w)[0])
            w, nll = w.detach(), nll.detach()
            energies.append(nll + target.prior(w) + family.log_density(belief, w))
        history.append(-torch.stack(energies).mean())
        if not history[-1].isfinite():
            raise ValueError(
                f"the ELBO is not finite at step {step + 1}: use a lower rate, as rate=0.01, or "
                "more curvature=, and scale the inputs"
            )
        slope = torch.stack(slopes)
        new = (slope * noise / s).mean(0)
        g = b1 * g + (1 - b1) * slope.mean(0)
        h = b2 * h + (1 - b2) * new + (1 - b2) ** 2 * (h - new).square() / (2 * (h + decay))
        pull = g / (1 - b1 ** (step + 1)) + decay * (m - target.centre)
        m = m - rate_at(rate, step + 1, steps) * pull / (h + decay)
        belief = family.of_natural(n * (h + decay), n * (h + decay) * m)
    return Variational(family, belief, target, torch.stack(history).cpu())
