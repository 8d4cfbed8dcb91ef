"""Survival that a Cox fit predicts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from bayesfl.base.protocols import Tensors


def predicted(
    baseline: Tensors,
    ends: Sequence[float],
    groups: Sequence[Any],
    design: Tensor,
    eta: Tensor,
    stratum: Tensor,
    covariance: Tensor,
    level: float,
) -> Any:
    """Return the cumulative hazard and the survival of G rows at each time while rows of their
    stratum are at risk, with errors and intervals, as a data frame of pandas.

    With dH the steps of Efron's estimate of the hazard, which is Breslow's where no times tie, the
    cumulative hazard of a row is e^eta H; with D the sum of (mean of x - x) dH, its variance is

        e^(2 eta) (sum of w / phi_l^2 + D' V D).

    Intervals are normal for log(-log survival).

    Args:
        baseline: `at_risk`, `variance` and `followed` of the baseline, as `PartialLikelihood` keeps
            them.
        ends: The T times.
        groups: Names of the rows.
        design: Their standardised columns, [G, p].
        eta: Their linear predictors, [G].
        stratum: The places of their strata, [G].
        covariance: Of the errors V of coefficients of standardised columns, [p, p].
        level: Probability of the intervals.

    Source: Tsiatis, "A large sample study of Cox's regression model", Annals of Statistics 9, 1981;
    Therneau and Grambsch, "Modeling survival data", Springer 2000, section 10.2, as R's survfit.
    """
    import pandas

    steps, spread, followed = (
        baseline[name].unflatten(0, (-1, len(ends)))[stratum]
        for name in ("at_risk", "variance", "followed")
    )
    met, relative = steps.cumsum(1), eta.exp().unsqueeze(1)  # [G, T, 1 + p], [G, 1]
    drift = met[..., 1:] - design.unsqueeze(1) * met[..., :1]
    variance = spread.cumsum(1) + ((drift @ covariance) * drift).sum(-1)
    hazard, error = relative * met[..., 0], relative * variance.sqrt()
    reach = float(stats.norm.ppf((1 + level) / 2)) * error / hazard.clamp_min(1e-300)
    columns = {
        "hazard": hazard,
        "se(hazard)": error,
        "survival": (-hazard).exp(),
        f"{100 * (1 - level) / 2:g} %": (-hazard * reach.exp()).exp(),
        f"{100 * (1 + level) / 2:g} %": (-hazard * (-reach).exp()).exp(),
    }
    index = pandas.MultiIndex.from_product([groups, ends], names=["row", "time"])
    values = np.stack([one.flatten().numpy() for one in columns.values()], 1)
    found = pandas.DataFrame(values, index=index, columns=list(columns))
    return found[followed.flatten().numpy()]
