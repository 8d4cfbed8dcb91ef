"""Invariant learning: predictors that are optimal in every environment of a client's data, with the
parts of IRM's and GroupDRO's objectives.

An environment is a set of examples measured under the same conditions. $R_e$ is its mean loss, and
$g_e = d/ds R_e(s outputs)$ at s = 1 is the slope of that loss in the scale of the outputs. If
outputs are optimally scaled in every environment, all $g_e$ are 0.

    IRM, for one client: $(R + gamma_t sum_e g_e^2 + l2 |w|^2 + lambda/2 |w - centre|^2) / c$,

    GroupDRO, on the server: $q_e <- q_e exp(eta R_e) / Z$,

with $c = max(1, gamma_t)$. The data contain each example's environment (`environments` of
`bf.data.from_arrays`, or `clients.as_environments()`).

Source: Arjovsky, Bottou, Gulrajani, Lopez-Paz, "Invariant risk minimization", 2019,
arXiv:1907.02893, section 3 (IRMv1), annealing and the division by gamma from the authors' code;
Sagawa, Koh, Hashimoto, Liang, "Distributionally robust neural networks for group shifts", ICLR
2020, algorithm 1.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import each
from bayesfl.base.options import Natural, NotNegative, declared
from bayesfl.base.protocols import Batch, Likelihood, Prior, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.energy import Energy
from bayesfl.composition.phases import Once
from bayesfl.composition.priors import Flat, Normal, Parameter

Estimator: TypeAlias = Literal["biased", "unbiased"]


def scale_slopes(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the derivative of each example's loss with respect to a scale s of its outputs, d/ds
    nll(s outputs) at s = 1.

    Args:
        likelihood: Distribution of y given the outputs.
        outputs: Outputs of the network, [..., B, O], or [..., B, T, O] if an example has several
            labels.
        y: Labels [..., B] or [..., B, T], or targets [..., B, O].

    Returns:
        Slopes [..., B] in nats, through which gradients flow; $(sigmoid(a) - y) a$ for two classes,
        $sum_c (p_c - 1[c = y]) a_c$ for more.

    Example:
        >>> outputs, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> bf.invariance.scale_slopes(bf.likelihoods.Categorical(), outputs, y)
        tensor([-0.2384])
    """

    # jvp is not possible, because torch's forward mode has one level for all threads; nor is
    # nll_and_slope, which works in place.
    def total(scaled: Tensor) -> tuple[Tensor, Tensor]:
        losses = likelihood.nll(scaled, y)
        return losses.sum(), losses

    slopes, losses = torch.func.grad(total, has_aux=True)(outputs)
    return (outputs * slopes).flatten(losses.dim()).sum(-1)


def members(batch: Batch) -> Tensor:
    """Return the environment of each example of a batch, among E, as rows of 0 and 1, [..., B, E];
    rows of padding are 0.

    Raises:
        ValueError: The data have no environments.

    Example:
        >>> batch = {"environment": torch.eye(2), "weight": torch.tensor([1.0, 0.0])}
        >>> bf.invariance.members(batch).tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    if "environment" not in batch:
        raise ValueError(
            "the data have no environments, but an invariant objective compares them: pass "
            "environments= to from_arrays, or, if every client is one environment, "
            "clients.as_environments()"
        )
    return batch["environment"] * batch["weight"].unsqueeze(-1)


def by_environment(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean of `values` [..., B] by environment, 0 for an environment without examples in
    the batch, and the counts; both [..., E].

    Example:
        >>> own = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> batch = {"environment": own, "weight": torch.ones(3)}
        >>> mean, count = bf.invariance.by_environment(torch.tensor([1.0, 3.0, 5.0]), batch)
        >>> mean.tolist(), count.tolist()
        ([2.0, 5.0], [2.0, 1.0])
    """
    counted = members(batch)
    count = counted.sum(-2)
    return (values.unsqueeze(-1) * counted).sum(-2) / count.clamp_min(1), count


