"""What every algorithm promises: the same numbers however it is computed, and that what is private
stays so.
"""

import copy
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import bayesfl as bf
from bayesfl.algorithms import PAPERS
from bayesfl.base.protocols import RESERVED, Server, StackedPool, Uplink
from bayesfl.base.trees import flatten
from bayesfl.composition.phases import Once
from bayesfl.data import FederatedData
from bayesfl.federation.run.result import Result
from bayesfl.federation.store.identity import identity
from bayesfl.optim import SGD, cosine
from tests.cases import CASES, SIZES, Case, federation, sampled
from tests.contract.made import DECOUPLED
from tests.federation import made
from tests.federation.made import same, same_bits, state

ROUNDS = 2
every_case = pytest.mark.parametrize("case", CASES, ids=str)


ALONE: dict[str, Any] = {
    "rounds": ROUNDS,
    "evaluate_every": None,
    "engine": bf.Engine(chunk=3, workers=1),
}


_KNOWN: "WeakKeyDictionary[nn.Module, dict[Any, Any]]" = WeakKeyDictionary()


def method_of(case: Case, model: nn.Module) -> bf.Algorithm:
    """The method of a case, which all runs of it share, as its network is looked at once."""
    methods = _KNOWN.setdefault(model, {})
    if id(case) not in methods:
        methods[id(case)] = case(model)
    return methods[id(case)]


def run(case: Case, model: nn.Module, clients: FederatedData, **options: Any) -> Result:
    """A run of a case on one worker that measures nothing on the way."""
    return made.run(method_of(case, model), clients, **{**ALONE, **options})


def known(case: Case, model: nn.Module, clients: FederatedData, **options: Any) -> Result:
    """The same run for all tests that compare another with it, which leave it as it is."""
    runs, key = _KNOWN.setdefault(model, {}), (id(case), str(options))
    if key not in runs:
        runs[key] = run(case, model, clients, **options)
    return runs[key]


def test_every_algorithm_has_a_case():
    """A method that is offered is held to the contract."""
    assert list(dict.fromkeys(case.name for case in CASES)) == list(PAPERS)


TALLY = ("scaffold", "pvi", "fedep")
"""Methods that need all who train to be gathered."""
WHO = [(case, 0.5, "cohort" if case.name in TALLY else "all") for case in (*CASES, DECOUPLED)]
OTHERS = [case for case in CASES if case.name in ("fedavg", "pfedvem", "fedpac", "fedem")]
WHO += [
    pytest.param(case, *who, marks=pytest.mark.slow)
    for case in OTHERS
    for who in ((1.0, None), (0.5, "cohort"))
]


@pytest.mark.parametrize(("case", "participation", "train"), WHO, ids=str)
def test_kernels_agree(
    case: Case, model: nn.Module, clients: FederatedData, participation: float, train: str | None
):
    """Every kernel, that of each phase's choice, and any chunk, give the reference's numbers to
    rounding, for clients of unequal size.
    """
    options = {"participation": participation, "train": train}
    reference = state(
        run(case, model, clients, engine=bf.Engine("reference", workers=1), **options)
    )
    assert_close(state(known(case, model, clients, **options)), reference, atol=1e-6, rtol=0)
    for kernel, chunk in (("live", 4), ("layers", len(SIZES)), ("vmap", 4)):
        got = state(run(case, model, clients, engine=bf.Engine(kernel, chunk=chunk), **options))
        assert_close(
            got,
            reference,
            atol=1e-6,
            rtol=0,
            msg=lambda m, k=kernel, c=chunk: f"{k}, chunk {c}: {m}",
        )


@pytest.mark.filterwarnings("ignore:most of the selected weights")
@pytest.mark.parametrize(
    "case",
    sampled(
        c
        for c in CASES
        if c.name in ("fedavg", "fedper", "fedpac", "ditto", "pfedme", "pfedvem", "fedsi")
    ),
    ids=str,
)
def test_kernels_agree_on_convolutions(case: Case):
    """The same for a CNN, whose auto kernel differs from phase to phase."""
    clients = federation((1, 12, 12), sizes=(23, 17, 5))
    model = bf.models.lenet((1, 12, 12), outputs=3, channels=(3, 4), hidden=(12, 8))
    reference = state(run(case, model, clients, engine=bf.Engine("reference", workers=1), rounds=2))
    for kernel, chunk in (("live", 3), ("layers", 2), ("vmap", 3), ("auto", 2)):
        got = state(run(case, model, clients, engine=bf.Engine(kernel, chunk=chunk), rounds=2))
        assert_close(got, reference, atol=1e-6, rtol=0, msg=lambda m, k=kernel: f"{k}: {m}")


