"""Rows of every client: inputs of several arrays, in both forms, and inputs that stay in their
files.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

import bayesfl as bf
from bayesfl.base.inputs import named
from bayesfl.data import FederatedData, from_arrays
from bayesfl.data.mapped import mapped

SIZES, NAMES = (9, 5, 7), ["Aarau", "Bern", "Chur"]
IDS = np.repeat(NAMES, SIZES)[np.random.default_rng(1).permutation(21)]
LABELS_21 = np.arange(21) % 3


def trees(n: int, seed: int = 0) -> dict[str, Any]:
    """The same rows as one array, several by place, and several by name."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 90, (n, 4))
    mask = rng.random((n, 4)) > 0.3
    numbers = rng.normal(size=(n, 3))
    images = rng.integers(0, 256, (n, 2, 2), dtype=np.uint8)
    return {
        "array": tokens,
        "tuple": (images, numbers),
        "one": (numbers,),
        "mapping": {"input_ids": tokens, "mask": mask, "n": np.arange(n, dtype=np.int16)},
        "one by name": {"numbers": numbers},
        "nested": {"image": images, "rest": (tokens, {"numbers": numbers})},
    }


def rows_of(tree: Any, rows: Any) -> Any:
    """Those rows of every array."""
    if isinstance(tree, dict):
        return {key: rows_of(part, rows) for key, part in tree.items()}
    return tuple(rows_of(part, rows) for part in tree) if isinstance(tree, tuple) else tree[rows]


def same(found: Any, given: Any) -> bool:
    """Whether tensors are those arrays, in their types; floats in float32."""
    if isinstance(given, dict):
        return (
            type(found) is dict
            and found.keys() == given.keys()
            and all(same(found[key], part) for key, part in given.items())
        )
    if isinstance(given, tuple):
        return (
            isinstance(found, tuple) and len(found) == len(given) and all(map(same, found, given))
        )
    wanted = torch.from_numpy(given)
    wanted = wanted.float() if wanted.is_floating_point() else wanted
    return found.dtype == wanted.dtype and found.equal(wanted)


@pytest.mark.parametrize("kind", trees(1))
def test_clients_have_their_rows_of_every_input(kind):
    """Pooled and client by client, with test data given; both forms are the same data."""
    x, y = trees(21)[kind], np.arange(21) % 2
    held, owner = trees(6, seed=5)[kind], np.array(["Bern", "Chur", "Bern", "Chur", "Bern", "Bern"])
    mine, tests = ([np.flatnonzero(owners == name) for name in NAMES] for owners in (IDS, owner))
    pooled = from_arrays(x, y, client_ids=IDS, test=(held, y[:6], owner))
    lists = from_arrays(
        [rows_of(x, rows) for rows in mine],
        [y[rows] for rows in mine],
        test=([rows_of(held, rows) for rows in tests], [y[:6][rows] for rows in tests]),
        names=NAMES,
    )
    assert pooled.hash == lists.hash != from_arrays(x, y, client_ids=IDS).hash
    for data in (pooled, lists):
        for j, (trained, measured) in enumerate(zip(mine, tests, strict=True)):
            assert same(data.train.client(j)[0], rows_of(x, trained))
            assert same(data.test.client(j)[0], rows_of(held, measured))
            assert data.train.client(j)[1].tolist() == y[trained].tolist()


def test_clients_may_come_one_by_one():
    """Anything that can be iterated, with something for each client; a tuple of clients too."""
    xs, ys = [np.ones((4, 2)), np.zeros((5, 2))], [np.arange(4) % 2, np.arange(5) % 2]
    assert from_arrays(iter(xs), iter(ys)).hash == from_arrays(tuple(xs), tuple(ys)).hash
    assert (
        from_arrays(xs, ys, test=(iter(xs), iter(ys))).hash
        == from_arrays(xs, ys, test=(xs, ys)).hash
    )


