"""The covariance without data, against the inverse that it was made of."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesfl.curvature import Curvature, invert
from bayesfl.curvature.covariance import Covariance
from bayesfl.curvature.dual import independent
from tests.curvature.brute import CASES, Case

EXACT = {"atol": 1e-10, "rtol": 1e-9}
LIMIT = 2**30


def made(
    case: Case, form: str
) -> tuple[Curvature, Tensor, Covariance, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A case's curvature and inputs, the covariance, and what the inverse predicts elsewhere,
    without and with centring.
    """
    x = case.data(6)
    curvature, new = Curvature(case.model()), x[:3] + 0.1
    precision = 0.5 + torch.rand(
        curvature.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    if form == "independent":
        inverse = independent(curvature, precision, curvature.diagonal(x))
    else:
        kind, _, some = form.partition("-")
        indices = (
            torch.randperm(curvature.size, generator=torch.Generator().manual_seed(2))[:9]
            if some
            else None
        )
        inverse = invert(curvature, x, precision, form=kind, indices=indices)  # type: ignore[arg-type]
    return (
        curvature,
        new,
        Covariance.of(inverse, limit=LIMIT),
        inverse.predict(new),
        inverse.predict(new, centre=True),
    )


@pytest.mark.parametrize("form", ["primal", "dual", "primal-some", "dual-some", "independent"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_predicts_as_the_inverse_does(case: Case, form: str):
    """At new inputs, in every form, of all weights and of some, for stacks and for other modules;
    and the same bits when restored.
    """
    curvature, new, covariance, plain, centred = made(case, form)
    assert_close(covariance.predict(new), plain, **EXACT)
    assert_close(covariance.predict(new, centre=True), centred, **EXACT)
    restored = Covariance.restored(
        curvature, {key: t.clone() for key, t in covariance.tensors().items()}
    )
    assert_close(restored.predict(new), covariance.predict(new), rtol=0, atol=0)


def test_what_it_keeps_are_no_data():
    """Vectors over the weights, and a factor of weights x rows: none has an axis of inputs."""
    curvature, *_, covariance, _, _ = made(CASES[0], "dual")
    tensors = covariance.tensors()
    assert set(tensors) == {"variance", "root", "sign", "curved"}
    assert all(t.shape[:1] in ((), (curvature.size,)) for t in tensors.values())


def test_the_columns_of_the_dual_factor_are_no_examples():
    """Divided by its bias, an example's column of a first layer's weights gives the example: no
    column of the stored factor does.
    """
    case = CASES[0]
    x, curvature = case.data(6), Curvature(case.model())
    inverse = invert(curvature, x, 1.0, form="dual")
    root = Covariance.of(inverse, limit=LIMIT).root
    # Along eigenvectors, which mix examples.
    assert_close(root.T @ root, torch.diag((root.T @ root).diagonal()), atol=1e-10, rtol=0)
    first = root[: 7 * 6].view(6, 7, -1) / root[42:48].view(6, 1, -1)
    rows = first.permute(0, 2, 1).reshape(-1, 7)
    rows = rows[rows.isfinite().all(1)]
    used = x[(x != 0).any(1)]
    assert torch.cdist(rows, used).min() > 1e-3


def test_a_factor_above_the_limit_is_refused_with_its_size():
    inverse = invert(Curvature(CASES[0].model()), CASES[0].data(6), 1.0, form="dual")
    needed = 8 * inverse.size * inverse.order
    # Without columns of eigenvalues that are 0 up to rounding.
    assert 0 < Covariance.of(inverse, limit=needed).root.nbytes <= needed
    with pytest.raises(
        MemoryError,
        match=rf"{inverse.size} x {inverse.order} .* {needed:,} bytes and {needed - 1:,} may",
    ):
        Covariance.of(inverse, limit=needed - 1)
