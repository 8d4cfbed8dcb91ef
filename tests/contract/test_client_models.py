"""Every method gives each client a model of its own, which predicts as the federation does, here
and after it was written and read.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace, Neighbours
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from tests.cases import CASES, Case, sampled
from tests.federation.made import run

_RUNS: dict[int, Result] = {}


def known(case: Case, model: nn.Module, clients: FederatedData) -> Result:
    """A method's run, which both tests look at."""
    if id(case) not in _RUNS:
        options = {"rounds": 2, "evaluate_every": 2, "participation": 0.6}
        _RUNS[id(case)] = run(case(model), clients, **options)
    return _RUNS[id(case)]


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_a_clients_model_predicts_as_the_federation(
    case: Case, model, clients: FederatedData, tmp_path: Path
):
    """To rounding as `Result.predict`, draws included; the file gives the same bits."""
    result = known(case, model, clients)
    together, means, drawn = result.predict(), result.predict(draws=0), result.predict(draws=7)
    for j in (0, 3):
        one, (x, _) = result.client(j), clients.test.client(j)
        found = one.predict(x)
        for name in ("probs", "epistemic"):
            wanted = getattr(together.client(j), name)
            assert_close(getattr(found, name), wanted, atol=1e-12, rtol=0, equal_nan=True)
        assert_close(one.predict(x, draws=7).probs, drawn.client(j).probs, atol=1e-9, rtol=0)
        assert_close(one.predict(x, draws=0).probs, means.client(j).probs, atol=1e-12, rtol=0)
        one.save(tmp_path / str(j))
        again = bf.load_client(tmp_path / str(j), case(model)).predict(x)
        assert torch.equal(again.probs, found.probs)
        assert torch.equal(again.epistemic.nan_to_num(), found.epistemic.nan_to_num())
        if result.algorithm.copies(result.algorithm.parts) is None or case.name == "ifca":
            # Which chooses one of its copies.
            with torch.no_grad():
                outputs = one.model()(x.double())
            assert_close(outputs.softmax(-1), means.client(j).probs, atol=1e-12, rtol=0)
        else:
            with pytest.raises(ValueError, match=r"2 of 2 copies.*predict\(x\)"):
                one.model()


@pytest.mark.parametrize("case", sampled(CASES), ids=str)
def test_a_run_is_loaded_without_data(case: Case, model, clients: FederatedData, tmp_path: Path):
    """History, settings and server; a client's model, unless it needs its training data, which the
    message then says.
    """
    result = known(case, model, clients)
    result.save(tmp_path)
    loaded = bf.load(tmp_path, case(model))
    assert (loaded.settings, loaded.history.rows, loaded.round) == (
        result.settings,
        result.history.rows,
        2,
    )
    assert_close(loaded.server, result.server, atol=0, rtol=0)
    x, _ = clients.test.client(1)
    if result.algorithm.finetune or isinstance(
        result.algorithm.predictor, LinearisedLaplace | Neighbours
    ):
        with pytest.raises(
            ValueError,
            match=r"'client 1' needs its training data.*bf\.load\(path, algorithm, clients\)",
        ):
            loaded.client(1)
    else:
        assert torch.equal(loaded.client(1).predict(x).probs, result.client(1).predict(x).probs)
    with pytest.raises(
        ValueError, match=r"without its clients' data.*bf\.load\(path, algorithm, clients\)"
    ):
        loaded.predict()