def test_a_client_without_test_rows_need_not_know_the_types():
    x, y = [{"t": np.arange(8).reshape(4, 2)}] * 2, [[0, 1, 0, 1]] * 2
    data = from_arrays(
        x, y, test=([{"t": np.empty((0, 2))}, {"t": np.ones((1, 2), dtype=np.int64)}], [[], [1]])
    )
    read: Any = data.test.client(1)[0]
    assert read["t"].dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x | {"b": x["b"] * 1.0},
            r"^x\['b'\] .*one type: client 1 has torch\.float32, client 0 torch\.int64",
        ),
        (lambda x: x | {"b": x["b"] > 0}, r"^x\['b'\] .*client 1 has torch\.bool"),
        (
            lambda x: x | {"b": x["b"][1:]},
            r"^x\['a'\] of client 1 has 4 rows and x\['b'\] of client 1 has 3",
        ),
        (
            lambda x: {key: part[1:] for key, part in x.items()},
            r"^client 1 has x\['a'\] of shape \[3\] and y of shape \[4\]",
        ),
    ],
)
def test_clients_that_do_not_fit_are_named(change, message):
    own = {"a": np.arange(4.0), "b": np.arange(8).reshape(4, 2)}
    y = [[0, 1, 0, 1]] * 2
    with pytest.raises(ValueError, match=message):
        from_arrays([own, change(own)], y, names=["Aarau", "Bern"])
    assert (
        from_arrays([own, dict(reversed(own.items()))], y).hash == from_arrays([own, own], y).hash
    )


def test_test_data_that_do_not_fit_are_named():
    own, y, ids = {"a": np.arange(4.0), "b": np.arange(8).reshape(4, 2)}, [0, 1, 0, 1], [0] * 4
    other = own | {"b": own["b"] * 1.0}
    message = (
        r"one type: the test part has torch\.float32, the training part torch\.int64; .*astype"
    )
    with pytest.raises(ValueError, match=message):
        from_arrays(own, y, client_ids=ids, test=(other, y, ids))
    with pytest.raises(ValueError, match=message):
        from_arrays([own], [y], test=([other], [y]))
    with pytest.raises(KeyError, match=r"x\[0\]"):
        from_arrays([own], [y], test=([(own["a"], own["b"])], [y]))


