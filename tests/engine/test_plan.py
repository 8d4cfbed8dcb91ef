"""Plans: who works when, on which rows, with which noise. All of it follows from addresses."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bayesfl.base.random import Purpose, Stage, generator
from bayesfl.composition.phases import Once, Repeat
from bayesfl.data import ClientData
from bayesfl.engine.plan import PhasePlan

COUNTS = np.array([3, 7, 5, 7])
ORDER = np.array([1, 3, 2, 0])  # longest first
SHAPES = {"body": (2, 3), "head": (1, 4)}


def phase(
    epochs: int = 1, steps: int | None = None, batch_size: int | None = None
) -> SimpleNamespace:
    """What a plan reads of a phase."""
    return SimpleNamespace(epochs=epochs, steps=steps, batch_size=batch_size)


def split() -> ClientData:
    """Clients whose rows lie scattered in shared tensors; a row's input and label tell
    which it is.
    """
    index = torch.from_numpy(np.random.default_rng(0).permutation(40)[: COUNTS.sum()])
    rows = torch.arange(40)
    return ClientData(torch.stack([rows, -rows], 1).double(), rows, index, COUNTS)


def plan(of: SimpleNamespace | Once | Repeat, rows: np.ndarray = ORDER, **address) -> PhasePlan:
    """A plan of the clients in float64."""
    return PhasePlan(of, split(), rows, dtype=torch.float64, **address)


def batches(made: PhasePlan) -> list[list[Tensor]]:
    """Of every client the places that its batches hold, padding cut off, after checking what else a
    batch says.
    """
    data, seen = split(), [[] for _ in made.ids]
    for t in range(int(made.steps.max())):
        active = made.active[t]
        batch = made.batch(t, active)
        assert {len(value) for value in batch.values()} == {active}
        assert batch["weight"].dtype == torch.float64
        for c in range(active):
            inside = batch["weight"][c] > 0
            assert (batch["weight"][c][inside] == 1).all()
            assert not inside.int().diff().gt(0).any(), "padding stands at the end"
            places = batch["index"][c][inside]
            rows = data.rows(int(made.ids[c]))[places]
            assert torch.equal(batch["y"][c][inside], data.y[rows])
            assert torch.equal(batch["x"][c][inside], data.x[rows])
            seen[c].append(places)
    return seen


def test_steps_of_unequal_clients():
    """Passes over 7, 7, 5 and 3 rows in batches of 3: 3, 3, 2 and 1 steps each; those at work are a
    prefix.
    """
    made = plan(phase(epochs=2, batch_size=3))
    assert made.steps.tolist() == [6, 6, 4, 2]
    assert [made.active[t] for t in range(6)] == [4, 4, 3, 3, 2, 2]
    assert plan(phase(epochs=2)).steps.tolist() == [2, 2, 2, 2]
    assert plan(phase(epochs=2, batch_size=100)).steps.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("size", [1, 3, 5, 7, 100])
def test_every_epoch_is_a_permutation_of_all_rows(size):
    """In the order drawn at the epoch's address; batches are full but for the last of an epoch."""
    made = plan(phase(epochs=3, batch_size=size), seed=5, round=2, stage=Stage.ADAPT, position=1)
    for client, steps in zip(ORDER.tolist(), batches(made), strict=True):
        n = int(COUNTS[client])
        each = -(-n // size)
        assert len(steps) == 3 * each
        for epoch in range(3):
            mine = steps[epoch * each : (epoch + 1) * each]
            assert [len(b) for b in mine] == [min(size, n - size * i) for i in range(each)]
            words = {
                "round": 2,
                "client": client,
                "stage": int(Stage.ADAPT),
                "phase": 1,
                "index": epoch,
            }
            order = generator(5, Purpose.PERMUTATION, **words).permutation(n)
            assert torch.cat(mine).tolist() == order.tolist()


def test_last_short_batch_is_padded_with_weight_zero():
    """7 rows in batches of 3: 3, 3 and 1; while others have 3, the last stands beside padding, and
    alone without.
    """
    made = plan(phase(batch_size=3))
    widths = [made.batch(t, made.active[t])["weight"].shape[1] for t in range(3)]
    assert widths == [3, 3, 1]
    second = made.batch(1, made.active[1])["weight"]
    assert second.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


def test_full_batches_are_padded_to_the_longest():
    """All rows in their own order, weight 0 behind the shorter clients'."""
    made = plan(phase(epochs=2))
    assert made.batch(0, 4)["x"].shape == (4, 7, 2)
    for steps in batches(made):
        assert all(places.tolist() == list(range(len(places))) for places in steps)
    assert made.batch(0, 4)["weight"].sum(1).tolist() == [7.0, 7.0, 5.0, 3.0]
    assert torch.equal(made.batch(0, 2)["y"], made.batch(1, 4)["y"][:2])


def test_steps_win_over_epochs():
    """A number of steps is the same for everyone; passes follow one another, the last one cut."""
    made = plan(phase(epochs=50, steps=4, batch_size=3))
    assert made.steps.tolist() == [4, 4, 4, 4]
    assert [made.active[t] for t in range(4)] == [4, 4, 4, 4]
    whole = batches(plan(phase(epochs=4, batch_size=3)))
    for found, full in zip(batches(made), whole, strict=True):
        assert [b.tolist() for b in found] == [b.tolist() for b in full[:4]]
    assert plan(phase(epochs=50, steps=3)).steps.tolist() == [3, 3, 3, 3]


def test_a_walk_through_the_steps():
    """Who is at work, on which examples and with which noise, step by step; a phase that reads no
    data gets none.
    """
    of = phase(epochs=2, batch_size=3)
    made, expected = plan(of), plan(of)
    steps = list(made.walk(of, SHAPES))
    assert [active for active, _, _ in steps] == [4, 4, 3, 3, 2, 2]
    for t, (active, data, noise) in enumerate(steps):
        assert_close(data, expected.batch(t, active), rtol=0, atol=0)
        assert_close(noise, expected.noise(SHAPES, active), rtol=0, atol=0)
    blind = phase(epochs=2)
    blind.data = False
    assert list(plan(blind).walk(blind, {})) == [(4, {}, {})] * 2


def test_turns():
    """A phase is its own only turn; a `Repeat` goes through its phases on one batch after
    another.
    """
    alone = Once(lambda algorithm, given, view, batch: view)
    assert list(plan(alone).turns(alone)) == [(alone, None)]
    other = Once(lambda algorithm, given, view, batch: view, data=True)
    loop = Repeat((alone, other), times=3, batch_size=3)
    found = list(plan(loop).turns(loop))
    assert [inner for inner, _ in found] == [alone, other] * 3
    expected = plan(loop)
    for t in range(3):
        assert found[2 * t][1] is found[2 * t + 1][1]
        assert_close(found[2 * t][1], expected.batch(t, 4), rtol=0, atol=0)


def test_a_walk_on_one_shared_batch():
    """Inside a `Repeat` everyone is at work in all steps of the inner phase, on the batch at hand,
    with noise of their own.
    """
    made, expected = plan(phase(steps=5, batch_size=3)), plan(phase(steps=5, batch_size=3))
    batch = made.batch(1, 4)
    for inner, count in ((phase(epochs=2), 2), (phase(epochs=2, steps=3), 3)):
        steps = list(made.walk(inner, SHAPES, batch))
        assert len(steps) == count
        for active, data, noise in steps:
            assert active == 4
            assert data is batch
            assert_close(noise, expected.noise(SHAPES, 4), rtol=0, atol=0)


@pytest.mark.parametrize("size", [None, 3])
def test_a_client_alone_sees_what_it_sees_in_the_chunk(size):
    """`client(c)`, and a plan made for it alone: the same rows and the same noise, without the
    others' padding.
    """
    shared, taken = plan(phase(epochs=2, batch_size=size)), plan(phase(epochs=2, batch_size=size))
    together = batches(shared)
    noise: list[list[Tensor]] = [[] for _ in ORDER]
    for t in range(int(shared.steps.max())):
        for c, drawn in enumerate(shared.noise(SHAPES, shared.active[t])["head"]):
            noise[c].append(drawn)
    for c, client in enumerate(ORDER):
        for one in (taken.client(c), plan(phase(epochs=2, batch_size=size), ORDER[c : c + 1])):
            assert one.steps.tolist() == [shared.steps[c]]
            assert [b.tolist() for b in batches(one)[0]] == [b.tolist() for b in together[c]]
            assert all((one.batch(t, 1)["weight"] == 1).all() for t in range(int(one.steps[0])))
        alone = plan(phase(epochs=2, batch_size=size), np.array([client]))
        assert_close(
            [alone.noise(SHAPES, 1)["head"][0] for _ in range(int(alone.steps[0]))],
            noise[c],
            rtol=0,
            atol=0,
        )
    placed = plan(phase(epochs=2, batch_size=size))
    for c in reversed(range(len(ORDER))):
        one = placed.client(c)
        assert_close(
            [one.noise(SHAPES, 1)["head"][0] for _ in range(int(one.steps[0]))],
            noise[c],
            rtol=0,
            atol=0,
        )


def test_a_client_goes_on_reading_the_same_noise():
    """Plans of one client share its generator and the clock with the chunk's."""
    made, straight = plan(phase(epochs=4)), plan(phase(epochs=4))
    expected = [straight.noise(SHAPES, 4)["body"] for _ in range(4)]
    for c in range(4):
        assert_close(made.client(c).noise(SHAPES, 1)["body"][0], expected[0][c], rtol=0, atol=0)
        assert_close(made.client(c).noise(SHAPES, 1)["body"][0], expected[1][c], rtol=0, atol=0)
    assert_close(made.noise(SHAPES, 4)["body"], expected[2], rtol=0, atol=0)
    assert made.client(0).seconds is made.seconds


def test_addresses_decide_not_places():
    """A client has its permutations and noise by its id, also in a split in which all others have
    nothing.
    """
    whole, picked, of = split(), np.array([3, 2]), phase(epochs=2, batch_size=3)
    few = whole.select([2, 3])
    inside = PhasePlan(of, whole, picked, seed=1)
    alone = ClientData(few.x, few.y, few.index, np.append([0, 0], few.counts))
    outside = PhasePlan(of, alone, picked, seed=1)
    for t in range(4):
        assert torch.equal(inside.batch(t, 2)["y"], outside.batch(t, 2)["y"])
        assert torch.equal(inside.noise(SHAPES, 2)["head"], outside.noise(SHAPES, 2)["head"])


def test_noise_is_read_block_after_block():
    """Every client's generator, at its address, gives the blocks' draws in their order, step after
    step, in float32.
    """
    made = plan(phase(epochs=2), seed=9, round=4, stage=Stage.FINETUNE, position=2)
    rngs = [
        generator(9, Purpose.NOISE, round=4, client=int(i), stage=int(Stage.FINETUNE), phase=2)
        for i in ORDER
    ]
    for _ in range(2):
        noise = made.noise(SHAPES, 4)
        assert list(noise) == ["body", "head"]
        for c, rng in enumerate(rngs):
            for name, shape in SHAPES.items():
                assert noise[name].dtype == torch.float64
                assert torch.equal(
                    noise[name][c],
                    torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).double(),
                )
    assert made.noise({}, 4) == {}


