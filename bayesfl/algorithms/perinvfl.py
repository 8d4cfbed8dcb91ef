"""PerInvFL: invariant personal models that are pulled towards a global invariant model.

Lower problem: w by distributed IRM or GroupDRO over all clients' environments.

Upper problem: $theta_j$ by steps on
$(R_j(theta) + gamma_t sum_e g_e(theta)^2 + l2 |theta|^2 + lam/2 |theta - w|^2) / max(1, gamma_t)$.

In the upper problem w is the model received in the round; the client keeps $theta_j$ and its
optimiser's state from round to round.

The two weights are separate: gamma for invariance over the client's own environments, lam for the
pull towards the federation's model. Each is one number for all clients. The paper's Remark 1 gives
every client its own balancing weight, smaller for fewer environments. It is not implemented,
because the available text does not state which term it multiplies. With one environment a client's
own GroupDRO would be its plain risk, so PerInvFL-DRO also has IRM's penalty in the upper problem.

`variant="contrastive"` has the released code's contrastive term instead of the distance and of the
personal penalty. It pulls features $z_i$ of theta towards those of w and away from those of a model
that the client trains alone,

    $R_j(theta) + l2 |theta|^2 - lam mean_i log(a_i / (a_i + 0.2 b_i))$,
    $a_i = e^(cos(z_i, z_i^w))$, $b_i = e^(cos(z_i, z_i^own))$.

Three details differ from that code. It resets theta to w before every step, where $cos(z, z^w)$ is
1 and has no gradient; here theta continues. There the client's own model shares the optimiser's
moments with the global one; here it has its own optimiser. Here $z^w$ are features of the received
model.

Source: Tang, Guo, Zhang, "Exploiting personalized invariance for better out-of-distribution
generalization in federated learning", 2022, arXiv:2211.11243, equations 2 to 5 as far as they are
legible, and the code of the same authors, github.com/Tangx-yy/Per-InvFL. If neither is definite,
the text above states the choice.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from bayesfl.algorithms.group_dro import group_dro
from bayesfl.algorithms.irm import irm
from bayesfl.algorithms.moon import contrast, received
from bayesfl.base.protocols import Server, View
from bayesfl.composition import (
    Algorithm,
    Annealed,
    Block,
    Descend,
    Energy,
    Repeat,
    anew_at,
    irm_energy,
    options,
    server_mean,
    tied,
    with_personal,
)
from bayesfl.likelihoods import Categorical
from bayesfl.optim import Adam

APART = 0.2  # factor of the negative pairs in the released code


@options.method(idle={("lower", "irm"): ("eta", "environments", "loss_examples")})
def perinvfl(
    model: options.Model,
    *,
    lower: Literal["irm", "group_dro"] = "irm",
    variant: Literal["distance", "contrastive"] = "distance",
    lam: options.Strength = 1.0,
    gamma: options.Gamma = 91257.18613115903,
    anneal: options.Anneal = 12,
    estimator: options.SlopeEstimator = "biased",
    l2: options.Ridge = 0.00110794568,
    eta: options.Eta = 1e-2,
    environments: options.Environments = 1,
    loss_examples: options.LossExamples = None,
    steps: options.Steps = 5,
    personal_steps: options.Count = 2,
    batch_size: options.BatchSize = 200,
    adapt_steps: options.Count = 100,
    optimiser: options.KeptOptimiser = Adam(5e-4),
    personal_optimiser: options.KeptOptimiser = Adam(1e-4),
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate `model` by PerInvFL: invariant personal models with a pull towards an invariant
    global one; the data need environments.

    Args:
        model: Any module; for `contrastive` a `bf.models.SplitModel`, whose features enter the
            loss.
        lower: Method that trains the global model.
        variant: The paper's squared `distance`, or the released code's `contrastive` form.
        lam: Strength of the distance term, added to the mean loss, or of the contrastive term. The
            distance term is divided by $max(1, gamma_t)$, like the other terms.
        gamma: Weight of the squared slopes from round `anneal` on, in the lower problem by IRM and
            in the upper one by distance.
        l2: Strength of theta's ridge, and of w's in a lower problem by IRM.
        personal_steps: Number of steps on theta for each of the `steps`.
        adapt_steps: Number of steps on theta for a client that joins later, from the global model;
            with `contrastive` rounded up to a multiple of `personal_steps`.
        optimiser: Optimiser of w, and of the model that a client trains alone.
        personal_optimiser: Optimiser of theta.

    Example:
        >>> clients = bf.data.coloured("digits")
        >>> model = bf.models.mlp(clients.inputs, hidden=8, outputs=2)
        >>> method = bf.algorithms.perinvfl(model, lam=0.5)
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['w.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    rest = {
        "steps": steps,
        "batch_size": batch_size,
        "optimiser": optimiser,
        "likelihood": likelihood,
    }
    if lower == "irm":
        below = irm(model, gamma=gamma, anneal=anneal, estimator=estimator, l2=l2, **rest)
    else:
        below = group_dro(
            model, eta=eta, environments=environments, loss_examples=loss_examples, **rest
        )
    personal = {"optimiser": personal_optimiser, "persist": "theta_optimiser"}

    if variant == "distance":
        annealed = Annealed(gamma, start=anneal)
        fit = Descend(
            irm_energy("theta", likelihood, annealed, estimator=estimator),
            steps=personal_steps * steps,
            batch_size=batch_size,
            **personal,
        )
        return with_personal(
            below,
            *anew_at(annealed, "theta_optimiser"),
            fit,
            prior=tied(annealed, l2=l2, lam=lam, centre=server_mean("w")),
            adapt=(replace(fit, steps=adapt_steps),),
        )

    contrasted = Energy(
        "theta",
        ("theta",),
        likelihood="mean",
        penalty=contrast(lam, factor=APART),
        at={"received": received, "previous": own},
    )
    fit = Descend(contrasted, epochs=personal_steps, **personal)
    alone = Descend(
        Energy("alone", ("alone",), likelihood="mean"),
        optimiser=optimiser,
        persist="alone_optimiser",
    )
    phase, adapt = (
        Repeat((fit, alone), times=n, batch_size=batch_size)
        for n in (steps, -(-adapt_steps // personal_steps))
    )
    below = replace(below, blocks={**below.blocks, "alone": Block(pool=None, keep=True)})
    return with_personal(below, phase, prior=tied(Annealed(0.0), l2=l2), adapt=(adapt,))


def own(algorithm: Algorithm, given: Server, view: View) -> dict[str, Tensor]:
    """Return the weights of the model that the client trains alone."""
    return algorithm.leaves(("alone",), view)