@every_case
def test_workers_do_not_change_the_bits(case: Case, model: nn.Module, clients: FederatedData):
    """One thread or three: equal bits, in float32, where sums in another order would show most."""
    one, three = (
        state(run(case, model, clients, engine=bf.Engine(chunk=2, workers=w), dtype=torch.float32))
        for w in (1, 3)
    )
    assert same_bits(one, three)


@every_case
def test_a_clients_file_loads_with_the_network_alone(
    case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Neither the method nor its options are needed to predict, whatever the network's weights."""
    result, x = known(case, model, clients), clients.test.client(2)[0]
    result.client(2).save(tmp_path)
    other = copy.deepcopy(result.algorithm.model)
    for p in other.parameters():
        nn.init.ones_(p)
    own, same = (bf.load_client(tmp_path, by) for by in (other, case(model)))
    assert torch.equal(own.predict(x).probs, same.predict(x).probs)


@every_case
def test_it_pickles(case: Case, model: nn.Module, clients: FederatedData):
    """Method, run and a client's model, as another process gets them, give equal bits."""
    method, result = case(model), known(case, model, clients)
    sent = pickle.loads(pickle.dumps(method))
    assert same_bits(state(made.run(sent, clients, **ALONE)), state(result))
    assert identity(sent) == identity(method)
    own, x = result.client(2), clients.test.client(2)[0]
    expected = own.predict(x).probs
    for other in (pickle.loads(pickle.dumps(own)), pickle.loads(pickle.dumps(result)).client(2)):
        assert torch.equal(other.predict(x).probs, expected)


def test_what_was_composed_of_named_functions_pickles(model: nn.Module, clients: FederatedData):
    """Also a method of the library with a field replaced."""
    tied = bf.priors.Normal(centre=bf.priors.server_mean("w"), variance=bf.priors.inverse_size(2.0))
    step = bf.Descend(
        bf.Energy("v", ("v",), likelihood="mean"), optimiser=SGD(cosine(0.1), momentum=0.5)
    )
    method = bf.Algorithm(
        model,
        {"w": bf.Block(), "v": bf.Block(prior=tied, pool=None, keep=True)},
        (bf.Repeat((step,), batch_size=10), bf.Once(kept)),
        parts=("v",),
    )
    changed = replace(bf.algorithms.fedavg(model), draws=0)
    for one in (method, changed):
        sent = pickle.loads(pickle.dumps(one))
        runs = [made.run(of, clients, **ALONE) for of in (one, sent)]
        assert same_bits(*map(state, runs))
        assert identity(sent) == identity(one)


def kept(algorithm: bf.Algorithm, given: Server, view: Any, batch: Any) -> Any:
    return view


def half(case: Case) -> dict[str, Any]:
    """Options of the run that kernels, seeds and measuring are compared by."""
    return {"participation": 0.5, "train": "cohort" if case.name in TALLY else "all"}


@every_case
def test_seeds(case: Case, model: nn.Module, clients: FederatedData):
    """Equal seeds give equal bits, others do not."""
    first = state(known(case, model, clients, **half(case)))
    assert same_bits(first, state(run(case, model, clients, **half(case))))
    assert not same_bits(first, state(run(case, model, clients, **half(case), seed=4)))


@every_case
def test_a_phase_that_neither_shuffles_nor_draws_moves_nobody(
    case: Case, model: nn.Module, clients: FederatedData
):
    """Put before every other phase it leaves all bits as they are: it has no place among the
    addresses.
    """
    algorithm, still = case(model), Once(lambda algorithm, given, view, data: view)
    more = replace(
        algorithm, phases=tuple(one for phase in algorithm.phases for one in (still, phase))
    )
    assert same_bits(state(known(case, model, clients)), state(made.run(more, clients, **ALONE)))


@every_case
def test_measuring_changes_nothing(case: Case, model: nn.Module, clients: FederatedData):
    """Evaluation, which may run phases that are skipped without it, leaves training as it is, to
    the bit.
    """
    assert same_bits(
        state(known(case, model, clients, **half(case))),
        state(run(case, model, clients, **half(case), evaluate_every=1)),
    )


@dataclass(frozen=True)
class Watched:
    """A pool that notes what of its block reaches the server."""

    pool: Any
    arrived: list[dict[str, Tensor]]

    @property
    def sends(self) -> tuple[str, ...]:
        return self.pool.sends

    def accumulate(self, total: Any, server: Server, name: str, uplink: Uplink) -> Any:
        assert set(uplink[name]) == set(self.sends)
        self.arrived.append(flatten({name: uplink[name]}))
        return self.pool.accumulate(total, server, name, uplink)

    def solve(self, server: Server, name: str, total: Any) -> Any:
        return self.pool.solve(server, name, total)


@every_case
def test_uplink_is_what_is_declared(case: Case, model: nn.Module, clients: FederatedData):
    """Private blocks never leave; names, shapes, precision and bytes of what pools and `combine`
    receive are the declared ones.
    """
    algorithm = case(model)
    declared = algorithm.uplink(algorithm.init(1, dtype=torch.float64))
    private = [name for name, block in algorithm.blocks.items() if block.private]
    assert not [key for key in declared if key.split(".")[0] in private]
    arrived: list[dict[str, Tensor]] = []

    def combine(server: Server, ids: Tensor, uplink: Uplink) -> Server:
        arrived.append({key: t for key, t in flatten(uplink).items() if key not in RESERVED})
        return algorithm.combine(server, ids, uplink)

    # What a stacked pool gathers reaches `combine` too.
    summed = {
        name: b
        for name, b in algorithm.blocks.items()
        if b.pool and not isinstance(b.pool, StackedPool)
    }
    blocks = {
        **algorithm.blocks,
        **{name: replace(b, pool=Watched(b.pool, arrived)) for name, b in summed.items()},
    }
    result = made.run(
        replace(algorithm, blocks=blocks, combine=combine),
        clients,
        rounds=1,
        engine=bf.Engine(chunk=2, workers=1),
        participation=0.5,
        evaluate_every=None,
    )
    assert {
        key: (tuple(t.shape[1:]), t.dtype) for part in arrived for key, t in part.items()
    } == declared
    assert result.history["bytes_up"].tolist() == [
        sum(t.nbytes for part in arrived for t in part.values())
    ]
    common, addressed = algorithm.share(result.server, torch.arange(2))
    assert not set(private) & set(common)
    assert set(common) | set(addressed) <= {
        *algorithm.blocks,
        *algorithm.broadcast,
        *algorithm.drawn,
        *algorithm.address(result.server, torch.arange(2)),
    }


@every_case
def test_resume_goes_on_bit_for_bit(
    case: Case, model: nn.Module, clients: FederatedData, tmp_path: Path
):
    """Saved after a round and loaded, a run ends in the bits of one that never stopped; so does its
    history but for times.
    """
    options = {"participation": 0.5, "evaluate_every": 1, "dtype": torch.float32}
    whole = run(case, model, clients, **options)
    run(case, model, clients, **options, rounds=1).save(tmp_path / "run")
    loaded = bf.load(tmp_path / "run", case(model), clients)
    rest = run(case, model, clients, **options, resume=loaded)
    assert same(whole, rest)
    assert_close(whole.predict().probs, rest.predict().probs, atol=0, rtol=0, equal_nan=True)


@every_case
def test_the_absent_are_untouched(case: Case, model: nn.Module, clients: FederatedData):
    """A client outside the cohort keeps its state to the bit, and sends nothing: the server is the
    same whether it trains or not.
    """
    fresh = run(case, model, clients, participation=0.4, train="cohort", sampling="fixed", rounds=1)
    absent = np.setdiff1d(np.arange(len(SIZES)), fresh.settings.cohort(len(SIZES), 0))
    start = case(model).rows(case(model).init(len(SIZES), seed=3, dtype=torch.float64))
    for before, after in zip(tree_leaves(start), tree_leaves(fresh.private), strict=True):
        assert torch.equal(after[absent], before.expand_as(after)[absent])
    options = {"participation": 0.4, "train": "all", "sampling": "fixed", "rounds": 1}
    if case.name in TALLY:
        with pytest.raises(ValueError, match="train='all'"):
            run(case, model, clients, **options)
        return
    everyone = run(case, model, clients, **options)
    assert_close(everyone.server, fresh.server, atol=1e-12, rtol=0)


@every_case
def test_never_seen_clients_get_predictions(case: Case, model: nn.Module, clients: FederatedData):
    """Clients held out of training adapt once and predict; adapting touches neither the federation
    nor its state.
    """
    old, novel = clients.hold_out(2, seed=0)
    result = bf.simulate(case(model), old, rounds=2, seed=0, evaluate_every=None, progress=False)
    before = {key: t.clone() for key, t in state(result).items()}
    adapted = result.adapt(novel)
    probs = adapted.predict().probs
    assert probs.shape == (2, 6, 3)
    assert_close(probs.sum(-1), torch.ones(2, 6))
    assert same_bits(before, state(result))
    fresh = case(model).rows(result.server)
    moved = [
        not torch.equal(adapted.private[name]["loc"][0], fresh[name]["loc"])
        for name, block in case(model).blocks.items()
        if block.keep
    ]
    assert any(moved) == bool(moved)