def test_those_who_are_done_draw_no_noise():
    """A prefix reads as it would alone."""
    made, full = plan(phase()), plan(phase())
    first = made.noise(SHAPES, 2)["body"]
    assert torch.equal(first, full.noise(SHAPES, 4)["body"][:2])
    assert torch.equal(
        made.noise(SHAPES, 4)["body"][2:], plan(phase()).noise(SHAPES, 4)["body"][2:]
    )


def test_precision_and_time():
    """Weights and noise come in the precision asked for; the clock has run."""
    made = PhasePlan(phase(batch_size=3), split(), ORDER)
    assert made.batch(0, 4)["weight"].dtype == made.noise(SHAPES, 4)["head"].dtype == torch.float32
    assert set(made.seconds) == {"steps", "batches", "noise"}
    assert min(made.seconds["batches"], made.seconds["noise"]) > 0


@pytest.mark.parametrize("size", [None, 3])
def test_batches_say_their_environments(size):
    """One-hot, as wide as the client with the most has them; those of the examples that a batch
    holds.
    """
    data = split()
    rows = torch.arange(40)
    which = torch.where(torch.isin(rows, data.rows(1)), rows % 3, 0)
    made = PhasePlan(
        phase(batch_size=size, epochs=2),
        replace(data, environment=which),
        ORDER,
        dtype=torch.float64,
    )
    for t in range(int(made.steps.max())):
        batch = made.batch(t, made.active[t])
        environment = batch["environment"]
        assert environment.dtype == torch.float64
        assert environment.shape == (*batch["weight"].shape, 3)
        assert torch.equal(environment.argmax(-1), which[batch["y"]])
        assert (environment.sum(-1) == 1).all()
    assert "environment" not in plan(phase()).batch(0, 4)