X, Y, OWN = np.arange(8.0).reshape(4, 2), [0, 1, 0, 1], [0, 0, 1, 1]
FRAME = pd.DataFrame(np.ones((4, 2)), columns=["age", "bmi"])
TURNED: Any = FRAME[["bmi", "age"]]
LABELS = pd.Series(Y)


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "match"),
    [
        ((X, X[1:]), Y, {"client_ids": OWN}, ValueError, r"^x\[0\] has 4 rows and x\[1\] has 3: "),
        (
            {"a": X, "b": X},
            Y,
            {"client_ids": OWN, "test": ({"a": X, "b": X[1:]}, Y, OWN)},
            ValueError,
            r"^test x\['a'\] has 4 rows and test x\['b'\] has 3",
        ),
        (
            {"a": X},
            Y[1:],
            {"client_ids": OWN},
            ValueError,
            r"^x\['a'\], y and client_ids .* got shapes \[4, 2\], \[3\] and \[4\]",
        ),
        (
            [X, X],
            Y,
            {"client_ids": OWN},
            ValueError,
            r"shapes \[2, 4, 2\], \[4\] and \[4\]; several inputs are a tuple of arrays, not",
        ),
        ((X, X), Y, {}, ValueError, r"^client 0 has x .*Are these pooled .*pass client_ids"),
        ([X, X[:, :1]], [Y, Y], {}, RuntimeError, "Expected size 2 but got size 1"),
        (
            {"table": FRAME},
            LABELS,
            {"client_ids": OWN, "test": ({"table": TURNED}, LABELS, OWN)},
            ValueError,
            r"^test x\['table'\] has the columns of x\['table'\] in another order",
        ),
        (
            [(FRAME, FRAME), (FRAME, FRAME[["age"]])],
            [LABELS, LABELS],
            {},
            ValueError,
            r"^x\[1\] of client 1 lacks columns \['bmi'\] of x\[1\] of client 0",
        ),
        (
            {"table": FRAME, "more": FRAME.iloc[::-1]},
            LABELS,
            {"client_ids": OWN},
            ValueError,
            r"^x\['more'\] and x\['table'\] .*other indices",
        ),
        (
            [(FRAME,), (FRAME,)],
            [LABELS, LABELS.iloc[::-1]],
            {},
            ValueError,
            r"^y of client 1 and x\[0\] of client 1 .*other indices",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(x: Any, y: Any, options: Any, error: Any, match: str):
    with pytest.raises(error, match=match):
        from_arrays(x, y, **options)


def test_frames_stand_beside_arrays():
    assert (
        from_arrays(
            {"table": FRAME, "tokens": np.ones((4, 1))}, LABELS, client_ids=OWN, test_share=0
        ).clients
        == 2
    )


def saved(tmp_path, n: int, seed: int = 0, kind: Any = np.uint8) -> np.ndarray:
    """An array in a file."""
    path = tmp_path / f"{n} {seed}.npy"
    np.save(path, np.random.default_rng(seed).integers(0, 256, (n, 3)).astype(kind))
    return np.load(path, mmap_mode="r")


def same_rows(one: FederatedData, other: FederatedData) -> bool:
    """Whether clients have the same examples in all splits, in the same order, of the same
    environments.
    """
    for name, split in one.splits.items():
        twin = other.splits[name]
        for j in range(one.clients):
            (x, y), (twin_x, twin_y) = split.client(j), twin.client(j)
            pairs = [(y, twin_y)]
            pairs += [(a, b) for (_, a), (_, b) in zip(named(x), named(twin_x), strict=True)]
            if split.environment is not None and twin.environment is not None:
                pairs.append((split.environment[split.rows(j)], twin.environment[twin.rows(j)]))
            if not all(a.dtype == b.dtype and a.equal(b) for a, b in pairs):
                return False
    kinds = [
        [(name, split.environment is None) for name, split in data.splits.items()]
        for data in (one, other)
    ]
    return kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "options", [{}, {"test_share": 0}, {"validation": 0.2, "environments": np.arange(21) % 2}]
)
def test_pooled_inputs_in_files_stay_there(tmp_path, options):
    """Each client has the same rows in the same splits as it has of arrays in memory."""
    x = saved(tmp_path, 21)
    lies, copied, again = (
        from_arrays(given, LABELS_21, client_ids=IDS, **options) for given in (x, np.array(x), x)
    )
    assert same_rows(lies, copied)
    assert isinstance(lies.train.x, torch.Tensor)
    assert (lies.train.x.data_ptr(), lies.hash) == (x.ctypes.data, again.hash)
    moved = lies.to("cpu", torch.float64)
    assert all(split.x is lies.train.x for split in (*lies.splits.values(), moved.train))


def test_test_data_are_in_tensors_of_their_own_where_one_is_in_a_file(tmp_path):
    x, held, y = saved(tmp_path, 21), saved(tmp_path, 6, seed=1), LABELS_21
    owners = ["Bern"] * 4 + ["Aarau"] * 2
    options: dict[str, Any] = {
        "client_ids": IDS,
        "validation": 0.2,
        "environments": np.arange(21) % 2,
    }
    copied = from_arrays(np.array(x), y, test=(np.array(held), y[:6], owners), **options)
    for train, test in ((x, held), (x, np.array(held)), (np.array(x), held)):
        data = from_arrays(train, y, test=(test, y[:6], owners), **options)
        assert same_rows(data, copied)
        assert data.test.x is not data.train.x
        found = [split.x for split in (data.train, data.test)]
        assert [isinstance(t, torch.Tensor) and mapped(t) for t in found] == [
            isinstance(part, np.memmap) for part in (train, test)
        ]
        assert same_rows(data.select([2, 0]), copied.select([2, 0]))


def test_files_beside_arrays_in_memory(tmp_path):
    """All keep the file's order; what is in memory is copied."""
    x, numbers = saved(tmp_path, 21), np.arange(21.0, dtype=np.float32)
    data, copied = (
        from_arrays({"file": file, "numbers": numbers}, LABELS_21, client_ids=IDS)
        for file in (x, np.array(x))
    )
    assert same_rows(data, copied)
    numbers[:] = -1
    assert dict(named(data.train.x))["x['numbers']"].min() == 0


def test_numbers_in_files_are_converted_where_they_are_read(tmp_path):
    """Floats to the run's precision, and the types of token files, with which torch hardly
    computes.
    """
    for kind, stored, read in (
        (np.float64, torch.float64, torch.float32),
        (np.uint16, torch.uint16, torch.int64),
    ):
        data = from_arrays(saved(tmp_path, 21, kind=kind), LABELS_21, client_ids=IDS)
        x: Any = data.train.client(0)[0]
        assert (data.train.x.dtype, data.train.dtype, x.dtype) == (stored, torch.float32, read)  # type: ignore[union-attr]
        assert x.equal(
            torch.from_numpy(saved(tmp_path, 21, kind=np.int64))[data.train.rows(0)].to(read)
        )
    bad = tmp_path / "bad"
    np.where(np.arange(21.0) == 20, np.nan, 1.0).tofile(bad)
    with pytest.raises(ValueError, match=rf"^x holds NaN .*client '{IDS[20]}'"):
        from_arrays(np.memmap(bad, dtype=np.float64, mode="r"), LABELS_21, client_ids=IDS)


def test_doubles_in_files_are_those_in_memory(tmp_path):
    """Read as float32 in any run, since both have one hash, and a run may go on with either."""
    given = np.random.default_rng(0).normal(size=(21, 3))
    given.tofile(tmp_path / "doubles")
    x = np.memmap(tmp_path / "doubles", dtype=np.float64, mode="r", shape=(21, 3))
    one, other = (from_arrays(rows, LABELS_21, client_ids=np.sort(IDS)) for rows in (x, given))
    assert one.hash == other.hash
    for dtype in (torch.float32, torch.float64):
        mine, theirs = (data.to(dtype=dtype).train.client(1)[0] for data in (one, other))
        assert mine.dtype == dtype
        assert torch.equal(mine, theirs)


ACCOUNT = Path("/proc/self/status")


def anonymous() -> float:
    """Memory of this process that is no file's, in MiB."""
    lines = ACCOUNT.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


@pytest.mark.skipif(not ACCOUNT.exists(), reason="needs Linux's account of memory")
def test_data_in_files_need_next_to_no_memory(tmp_path):
    """111 MiB of images: neither made nor hashed are they copied; a client's rows alone
    are read.
    """
    n, shape = 38_000, (3, 32, 32)
    made = np.memmap(tmp_path / "images", dtype=np.uint8, mode="w+", shape=(n, *shape))
    made[::7] = 3
    made.flush()
    del made
    x = np.memmap(tmp_path / "images", dtype=np.uint8, mode="r", shape=(n, *shape))
    y, ids = np.arange(n) % 10, np.arange(n) % 100
    # What the first call loads is not counted.
    assert from_arrays(x[:100], y[:100], client_ids=ids[:100], test_share=0).hash
    before = anonymous()
    data = from_arrays(x, y, client_ids=ids, validation=0.1)
    assert anonymous() - before < 12
    assert data.hash
    assert anonymous() - before < 12
    rows: Any = data.train.client(3)[0]
    assert rows.nbytes < 2**20
    assert anonymous() - before < 14


class Watching(torch.nn.Module):
    """A linear layer that notes the memory of its process at every call, of any copy."""

    seen: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [B, 10] of images [B, 3, 32, 32]."""
        self.seen.append(anonymous())
        return self.layer(x.flatten(1))


@pytest.mark.skipif(not ACCOUNT.exists(), reason="needs Linux's account of memory")
def test_a_round_over_data_in_files_reads_its_batches_alone(tmp_path):
    """70 MiB of images, 281 as floats: a round with its evaluation has those of some batches at
    once.
    """
    n = 24_000
    np.memmap(tmp_path / "images", dtype=np.uint8, mode="w+", shape=(n, 3, 32, 32)).flush()
    x = np.memmap(tmp_path / "images", dtype=np.uint8, mode="r", shape=(n, 3, 32, 32))
    model = Watching()

    def one_round(rows: int, clients: int) -> None:
        data = from_arrays(
            x[:rows], np.arange(rows) % 10, client_ids=np.arange(rows) % clients
        ).transformed(lambda x: x / 255)
        bf.simulate(
            bf.algorithms.fedavg(model, epochs=1, batch_size=50),
            data,
            rounds=1,
            engine=bf.Engine("live", workers=1),
            progress=False,
        )

    one_round(2_000, 5)
    before, calls = max(model.seen), len(model.seen)
    one_round(n, 40)
    assert len(model.seen) > 2 * calls
    assert max(model.seen) - before < 100
