"""Every method on a network with batch norm and dropout: it runs as any other does, or is refused
with the reason.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.base.protocols import StackedPool
from bayesfl.composition.buffers import Buffers
from bayesfl.composition.phases import Descend, unrolled
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from tests.cases import CASES, SIZES, Case, sampled, with_batch_norm
from tests.federation import made
from tests.federation.made import same_bits, state

ROUNDS = 2


def refusal(case: Case) -> str | None:
    """What a method is told whose blocks of norms are mixed, or in no forward pass of a phase; None
    for the others.
    """
    algorithm = case(bf.models.mlp(8, hidden=16, outputs=3))
    inner = [one for phase in algorithm.phases for one in unrolled(phase)]
    seen = {name for one in inner if isinstance(one, Descend) for name in one.energy.parts}
    found = []
    for name, block in algorithm.blocks.items():
        if not any(key.startswith("body.") for key in algorithm.layout(name).names):
            continue
        if isinstance(block.pool, StackedPool) or not (block.pool or block.keep):
            pool = type(block.pool).__name__
            found.append(
                rf"block '{name}' has batch norms, and its pool {pool} "
                r".*group_norm\(model\).*eval mode"
            )
        elif name not in seen:
            found.append(f"no phase .*'{name}'")
    return "|".join(found) or None


REFUSED = [(case, said) for case in CASES if (said := refusal(case))]
TAKEN = [case for case in CASES if case not in [other for other, _ in REFUSED]]
taken = pytest.mark.parametrize("case", sampled(TAKEN), ids=str)


_METHODS: dict[int, bf.Algorithm] = {}
_RUNS: dict[int, Result] = {}


def method_of(case: Case) -> bf.Algorithm:
    """The method of a case, which all runs of it share, as its network is looked at once."""
    if id(case) not in _METHODS:
        _METHODS[id(case)] = case(with_batch_norm(dropout=0.3))
    return _METHODS[id(case)]


def run(case: Case, clients: FederatedData, **options: Any) -> Result:
    """A run in float32, in which other sums would show, that measures nothing on the way."""
    defaults: dict[str, Any] = {
        "rounds": ROUNDS,
        "participation": 0.6,
        "evaluate_every": None,
        "dtype": torch.float32,
    }
    return made.run(
        method_of(case),
        clients,
        **{**defaults, "engine": bf.Engine(chunk=2, workers=1), **options},
    )


def known(case: Case, clients: FederatedData) -> Result:
    """The same run for all tests that look at what it has become, which leave it as it is."""
    if id(case) not in _RUNS:
        _RUNS[id(case)] = run(case, clients)
    return _RUNS[id(case)]


@pytest.mark.parametrize(("case", "said"), REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_methods_that_are_refused(case: Case, said: str, clients: FederatedData):
    """Before anything is trained, with the block; converted norms are taken."""
    with pytest.raises(ValueError, match=said):
        run(case, clients)
    model = bf.models.group_norm(with_batch_norm(dropout=0.0))
    assert made.run(case(model), clients, rounds=1, evaluate_every=None).round == 1


@taken
def test_statistics_move_and_stay_finite(case: Case, clients: FederatedData):
    """Each block of them, where it is sent, and where it is kept; variances stay positive."""
    result = known(case, clients)
    assert all(bool(t.isfinite().all()) for t in state(result).values())
    algorithm, start = result.algorithm, result.algorithm.init(7, seed=3)
    blocks = [name for name, block in algorithm.blocks.items() if isinstance(block, Buffers)]
    assert blocks
    for name in blocks:
        block = algorithm.blocks[name]
        assert block.pool or block.keep
        for now in [
            tree[name]["loc"]
            for tree, there in ((result.server, block.pool), (result.private, block.keep))
            if there
        ]:
            assert (now - start[name]["loc"]).abs().max() > 0.05
            assert all(
                bool((t > 0).all())
                for key, t in algorithm.layout(name).leaves(now).items()
                if key.endswith("running_var")
            )


@taken
def test_workers_do_not_change_the_bits_and_chunks_only_the_rounding(
    case: Case, clients: FederatedData
):
    """Neither do predictions of the network as it is afterwards."""
    # Four chunks, of which two are trained at a time.
    other = run(case, clients, engine=bf.Engine(chunk=2, workers=2))
    assert same_bits(state(known(case, clients)), state(other))
    if str(case) == "irm_l2":  # Adam makes steps of the rounding of a slope that is 0
        return
    options: dict[str, Any] = {"dtype": torch.float64}
    first = run(case, clients, **options)
    one = run(case, clients, engine=bf.Engine(chunk=len(SIZES), workers=1), **options)
    assert_close(state(one), state(first), atol=1e-9, rtol=1e-10)
    probs, wanted = (found.predict().probs for found in (one, first))
    assert_close(probs, wanted, atol=1e-9, rtol=0, equal_nan=True)


@taken
def test_resume_goes_on_bit_for_bit(case: Case, clients: FederatedData, tmp_path: Path):
    """Saved after a round and loaded; statistics and draws go on as if it had never stopped."""
    whole = known(case, clients)
    run(case, clients, rounds=1).save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", case(with_batch_norm(dropout=0.3)), clients)
    rest = run(case, clients, resume=loaded)
    assert same_bits(state(whole), state(rest))
    assert_close(whole.predict().probs, rest.predict().probs, atol=0, rtol=0, equal_nan=True)
    # A new run, from where that one came.
    again = run(case, clients, rounds=1, seed=9, start=tmp_path / "run")
    assert all(bool(t.isfinite().all()) for t in state(again).values())


@taken
def test_never_seen_clients_get_predictions(case: Case, clients: FederatedData):
    """Their statistics start from the server's, and training touches neither the federation nor its
    state.
    """
    old, novel = clients.hold_out(2, seed=0)
    result = run(case, old)
    before = {key: t.clone() for key, t in state(result).items()}
    adapted = result.adapt(novel)
    assert_close(adapted.predict().probs.sum(-1), torch.ones(2, 6))
    assert same_bits(before, state(result))
    for name, block in result.algorithm.blocks.items():
        if isinstance(block, Buffers) and block.keep:
            trained = not torch.equal(adapted.private[name]["loc"][0], result.server[name]["loc"])
            assert trained == bool(result.algorithm.adapt)


@taken
def test_a_client_takes_its_model_home(case: Case, clients: FederatedData, tmp_path: Path):
    """Saved and loaded it predicts as in the run; as a network, where one network predicts, with
    its statistics.
    """
    result = known(case, clients)
    probs = result.predict().probs
    result.client(2).save(tmp_path / "client")
    loaded = bf.load_client(tmp_path / "client", case(with_batch_norm(dropout=0.3)))
    x, _ = clients.test.client(2)
    assert_close(loaded.predict(x).probs, probs[2, : len(x)], atol=1e-6, rtol=0)
    if result.algorithm.predictor is None and not result.algorithm.draws:
        assert_close(
            result.client(2).model().eval()(x).softmax(-1), probs[2, : len(x)], atol=1e-6, rtol=0
        )
    if (
        shared := result.algorithm.shared_parts()
    ) is not None and result.algorithm.predictor is None:
        wanted = {
            key: t
            for name in result.algorithm.whole(shared)
            if isinstance(result.algorithm.blocks[name], Buffers)
            for key, t in result.algorithm.layout(name).leaves(result.server[name]["loc"]).items()
        }
        found = dict(result.model().named_buffers())
        assert wanted
        assert same_bits(wanted, {key: found[key] for key in wanted})
