"""What a table says of its runs, against numpy on their histories."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from bayesfl.calibration import Temperature
from scipy import stats
from torch import nn

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.study.table import Table
from tests.cases import federation, run
from tests.study.made import DATA, one


def by_hand(table: Table, method: str, column: str, best: bool) -> dict[str, list[float]]:
    """The column's value of every seed by the method's options, at the last round or the one with
    the lowest validation loss.
    """
    found: dict[str, list[float]] = {}
    for row in table.rows:
        if row.method == method:
            loss = row.record.history["validation_nll"]
            place = int(np.argmin(loss)) if best else -1
            found.setdefault(str(row.options), []).append(row.record.history[column][place])
    return found


@pytest.mark.parametrize("at", ["last", "best"])
def test_options_are_chosen_by_validation_data(table: Table, at: Any):
    """The lowest mean over all seeds; then every measure is of these options."""
    chosen = table.chosen("validation_nll", at=at)
    for method in table.methods:
        losses = by_hand(table, method, "validation_nll", at == "best")
        wanted = min(losses, key=lambda options: float(np.mean(losses[options])))
        assert str(chosen.options[method]) == wanted
        values = by_hand(table, method, "personal_accuracy", at == "best")[wanted]
        mean, error, seeds = chosen.summary()[method]["personal_accuracy"]
        assert mean == np.mean(values)
        assert error == pytest.approx(np.std(values, ddof=1) / np.sqrt(2))
        assert seeds == 2
    accurate = table.chosen("validation_accuracy", at=at)
    for method in table.methods:
        shares = by_hand(table, method, "validation_accuracy", False)
        if at == "last":
            assert np.mean(shares[str(accurate.options[method])]) == max(
                map(np.mean, shares.values())
            )


def test_differences_are_paired(table: Table):
    chosen = table.chosen()
    found = chosen.differences("FedAvg", ["personal_nll"])
    last = {
        name: [r.record.history["personal_nll"][-1] for r in chosen.rows if r.method == name]
        for name in table.methods
    }
    assert list(found) == ["Ditto", "pFedVEM"]
    for name in found:
        apart = np.subtract(last[name], last["FedAvg"])
        mean, error, seeds = found[name]["personal_nll"]
        assert mean == pytest.approx(apart.mean())
        assert error == pytest.approx(apart.std(ddof=1) / np.sqrt(2))
        assert seeds == 2
    assert table.differences("FedAvg", ["personal_nll"]).runs == found.runs
    for call in (table.differences, lambda name: table.result(name, 0)):
        with pytest.raises(
            ValueError, match=r"no run of a method 'fedavg'; the nearest are \['FedAvg"
        ):
            call("fedavg")
    with pytest.raises(ValueError, match=r"no run has the measure 'personal_loss'.*personal_"):
        table.summary(["personal_loss"])
    with pytest.raises(ValueError, match=r"no run has the measure 'nll'.* are \['personal_nll'"):
        table.summary(["nll"])


def test_edges_and_options_that_a_method_lacks_are_told(table: Table):
    text = str(table.chosen("validation_nll"))
    assert "Options chosen by validation_nll:" in text
    assert "FedAvg: optimiser SGD(0.1) (the largest of its grid)" in text
    assert "optimiser is no option of pFedVEM (it has head_optimiser, body_optimiser)" in text
    best = repr(table.chosen(at="best"))
    assert "Options chosen by validation_nll, each run at its best round by it:" in best


def test_nothing_is_chosen_on_test_data(table: Table, tmp_path: Path):
    with pytest.raises(ValueError, match=r"validation data, never on test data.*'personal_nll'"):
        table.chosen("personal_nll")
    with pytest.raises(ValueError, match=r"'validation_loss' is no validation measure.*_nll"):
        table.chosen("validation_loss")
    without = DATA.func, *DATA.args

    def data(seed: int) -> FederatedData:
        make, name = without
        return make(name, clients=4, max_size=50, seed=seed)

    study = one(data=data, options={"*": {"epochs": [1, 2]}})
    with pytest.warns(UserWarning, match=r"no validation split.*validation=0\.2"):
        blind = study.run(tmp_path, progress=False)
    assert "no measures of validation data" in str(blind)
    for ask in (blind.chosen, blind.summary, lambda: blind.differences("FedAvg")):
        with pytest.raises(ValueError, match=r"no measures of validation data.*validation=0\.2"):
            ask()
    assert len(blind.to_pandas()) == 4
    assert "4 runs of FedAvg" in repr(blind)
    plain = one(data=data).run(tmp_path, progress=False)  # nothing is to be chosen
    assert plain.summary()["FedAvg"]["personal_nll"].seeds == 2


def test_a_data_frame_has_a_line_for_each_run(table: Table):
    frame = table.to_pandas()
    assert len(frame) == 16
    ditto = frame[(frame.method == "Ditto") & (frame.option_lam == 0.1) & (frame.seed == 1)]
    assert list(ditto.option_optimiser) == ["SGD(0.01)", "SGD(0.1)"]
    assert set(ditto.epochs) == {2.0}
    assert frame.error.isna().all()


def test_budgets_stand_in_the_table(table: Table):
    """Steps, passes and bytes of a client and round always; of settings those that differ."""
    _, second, *_ = table.to_markdown().split("\n\n")
    head, _, *lines = second.splitlines()
    assert [cell.strip() for cell in head.split("|")[1:6]] == [
        "per training client and round",
        "steps",
        "epochs",
        "bytes up",
        "bytes down",
    ]
    assert "dtype" not in head
    assert "length" in head
    epochs = [line.split("|")[3].strip() for line in lines]
    assert epochs == ["1.00", "2.00", "3.00"]


def test_one_budget_of_steps(tmp_path: Path):
    table = one(steps=5).run(tmp_path, progress=False)
    assert [row.record.budget["steps"] for row in table.rows] == [5, 5]
    assert "FedAvg: Descend on w: 5 steps instead of 1 epoch" in str(table)


def test_results_of_ones_own(model: nn.Module, clients: FederatedData):
    """One table of finished runs, paired by seed and data."""
    method, other = (make(model, epochs=1) for make in (bf.algorithms.fedavg, bf.algorithms.ditto))
    about: dict[str, Any] = {"rounds": 2, "evaluate_every": 1}
    one, two = (run(method, clients, seed=seed, **about) for seed in (0, 1))
    three, four = (run(other, clients, seed=seed, **about) for seed in (1, 2))
    table = bf.table({"a": [one, two], "b": [three, four]})
    assert table.result("a", 1) is two
    found = table.differences("a")["b"]["personal_nll"]
    assert found.seeds == 1
    assert found.mean == three.history["personal_nll"][-1] - two.history["personal_nll"][-1]
    few = run(method, clients.select(range(6)), seed=1, **about)
    with pytest.raises(ValueError, match="a and b have no seed on the same data"):
        bf.table({"a": few, "b": three}).differences("a")
    assert clients.hash[:8] in str(bf.table({"a": few, "b": three}))
    assert "*" not in str(table)
    with pytest.raises(ValueError, match="evaluate_every=1"):
        bf.table({"a": run(method, clients)}).summary()


def test_measures_before_calibration_are_told(clients: FederatedData, model: nn.Module):
    data = DATA(seed=0)
    network = bf.models.mlp(data.inputs, hidden=4, outputs=10)
    result = run(bf.algorithms.fedavg(network, epochs=1), data, evaluate_every=1)
    with pytest.warns(UserWarning, match="before the steps of calibration"):
        bf.table({"a": result.calibrate(Temperature()), "b": result})


def test_runs_of_other_networks_methods_or_clients_are_no_seeds_of_one(clients: FederatedData):
    def ran(method: bf.Algorithm, seed: int, data: FederatedData = clients) -> Result:
        return bf.simulate(method, data, rounds=1, seed=seed, progress=False)

    def of(hidden: int, activation: type[nn.Module] = nn.ReLU) -> bf.Algorithm:
        layers = nn.Linear(8, hidden), activation(), nn.Linear(hidden, 3)
        return bf.algorithms.fedavg(nn.Sequential(*layers))

    first = ran(of(4), 0)
    hand = replace(of(4), phases=(replace(cast(Any, of(4).phases[0]), steps=3),))
    fewer = federation(sizes=(9, 12))
    others = [ran(of(8), 1), ran(of(4, nn.Tanh), 1), ran(hand, 1), ran(of(4), 1, fewer)]
    for other in others:
        assert len(bf.table({"A": [first, other]}).methods) == 2
    (alone,) = bf.table({"A": [first, ran(of(4), 1)]}).methods
    assert alone == "A"


def made(runs: dict[str, list[float]]) -> Table:
    """A table of runs whose last losses and accuracies are given, a seed each."""
    clients, model = federation(), bf.models.mlp(8, outputs=3)
    method = bf.algorithms.fedavg(model, epochs=1)
    results: dict[str, list[Result]] = {}
    for name, losses in runs.items():
        for seed, loss in enumerate(losses):
            result = run(method, clients, rounds=1, seed=seed, evaluate_every=1)
            result.history[-1].update(personal_nll=loss, personal_accuracy=1 - loss)
            results.setdefault(name, []).append(result)
    return bf.table(results)


def test_a_table_of_a_paper():
    """The best mean in bold; a dagger behind what a paired t test does not tell from it: the same
    means and errors are told apart where seeds move together, and are not where they do not.
    """
    table = made({"a_1": [0.1, 0.2, 0.3], "with": [0.2, 0.3, 0.41], "against": [0.41, 0.3, 0.2]})
    lines = table.to_latex(["personal_nll", "personal_accuracy"]).splitlines()
    assert lines[:3] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & personal NLL & personal accuracy \\",
    ]
    best = r"\textbf{0.200 $\pm$ 0.058}"
    assert lines[4] == rf"a\_1 & {best} & \textbf{{0.800 $\pm$ 0.058}} \\"
    assert lines[5] == r"with & 0.303 $\pm$ 0.061 & 0.697 $\pm$ 0.061 \\"
    dagger = r"$\pm$ 0.061$\dagger$"
    assert lines[6] == rf"against & 0.303 {dagger} & 0.697 {dagger} \\"
    for place, apart in (("with", True), ("against", False)):
        found = table.differences("a_1", ["personal_nll"])[place]["personal_nll"]
        assert (abs(found.mean) > stats.t.ppf(0.975, 2) * found.error) == apart
    assert lines[-1].startswith(r"Best means in bold. $\dagger$ Not told apart")
    alone = made({"one": [0.1], "other": [0.2]}).to_latex()
    assert "dagger" not in alone
    assert r"\textbf{0.100}" in alone