def squared_slopes(slopes: Tensor, batch: Batch, estimator: Estimator = "biased") -> Tensor:
    """Estimate the sum of g_e^2 over environments, [...] in nats squared, where g_e is the mean
    slope over all data of environment e.

    Environments without examples in the batch add 0. `biased` squares the mean slope of an
    environment's $n_e$ examples in the batch. On average the result is too large, by the variance
    of one slope divided by $n_e$. `unbiased` is the mean product of the slopes of two different
    examples. On average over fresh batches it is exact, but it can be negative. Repeated steps on
    one fixed batch can therefore decrease it without limit, and an environment with a single
    example adds 0.

    Args:
        slopes: Derivative of each example's loss with respect to the scale of its outputs, [...,
            B], in nats; see `scale_slopes`.
        batch: The batch of B examples, with their `weight` and `environment`.
        estimator: `biased` or `unbiased`.

    Raises:
        ValueError: The data have no environments.

    Example:
        >>> own = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> batch = {"environment": own, "weight": torch.ones(3)}
        >>> slopes = torch.tensor([1.0, 3.0, 5.0])  # means 2 and 5
        >>> bf.invariance.squared_slopes(slopes, batch).item()
        29.0
    """
    mean, count = by_environment(slopes, batch)
    if estimator == "biased":
        return mean.square().sum(-1)
    return (
        ((mean * count).square() - (slopes.square().unsqueeze(-1) * members(batch)).sum(-2))
        / (count * (count - 1)).clamp_min(1)
    ).sum(-1)


@dataclass(frozen=True)
@declared
class Annealed:
    """Set the penalty's weight gamma_t: min(1, gamma) before round `start`, gamma from then on.

    The whole objective is divided by `scale`, $max(1, gamma_t)$, so that gradients keep their size
    under a large gamma.

    Args:
        gamma: Weight of the penalty, >= 0.
        start: Number of rounds before the full weight.

    Example:
        >>> annealed = bf.invariance.Annealed(100.0, start=5)
        >>> annealed.weight(5), annealed.weight(6), annealed.scale(6)
        (1.0, 100.0, 100.0)
    """

    gamma: NotNegative
    _: KW_ONLY
    start: Natural = 0

    def weight(self, round: int) -> float:
        """Return gamma_t of a round, counted from 1."""
        return self.gamma if round > self.start else min(1.0, self.gamma)

    def scale(self, round: int) -> float:
        """Return max(1, gamma_t)."""
        return max(1.0, self.weight(round))


@declared
def irm_energy(
    block: str, likelihood: Likelihood, annealed: Annealed, *, estimator: Estimator = "biased"
) -> Energy:
    """Return IRM's energy of a block: the mean loss plus gamma_t times the squared slopes of its
    environments, divided by max(1, gamma_t).

    Here R is the mean loss over a client's examples, in nats.

    Terms that link the block to others belong in its prior, see `tied`. The reported loss of a
    phase is divided, too.

    Example:
        >>> annealed = bf.invariance.Annealed(100.0, start=5)
        >>> bf.invariance.irm_energy("w", bf.likelihoods.Categorical(), annealed).likelihood
        'mean'
    """

    def share(given: Server, view: View, batch: Batch) -> Tensor:
        return torch.full_like(view["n"], 1 / annealed.scale(given["round"])).unsqueeze(-1)

    def penalty(
        features: Tensor | None,
        outputs: Tensor,
        losses: Tensor,
        batch: Batch,
        given: Server,
        view: View,
    ) -> Tensor:
        weight = annealed.weight(given["round"]) / annealed.scale(given["round"])
        return weight * squared_slopes(
            scale_slopes(likelihood, outputs, batch["y"]), batch, estimator
        )

    return Energy(block, (block,), likelihood="mean", weight=share, penalty=penalty)


@declared
def tied(
    annealed: Annealed,
    *,
    l2: NotNegative = 0.0,
    lam: NotNegative = 0.0,
    centre: Parameter | None = None,
) -> Prior:
    """Return the Gaussian prior of a ridge and of a pull towards `centre`, scaled like the
    objective of an invariant model.

    It adds $(l2 |w|^2 + lam/2 |w - centre|^2) / max(1, gamma_t)$ to a mean loss. It is a Gaussian,
    or flat if both strengths are 0.

    Args:
        annealed: Penalty weight of the objective; its `scale` divides both terms.
        l2: Strength of the ridge, >= 0.
        lam: Strength of the pull towards `centre`, >= 0.
        centre: Centre of the pull, see `Normal`; None if `lam` is 0.

    Raises:
        ValueError: `lam` > 0 comes without `centre`.

    Example:
        >>> annealed = bf.invariance.Annealed(1.0)
        >>> prior = bf.invariance.tied(annealed, l2=0.5)  # variance 1 / (2 l2 n)
        >>> prior.variance({"round": 1}, {"n": torch.tensor(4.0)}).tolist()
        [0.25]
    """
    if lam and centre is None:
        raise ValueError("a pull needs a centre, as centre=server_mean('w')")
    strength = lam + 2 * l2
    if not strength:
        return Flat()

    def middle(given: Server, view: View) -> Tensor:
        n = torch.as_tensor(view["n"])
        return (
            lam / strength * centre(given, view)
            if centre is not None
            else torch.zeros_like(n).unsqueeze(-1)
        )

    def variance(given: Server, view: View) -> Tensor:
        return (annealed.scale(given["round"]) / (strength * torch.as_tensor(view["n"]))).unsqueeze(
            -1
        )

    return Normal(centre=middle, variance=variance)


