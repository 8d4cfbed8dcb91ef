"""The loop of a run promises the same on one machine and over a network: when a round is evaluated,
written and told, what ends it, and what an error leaves.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.trees import flatten
from bayesfl.data import FederatedData
from bayesfl.federation.store.files import checkpoints
from bayesfl.flower import load
from tests.flower.made import deploy, losing, method, spoilt, unheard


class There:
    """A run on one of the two transports, which loses client 2 in the rounds of `lost`, counted
    from 0.
    """

    def __init__(self, kind: str, model: nn.Module, clients: FederatedData, folder: Path) -> None:
        self.kind, self.clients, self.folder = kind, clients, folder
        self.method = method("ditto", model)
        self.seen: list[tuple[int, bool, bool]] = []

    def run(self, *callbacks: Any, lost: int | None = None, **options: Any) -> Any:
        options = {"rounds": 3, "seed": 3, "checkpoint": self.folder / "run", **options}
        options["on_round"] = callbacks
        if self.kind == "serve":
            alter = None if lost is None else spoilt(2, unheard, round=lost)
            return deploy(
                self.method, self.clients, self.folder, alter=alter, timeout=0.3, **options
            )
        faults = None if lost is None else losing(2, round=lost)
        return bf.simulate(self.method, self.clients, faults=faults, progress=False, **options)

    def written(self) -> Any:
        """What the newest checkpoint holds."""
        folder = self.folder / "run"
        if self.kind == "serve":
            return load(folder, self.method)
        return bf.load(folder, self.method, self.clients)

    def note(self, run: Any) -> None:
        """A callback: the round, whether it is measured, and whether that is in the checkpoint."""
        there = checkpoints(self.folder / "run")
        saved = bool(there) and self.written().history.rows == run.history.rows
        self.seen.append((run.round, "personal_nll" in run.history[-1], saved))


@pytest.fixture(params=["simulate", "serve"])
def there(request: Any, model: nn.Module, clients: FederatedData, tmp_path: Path) -> There:
    return There(request.param, model, clients, tmp_path)


def ends_at(round: int) -> Callable[[Any], bool]:
    return lambda run: run.round == round


def test_a_round_is_evaluated_then_written_then_told(there: There):
    """And the last round is always evaluated and written."""
    found = there.run(there.note, evaluate_every=2, every=1)
    assert there.seen == [(1, False, True), (2, True, True), (3, True, True)]
    assert found.history.rows == there.written().history.rows
    assert there.run(there.note, evaluate_every=2, every=1).round == 3
    assert there.seen[3:] == [(3, True, True)]  # a run that goes on tells its last round again


@pytest.mark.parametrize("every", [1, 5])
def test_true_ends_a_run(there: There, every: int):
    """Between evaluations it is measured and written first, and told once more; it stays ended."""
    options: dict[str, Any] = {"rounds": 9, "evaluate_every": 2, "every": every}
    for _ in range(2):
        found = there.run(there.note, ends_at(3), **options)
        assert found.round == there.written().round == 3
    once = every == 1
    before = [(1, False, once), (2, True, once), (3, False, once)]
    assert there.seen == [*before, (3, True, True), (3, True, True)]
    assert found.history.rows == there.written().history.rows


def test_a_run_that_ends_is_written(there: There):
    """Whatever is due, and where nothing is evaluated, too."""
    found = there.run(there.note, ends_at(2), rounds=9, evaluate_every=None, every=5)
    assert found.round == there.written().round == 2
    assert [(round, measured) for round, measured, _ in there.seen] == [(1, False), (2, False)]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_callback_that_raises(there: There, kind: type[BaseException]):
    """The error has the run after the round, which is in the checkpoint already."""

    def fails(run: Any) -> None:
        if run.round == 2:
            raise kind("no network")

    with pytest.raises(kind, match="no network") as error:
        there.run(fails, evaluate_every=1)
    result: Any = error.value.result  # type: ignore[attr-defined]
    assert result.round == there.written().round == 2
    assert result.history.rows == there.written().history.rows
    notes = getattr(error.value, "__notes__", [])
    assert len([note for note in notes if "after round 2" in note]) == (kind is RuntimeError)
    assert there.run(evaluate_every=1).round == 3


@pytest.mark.parametrize("rule", ["repeat", "skip"])
def test_a_round_with_too_few_replies(there: There, rule: Any):
    """It is repeated, and its error has the run before; or it is skipped, and changes nothing."""
    admission = bf.Admission("skip", min_clients=7, below_minimum=rule)
    states: list[Any] = []

    def keep(run: Any) -> None:
        states.append({name: t.clone() for name, t in flatten(run.server).items()})

    if rule == "repeat":
        with pytest.raises(RuntimeError, match="round 2 has 6 replies and needs 7") as error:
            there.run(keep, lost=1, admission=admission)
        assert error.value.result.round == len(states) == 1  # type: ignore[attr-defined]
    else:
        found = there.run(keep, lost=1, admission=admission)
        assert found.history["cohort"].tolist() == [7, 0, 7]
        assert found.history["lost"].tolist() == [0, 1, 0]
        assert_close(states[1], states[0], atol=0, rtol=0)
        assert not found.took_part(2)


def test_the_chosen_state_is_returned(there: There):
    """The checkpoint is of the last one; over a network the nodes end with their models of the
    chosen one.
    """
    best = bf.callbacks.EarlyStopping("train_nll", patience=1, lowest=False, keep="best")
    found = there.run(there.note, best, rounds=9, evaluate_every=1)
    assert (found.round, len(found.history), there.written().round) == (1, 1, 2)
    assert [round for round, *_ in there.seen] == [1, 2]
    if there.kind == "serve":
        assert bf.load_client(there.folder / "node-102", there.method).round == 1


def test_what_is_fitted_at_the_end_is_kept_with_the_chosen_state(
    clients: FederatedData, tmp_path: Path
):
    """In its own folder and in the checkpoint, if it is of the last round."""
    parted = bf.data.concept_drift("digits", clients=4, seed=0, validation=0.2)
    algorithm = method("fedavg", bf.models.mlp(64, hidden=8, outputs=5))
    best = bf.callbacks.EarlyStopping("train_nll", keep="best", folder=tmp_path / "best")
    steps = (bf.calibration.Temperature(),)
    options: dict[str, Any] = {"calibration": steps, "checkpoint": tmp_path / "run", "rounds": 2}
    found = deploy(algorithm, parted, tmp_path, on_round=[best], **options)
    assert found.round == 2
    for folder in ("best", "run"):
        kept = load(tmp_path / folder, algorithm)
        assert (kept.round, len(kept.steps)) == (2, 1)
        assert kept.history.rows == found.history.rows