def anew_at(annealed: Annealed, state: str) -> tuple[Once, ...]:
    """Return a phase that resets an optimiser's state once, when the penalty's weight jumps in
    round `start`.

    Otherwise Adam's running squares, of the old objective's gradients, would be wrong for hundreds
    of steps.

    Args:
        annealed: Penalty weight of the objective.
        state: Name of the optimiser's state, see `Descend.persist`.

    Returns:
        A tuple of this phase; empty if there is no jump.

    Example:
        >>> len(bf.invariance.anew_at(bf.invariance.Annealed(100.0, start=5), "adam"))
        1
    """
    if annealed.weight(1) == annealed.gamma:
        return ()
    flag = f"{state}_annealed"

    def forget(algorithm: Algorithm, given: Server, view: View, data: Batch) -> View:
        now = torch.full_like(view[flag], float(given["round"] > annealed.start))
        if state not in view:
            return view | {flag: now}
        same = view[flag] == now
        return view | {
            flag: now,
            state: tree_map(lambda t: torch.where(same, t, torch.zeros_like(t)), view[state]),
        }

    return (Once(forget, kept={flag: torch.tensor(0.0)}),)


def evenly(data: Batch, most: int | None) -> Batch:
    """Choose at most `most` of a client's examples [..., B], an equal share from each of its
    environments; all of them for None.

    Within an environment they are evenly spaced in the order of the data. No environment is lost
    while `most` is at least their number.

    Raises:
        ValueError: The data have no environments.

    Example:
        >>> own = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> data = {"environment": own, "weight": torch.ones(4)}
        >>> bf.invariance.evenly(data, 2)["environment"].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if most is None or most >= data["weight"].shape[-1]:
        return data
    there = members(data)
    count = there.sum(-2, keepdim=True).long()
    n, environments = count.sum(-1, keepdim=True), (count > 0).sum(-1, keepdim=True)
    share = torch.where(n > most, most // environments.clamp_min(1), n).clamp_min(1)
    # Of c examples, those with ranks floor(i c / share) are chosen; rank r is among them if this
    # holds for i = ceil(r share / c).
    rank, size = there.cumsum(-2).round().long() - 1, count.clamp_min(1)
    kept = (((rank * share + size - 1) // size * size // share == rank) & (there > 0)).any(-1)
    places = kept.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]

    def taken(t: Tensor) -> Tensor:
        index = places.reshape(*places.shape, *[1] * (t.dim() - places.dim()))
        return t.gather(places.dim() - 1, index.expand(*places.shape, *t.shape[places.dim() :]))

    some = {name: each(taken, t) for name, t in data.items()}
    return some | {"weight": some["weight"] * taken(kept).to(some["weight"])}


def reweighted(log_q: Tensor, risk: Tensor, present: Tensor, eta: float) -> Tensor:
    """Update the logarithms of GroupDRO's weights by eta times the environments' losses; the
    weights present keep their sum.

    Args:
        log_q: Logarithms of the weights of each client's environments, [C, E].
        risk: Mean losses of the environments, [C, E] in nats.
        present: Above 0 if a client has the environment, [C, E]; otherwise the result is the lowest
            finite number of log_q's precision, which stands for no weight.
        eta: Step size, >= 0.

    Example:
        >>> log_q, risk = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]])
        >>> q = bf.invariance.reweighted(log_q, risk, torch.ones(1, 2), eta=1.0).exp()
        >>> q
        tensor([[0.7311, 0.2689]], dtype=torch.float64)
    """
    there = present > 0
    before = torch.where(there, log_q.double(), -torch.inf)
    raised = torch.where(there, before + eta * risk.double(), -torch.inf)
    new = raised - raised.flatten().logsumexp(0) + before.flatten().logsumexp(0)
    return torch.where(there, new, torch.full_like(new, torch.finfo(log_q.dtype).min))
