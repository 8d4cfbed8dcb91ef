"""One client's own model: what it takes and refuses, as a module, as files, on its own."""

import importlib
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map

import bayesfl as bf
from bayesfl.base.archive import CheckpointError
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import ClientData, FederatedData
from bayesfl.federation.clients import client_model, predict
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from bayesfl.likelihoods import Categorical, Gaussian
from bayesfl.optim import SGD
from tests.federation.made import run

NAMES = ("Zurich", "Basel", "Bern", "Chur", "Geneva", "Lausanne", "Lugano")


@pytest.fixture(scope="module")
def named(clients: FederatedData) -> FederatedData:
    return replace(clients, client_names=NAMES, class_names=("mild", "grave", "none"))


@pytest.fixture(scope="module")
def ditto(named: FederatedData) -> Result:
    return run(
        bf.algorithms.ditto(bf.models.mlp(8, hidden=16, outputs=3), epochs=1, batch_size=10), named
    )


def test_a_client_is_found_by_name_or_number(ditto: Result, named: FederatedData):
    one = ditto.client("Bern")
    assert (one.name, one.client, one.schema.class_names, one.round) == (
        "Bern",
        2,
        ("mild", "grave", "none"),
        3,
    )
    x, _ = named.test.client(2)
    assert torch.equal(one.predict(x).probs, ditto.client(np.int64(2)).predict(x).probs)
    assert repr(one) == "ClientModel('Bern' after round 3; inputs (8,))"
    assert_close(ditto.predict().client("Bern").probs, one.predict(x).probs, atol=1e-12, rtol=0)
    for other, words in (
        ("Zürich", r"no client 'Zürich'.*7 names .*'Zurich'"),
        (7, "0 to 6, got 7"),
    ):
        with pytest.raises(ValueError, match=words):
            ditto.client(other)


def test_it_is_on_its_own(ditto: Result):
    """Neither later training nor what a user does with its module changes it, nor does it change
    the federation.
    """
    kept = tree_map(torch.clone, ditto.private)
    one, x = replace(ditto, private=kept).client("Chur"), torch.randn(4, 8)
    before, network = one.predict(x).probs, one.model()
    assert not network.training
    assert all(p.requires_grad for p in network.parameters())
    with torch.no_grad():
        for t in (*network.parameters(), *tree_leaves(kept)):
            t.zero_()
    for now in (one, ditto.client("Chur")):
        assert torch.equal(now.predict(x).probs, before)


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return {}self.layer(x)
"""


def test_a_class_may_have_moved(named: FederatedData, tmp_path: Path, monkeypatch):
    """A file loads with the class in another module, if its source is the same."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, sign in (("was_here", ""), ("is_here", ""), ("changed_here", "-")):
        (tmp_path / f"{module}.py").write_text(NET.format(sign))
    before, after, other = (
        importlib.import_module(name).Net() for name in ("was_here", "is_here", "changed_here")
    )
    result = run(bf.algorithms.fedavg(before), named, rounds=1)
    result.client("Bern").save(tmp_path / "Bern")
    x = torch.randn(4, 8)
    loaded = bf.load_client(tmp_path / "Bern", after)
    assert torch.equal(loaded.predict(x).probs, result.client("Bern").predict(x).probs)
    with pytest.raises(CheckpointError, match=r"code\.Net\[0\]\.(source|holds\.forward\.source)"):
        bf.load_client(tmp_path / "Bern", other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_kind(model, named: FederatedData, dtype: torch.dtype):
    """As users of numpy and pandas hold them: the predictions are those of the same numbers in
    float32; one row or many give the same.
    """
    one = run(
        bf.algorithms.fedavg(model, epochs=1), named, rounds=1, evaluate_every=None, dtype=dtype
    ).client(0)
    whole = np.arange(40).reshape(5, 8) % 2
    arrays = [whole.astype(kind) for kind in ("float16", "float32", "float64")]
    probs = one.predict(arrays[1]).probs
    assert probs.shape == (5, 3)
    for rows in (
        *arrays,
        *map(torch.from_numpy, arrays),
        torch.from_numpy(whole).bfloat16(),
        whole.astype(np.longdouble),
        arrays[2].tolist(),
        pd.DataFrame(whole, dtype="Int64"),
    ):
        assert torch.equal(one.predict(rows).probs, probs)
    alone = torch.cat([one.predict(arrays[1][[row]]).probs for row in range(5)])
    assert_close(alone, probs, atol=1e-6 if dtype == torch.float32 else 1e-12, rtol=0)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.ones((2, 8)) * 1j, ValueError, r"^x must be .*got complex128; make real numbers"),
        (np.ones((2, 8), dtype=object), ValueError, r"^x must be .*got object; .*astype\(float\)"),
        (np.full((2, 8), "1.0"), ValueError, r"^x must be .*got <U3; .*astype\(float\)"),
        (
            np.zeros((2, 8), dtype="datetime64[D]"),
            ValueError,
            r"^x must be .*got datetime64\[D\]; make real numbers",
        ),
        (
            np.zeros((2, 8), dtype="timedelta64[s]"),
            ValueError,
            r"^x must be .*got timedelta64\[s\]; make real numbers",
        ),
        (
            pd.DataFrame({"town": ["Bern"], "age": [1.0]}),
            ValueError,
            "^could not convert string to float: 'Bern'",
        ),
        (torch.randn(5, 7), ValueError, r"\[N, 8\], got \[5, 7\]"),
        (torch.randn(8), ValueError, r"\[N, 8\], got \[8\]"),
        (torch.randn(0, 8), ValueError, r"got \[0, 8\]"),
        (torch.tensor(1.0), ValueError, r"got \[\]"),
        (torch.tensor([[1.0] * 8, [float("nan")] * 8]), ValueError, "first in row 1"),
        ([["a"] * 8], ValueError, r"x must be an array of numbers.*astype\(float\)"),
        (
            "rows.npy",
            ValueError,
            r"x must be an array of numbers.*; of a path, numpy\.load\(path\)",
        ),
        (
            torch.randn(2, 8, dtype=torch.complex64),
            ValueError,
            "torch.complex64",
        ),
        (
            np.zeros((2, 8), dtype="int32"),
            ValueError,
            r"^x holds whole numbers \(torch.int32\).* trained on floats .*x\.astype\('float32'\)",
        ),
        (
            torch.zeros(2, 8, dtype=torch.bool),
            ValueError,
            r"^x holds truth values .*x\.to\(torch\.float32\)",
        ),
        ((torch.zeros(2, 8),), KeyError, "'x'"),
    ],
)
def test_bad_rows_are_refused(ditto: Result, x: Any, error: type, words: str):
    with pytest.raises(error, match=words):
        ditto.client(0).predict(x)


def test_predictions_that_are_not_finite_are_named():
    """Of rows that no training row was like."""

    class Roots(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input.sqrt())

    data = bf.data.from_arrays(
        torch.rand(20, 2), torch.arange(20) % 2, client_ids=["Bern", "Chur"] * 10
    )
    one = run(bf.algorithms.fedavg(Roots(2, 2), epochs=1), data, evaluate_every=None).client("Chur")
    with pytest.warns(
        UserWarning, match="predictions of 'Chur' are not finite for 2 rows, first for row 1"
    ):
        probs = one.predict([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]).probs
    assert probs.isnan().any(-1).tolist() == [False, True, True]


def test_targets_have_means_and_variances():
    x = torch.randn(60, 4)
    data = bf.data.from_arrays(
        x, x @ torch.randn(4, 2), client_ids=[0, 1, 2] * 20, task="regression"
    )
    method = bf.algorithms.fedper(
        bf.models.mlp(4, hidden=8, outputs=2), epochs=1, likelihood=Gaussian(0.5)
    )
    result = run(
        replace(method, predictor=LinearisedLaplace(precision=1.0)), data, evaluate_every=None
    )
    inputs, _ = data.test.client(1)
    found, together = result.client(1).predict(inputs), result.predict().client(1)
    for name in ("mean", "variance", "epistemic"):
        assert_close(getattr(found, name), getattr(together, name), atol=1e-12, rtol=1e-10)


def test_damaged_and_foreign_files_are_refused(ditto: Result, tmp_path: Path):
    """Of nothing, of several clients, of a run, of another method; damaged."""
    method, models = ditto.algorithm, tmp_path / "models"
    (tmp_path / "empty").mkdir()
    ditto.client(0).save(models / "one" / "deep")
    assert bf.load_client(models / "one", method).name == "Zurich"
    ditto.client(1).save(models / "two")
    for number in (0, 1):  # of two nodes that call their clients the same
        ditto.client(1).save(tmp_path / "shared" / "experiment" / f"client-{number}")
    ditto.save(tmp_path / "run")
    (tmp_path / "run" / "state.safetensors").rename(tmp_path / "run" / files.CLIENT_FILE)
    content = bytearray((models / "two" / files.CLIENT_FILE).read_bytes())
    content[-5] ^= 1
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / files.CLIENT_FILE).write_bytes(content)
    longer, narrow = (
        bf.algorithms.ditto(
            bf.models.mlp(8, hidden=hidden, outputs=3), epochs=epochs, batch_size=10
        )
        for hidden, epochs in ((16, 2), (5, 1))
    )
    for folder, given, error, words in (
        (tmp_path / "empty", method, CheckpointError, files.CLIENT_FILE),
        (models, method, CheckpointError, r"of 2 clients.*one.*two"),
        (
            tmp_path / "shared",
            method,
            CheckpointError,
            r"models of 2 clients.*client-0.*client-1",
        ),
        (
            models / "two",
            longer,
            CheckpointError,
            r"another method: ditto\.epochs: saved 1, given 2;",
        ),
        (models / "two", narrow, CheckpointError, "parameters"),
        (
            tmp_path / "run",
            method,
            CheckpointError,
            r"holds a run of bf\.simulate, not a client's own model",
        ),
        (tmp_path / "damaged", method, CheckpointError, "damaged"),
    ):
        with pytest.raises(error, match=words):
            bf.load_client(folder, given)


def laplace(model: nn.Module) -> bf.Algorithm:
    return replace(
        bf.algorithms.fedper(model, epochs=1, batch_size=10),
        predictor=LinearisedLaplace(precision=1.0),
    )


def test_what_needs_too_much_is_refused_unless_the_means_are_asked_for(
    model, named: FederatedData, tmp_path: Path, monkeypatch
):
    """With its size; nothing is written. The means alone predict as `draws=0` does."""
    result = run(laplace(model), named, evaluate_every=None)
    monkeypatch.setattr(client_model, "LARGEST_TENSOR", 100)
    one, x = result.client("Basel"), torch.randn(4, 8)
    assert_close(one.predict(x).probs, result.client("Basel").predict(x).probs, atol=1e-12, rtol=0)
    with pytest.raises(MemoryError, match=r" bytes and 100 may be used"):
        one.save(tmp_path / "Basel")
    assert not (tmp_path / "Basel").exists()
    one.save(tmp_path / "Basel", plug_in=True)
    plain = bf.load_client(tmp_path / "Basel", result.algorithm)
    assert_close(plain.predict(x).probs, one.predict(x, draws=0).probs, atol=1e-12, rtol=0)
    assert repr(plain).endswith("at the means)")
    plain.save(tmp_path / "again")
    assert bf.load_client(tmp_path / "again", result.algorithm).plug_in


@dataclass(frozen=True)
class Nearest:
    """A predictor that gives the class of the nearest training example: it cannot do without the
    data.
    """

    tunes = ""
    grid = ()

    def check(self, algorithm: Any) -> None: ...

    def __call__(self, algorithm: Any, given: Any, view: Any, data: Any) -> Any:
        def fitted(x, *, value=None, noise=None, plain=False):
            nearest = data["y"][torch.cdist(x.flatten(1), data["x"].flatten(1)).argmin(1)]
            return {
                "probs": torch.nn.functional.one_hot(nearest, 3).to(x),
                "epistemic": torch.full_like(x[:, 0], torch.nan),
            }

        return fitted


def test_a_predictor_that_cannot_be_stored_is_stored_at_the_means(
    model, named: FederatedData, tmp_path: Path
):
    result = run(
        replace(bf.algorithms.fedper(model, epochs=1), predictor=Nearest()),
        named,
        evaluate_every=None,
    )
    one, (x, _) = result.client(2), named.test.client(2)
    assert_close(one.predict(x).probs, result.predict().client(2).probs, atol=0, rtol=0)
    one.save(tmp_path, plug_in=True)
    assert_close(
        bf.load_client(tmp_path, result.algorithm).predict(x).probs,
        one.model()(x.double()).softmax(-1),
        atol=1e-12,
        rtol=0,
    )


def test_no_training_row_is_written(named: FederatedData, model, tmp_path: Path):
    """Neither as numbers of the run nor of the file: no row of the inputs is found in its bytes."""
    run(laplace(model), named, evaluate_every=None).client(3).save(tmp_path)
    content = (tmp_path / files.CLIENT_FILE).read_bytes()
    for dtype in (torch.float32, torch.float64):
        rows = named.train.client(3)[0].to(dtype).numpy()
        assert not any(row.tobytes() in content for row in rows)


def test_a_stored_covariance_is_as_confidential_as_the_rows(named: FederatedData, tmp_path: Path):
    """What the documentation warns of: a row to which a unit answers alone is read off the file,
    and not with `plug_in=True`.
    """
    rows, _ = named.train.client(0)
    direction = torch.randn(8, generator=torch.Generator().manual_seed(0))
    best, next_best = (rows @ direction).topk(2)[0].tolist()
    secret = rows[int((rows @ direction).argmax())].double()
    model = bf.models.mlp(8, hidden=16, outputs=3)
    with torch.no_grad():  # the first unit answers to this row of the client alone
        model.get_parameter("body.0.weight")[0] = direction
        model.get_parameter("body.0.bias")[0] = -(best + next_best) / 2
    method = replace(
        bf.algorithms.fedper(model, epochs=1, optimiser=SGD(1e-9, momentum=0.9)),
        predictor=LinearisedLaplace(precision=1.0),
    )
    one = run(method, named, rounds=1, evaluate_every=None).client(0)
    one.save(tmp_path / "stays")
    one.save(tmp_path / "leaves", plug_in=True)

    stays = load_file(tmp_path / "stays" / files.CLIENT_FILE)
    leaves = load_file(tmp_path / "leaves" / files.CLIENT_FILE)
    # Its weights, and its bias after those of all units.
    unit, curved = (torch.tensor([*range(8), 16 * 8]), stays["stored.curved"])
    assert bool(curved[unit].all())
    root = stays["stored.root"][curved.cumsum(0)[unit] - 1]
    covariance = stays["stored.variance"][unit].diag() + stays["stored.sign"] * root @ root.T
    taken = torch.eye(9) - covariance  # what the data took away from the prior, along (row, 1)
    row = torch.linalg.eigh(taken)[1][:, -1]
    assert_close(row[:8] / row[8], secret, atol=1e-9, rtol=1e-9)

    assert sorted(leaves) == sorted(name for name in stays if name.startswith("view."))
    # The means alone, of which this unit's hold another direction.
    assert all(torch.equal(leaves[name], stays[name]) for name in leaves)
    assert (
        abs(
            float(torch.nn.functional.cosine_similarity(leaves["view.body.loc"][:8], secret, dim=0))
        )
        < 0.9
    )


def test_all_clients_are_saved_under_their_names(
    ditto: Result, named: FederatedData, tmp_path: Path
):
    """Where one is too long for a folder, nothing is written."""
    ditto.save_clients(tmp_path / "models")
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == sorted(NAMES)
    assert bf.load_client(tmp_path / "models" / "Bern", ditto.algorithm).name == "Bern"
    long = replace(ditto, known=replace(named, client_names=(*NAMES[:6], "x" * 256)))
    with pytest.raises(ValueError, match=r"x{40}.* is too long"):
        long.save_clients(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(("path", "error"), [("", ValueError), (3, TypeError), (None, TypeError)])
def test_a_path_that_names_no_folder_is_refused(
    ditto: Result, path: Any, error: type, tmp_path: Path, monkeypatch
):
    """Wherever one is read or written; nothing is written."""
    monkeypatch.chdir(tmp_path)
    for use in (
        ditto.save,
        ditto.client(0).save,
        ditto.save_clients,
        lambda path: bf.load(path, ditto.algorithm),
        lambda path: bf.load_client(path, ditto.algorithm),
    ):
        with pytest.raises(error, match=rf"^path must name a folder.*got {path!r}; pass one"):
            use(path)
    assert not list(tmp_path.iterdir())


def test_one_methods_network_starts_another(ditto: Result, named: FederatedData):
    """As `pfedvem(result.model())`."""
    method = bf.algorithms.fedavg(ditto.model(), epochs=1, optimiser=SGD(1e-12, momentum=0.9))
    started = run(method, named, rounds=1, evaluate_every=None).server["w"]["loc"]
    assert_close(started, ditto.server["w"]["loc"], atol=1e-6, rtol=0)


def test_frozen_parameters_stay_frozen(named: FederatedData):
    network = bf.models.mlp(8, hidden=16, outputs=3)
    network.get_submodule("body").requires_grad_(False)
    made = (
        run(bf.algorithms.fedavg(network, epochs=1), named, evaluate_every=None).client(0).model()
    )
    assert [p.requires_grad for p in made.parameters()] == [False, False, True, True]
    own, given = (each.get_parameter("body.0.weight") for each in (made, network))
    assert torch.equal(own.float(), given)
    assert own.data_ptr() != given.data_ptr()


class Reader(nn.Module):
    """Tokens, with two measurements beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.words(tokens).mean(1), more], -1))


def texts(*, names: bool) -> FederatedData:
    """Two clients with tokens and measurements."""
    rng = np.random.default_rng(0)
    tokens, more = rng.integers(0, 9, (40, 5)), rng.normal(size=(40, 2)).astype("float32")
    x: Any = {"tokens": tokens, "more": more} if names else (tokens, more)
    return bf.data.from_arrays(x, tokens[:, 0] % 3, client_ids=[0, 1] * 20)


def reader(**options: Any) -> bf.Algorithm:
    return replace(bf.algorithms.fedavg(Reader(), epochs=1), **options)


@pytest.mark.parametrize("predictor", [False, True], ids=["mean", "laplace"])
@pytest.mark.parametrize("names", [False, True], ids=["tuple", "mapping"])
def test_several_inputs(names: bool, predictor: bool, tmp_path: Path, monkeypatch):
    """In the form of the training data; from a file, in pieces, and of any whole numbers; one row
    or many give the same.
    """
    data = texts(names=names)
    result = run(
        reader(predictor=LinearisedLaplace("w", precision=1.0) if predictor else None),
        data,
        evaluate_every=None,
    )
    x, one = data.test.client(1)[0], result.client(1)
    probs = one.predict(x).probs
    assert_close(probs, result.predict().client(1).probs, atol=1e-12, rtol=0)
    one.save(tmp_path)
    assert torch.equal(bf.load_client(tmp_path, result.algorithm).predict(x).probs, probs)  # type: ignore[arg-type]
    tokens, more = (x["tokens"], x["more"]) if names else x
    plain = (
        {"more": more.tolist(), "tokens": tokens.numpy().astype("uint8")}
        if names
        else (tokens.int(), more.tolist())
    )
    assert_close(one.predict(plain).probs, probs, atol=1e-6, rtol=0)
    monkeypatch.setattr(predict, "GATHER", 1)
    assert_close(one.predict(x).probs, probs, atol=1e-12, rtol=0)
    module = one.model()
    assert_close(
        (module(**x) if names else module(*x)).softmax(-1).detach(),
        one.predict(x, draws=0).probs,
        atol=1e-12,
        rtol=0,
    )


def test_bad_inputs_among_several():
    """Are named, with what the model was trained on."""
    named = run(reader(), texts(names=True), rounds=1, evaluate_every=None).client(0)
    x = {"tokens": np.zeros((4, 5), dtype="int64"), "more": np.zeros((4, 2))}
    named.predict(x)
    for wrong, words in (
        (
            x | {"tokens": np.zeros((4, 5))},
            r"^x\['tokens'\] holds floats \(torch.float32\) .*trained on whole numbers "
            r".*astype\('int64'\)",
        ),
        (
            x | {"more": np.zeros((4, 2), dtype="int64")},
            r"^x\['more'\] holds whole numbers .*astype\('float32'\)",
        ),
        (x | {"more": np.zeros((3, 2))}, r"x\['tokens'\] has 4 rows and x\['more'\] has 3"),
        (x | {"more": np.zeros((4, 3))}, r"^x\['more'\] must have .*\[N, 2\], got \[4, 3\]"),
        (
            x | {"more": np.array([[0.0, 1.0], [0.0, np.nan]] * 2)},
            r"^x\['more'\] holds NaN .* row 1",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            named.predict(wrong)
    with pytest.raises(KeyError, match="more"):
        named.predict({"tokens": x["tokens"]})


def bright(x: torch.Tensor) -> torch.Tensor:
    """From bytes to [0, 1]."""
    return x.flatten(1) / 255


def dark(x: torch.Tensor) -> torch.Tensor:
    return 1 - bright(x)


@pytest.fixture(scope="module")
def pictures() -> Result:
    """A run on bytes, which a transform makes floats; nothing of the training data is float."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 3, 3), dtype=np.uint8)
    data = bf.data.from_arrays(x, x[:, 0, 0] % 3, client_ids=[0, 1] * 20).transformed(bright)
    return run(
        bf.algorithms.fedavg(bf.models.mlp(9, hidden=4, outputs=3), epochs=1),
        data,
        evaluate_every=None,
    )


def test_rows_come_before_the_transform(pictures: Result, tmp_path: Path):
    """As they are in the data, of any whole numbers that are bytes; the module takes what the
    transform makes of them.
    """
    split = pictures.data.test
    x, one = split.x[split.rows(1)], pictures.client(1)  # type: ignore[index]
    assert x.dtype == torch.uint8
    probs = one.predict(x).probs
    assert_close(probs, pictures.predict().client(1).probs, atol=1e-12, rtol=0)
    assert_close(
        one.model()(split.client(1)[0].double()).softmax(-1).detach(), probs, atol=1e-12, rtol=0
    )
    assert torch.equal(one.predict(x.long()).probs, probs)  # type: ignore[arg-type]
    for wrong, words in (
        (x.long().fill_(300), r"^x holds 300, which is no torch.uint8"),
        (
            x / 255,
            r"^x holds floats .*whole numbers \(torch.uint8\); pass the rows as.*bytes over 255",
        ),
        (x.float(), r"^x holds floats .* x\.to\(torch\.uint8\) if no fractions are lost"),
        (x.flatten(1), r"\[N, 3, 3\], got \[8, 9\]|got \[4, 9\]"),
    ):
        with pytest.raises(ValueError, match=words):
            one.predict(wrong)
    again = (255 * (x / 255)).round().to(torch.uint8)
    assert_close(one.predict(again).probs, probs, rtol=0, atol=0)


@pytest.mark.parametrize("fitted", [False, True])
def test_rows_are_transformed_a_piece_at_a_time(
    pictures: Result, fitted: bool, monkeypatch: pytest.MonkeyPatch
):
    """So that many rows of bytes never are as many rows of floats, in either kind of prediction."""
    method = (
        replace(pictures.algorithm, predictor=LinearisedLaplace(precision=1.0))
        if fitted
        else pictures.algorithm
    )
    one = run(method, pictures.data, evaluate_every=None).client(1)
    x = np.random.default_rng(1).integers(0, 256, (40, 3, 3), dtype=np.uint8)
    probs, seen, changed = one.predict(x).probs, [], ClientData.changed

    def watched(split: ClientData, name: str, change: Any, rows: torch.Tensor) -> Any:
        seen.append(len(rows))
        return changed(split, name, change, rows)

    monkeypatch.setattr(predict, "GATHER", 5 * 9 * 8)
    monkeypatch.setattr(ClientData, "changed", watched)
    assert_close(one.predict(x).probs, probs, atol=1e-12, rtol=0)
    assert max(seen) == 5
    assert sum(seen) <= len(x) + 3  # and a row for each shape that is asked for


def test_a_file_needs_the_transform_that_it_was_made_with(
    pictures: Result, ditto: Result, tmp_path: Path
):
    """It holds its identity; another one, or none, is refused with both, and another code under the
    same name.
    """
    split, method = pictures.data.test, pictures.algorithm
    x = split.x[split.rows(0)]  # type: ignore[index]
    pictures.client(0).save(tmp_path / "one")
    loaded = bf.load_client(tmp_path / "one", method, transform=bright)
    assert torch.equal(loaded.predict(x).probs, pictures.client(0).predict(x).probs)  # type: ignore[arg-type]
    loaded.save(tmp_path / "again")
    assert bf.load_client(tmp_path / "again", method, transform=bright).schema.transform is bright
    ditto.client(0).save(tmp_path / "two")
    other = types.FunctionType(dark.__code__.replace(co_qualname="bright"), globals())
    for folder, given, transform, words in (
        (
            "one",
            method,
            None,
            r"one.*function of inputs: transform: saved {.*bright.*}, given None; pass that one as",
        ),
        (
            "one",
            method,
            dark,
            r"transform\.name: saved .*bright, given .*dark; transform\.source",
        ),
        (
            "one",
            method,
            other,
            r"another function of inputs: transform\.source: saved \w+, given \w+;",
        ),
        ("two", ditto.algorithm, bright, r"transform: saved None, given {.*bright"),
    ):
        with pytest.raises(CheckpointError, match=words):
            bf.load_client(tmp_path / folder, given, transform=transform)


@pytest.mark.parametrize("names", [False, True], ids=["tuple", "mapping"])
def test_a_module_of_several_inputs_is_exported(names: bool, tmp_path: Path):
    """Tokens stay whole numbers there."""
    import onnxruntime

    module = (
        run(reader(), texts(names=names), rounds=1, evaluate_every=None, dtype=torch.float32)
        .client(0)
        .model()
    )
    x = {"tokens": torch.arange(30).view(6, 5) % 9, "more": torch.randn(6, 2)}
    rows = torch.export.Dim("rows", min=1)
    shapes = {name: {0: rows} for name in x}
    given: Any = ((), x) if names else (tuple(x.values()), None)
    exported = torch.export.export(module, *given, dynamic_shapes=shapes).module()
    wanted = module(**x)[:2]
    assert torch.equal(
        exported(**{k: t[:2] for k, t in x.items()})
        if names
        else exported(*(t[:2] for t in x.values())),
        wanted,
    )
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        module,
        given[0],
        path,
        kwargs=given[1],
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=list(x),
        verbose=False,
    )
    (outputs,) = onnxruntime.InferenceSession(path).run(
        None, {name: t[:2].numpy() for name, t in x.items()}
    )
    assert_close(torch.from_numpy(outputs), wanted.detach(), atol=1e-5, rtol=0)


def test_a_run_that_was_loaded_without_data_knows_its_inputs(pictures: Result, tmp_path: Path):
    """Their tensors and types; with a transform, of which a file holds no code, the data are
    needed.
    """
    result = run(reader(), texts(names=True), rounds=1, evaluate_every=None)
    result.save(tmp_path / "run")
    x, loaded = result.data.test.client(0)[0], bf.load(tmp_path / "run", result.algorithm)
    assert torch.equal(loaded.client(0).predict(x).probs, result.client(0).predict(x).probs)
    pictures.save(tmp_path / "pictures")
    with pytest.raises(
        ValueError,
        match=r"'1' needs the transform .*bright.* for its inputs.*bf\.load\(path, algorithm, "
        r"clients\)",
    ):
        bf.load(tmp_path / "pictures", pictures.algorithm).client(1)
    assert (
        bf.load(tmp_path / "pictures", pictures.algorithm, pictures.data).client(1).schema.transform
        is bright
    )


def test_the_network_alone_is_enough(model: nn.Module, tmp_path: Path):
    """Calibrated too, with its steps; another network is refused, and where a class of the user's
    has part in predictions the method is asked for.
    """
    rows = bf.data.iid("digits", clients=3, validation=0.2, calibration=0.2)
    network = bf.models.mlp(rows.inputs, hidden=8, outputs=10)
    result = bf.simulate(
        bf.algorithms.ditto(network), rows, rounds=2, progress=False, evaluate_every=None
    ).calibrate(bf.calibration.Temperature(), bf.calibration.Conformal())
    result.client(1).save(tmp_path / "own")
    x = rows.test.client(1)[0]
    expected, found = (
        one.predict(x) for one in (result.client(1), bf.load_client(tmp_path / "own", network))
    )
    assert torch.equal(found.probs, expected.probs)
    assert torch.equal(found.sets, expected.sets)
    other = bf.models.mlp(rows.inputs, hidden=9, outputs=10)
    with pytest.raises(CheckpointError, match=r"another network: layers\.body\.0"):
        bf.load_client(tmp_path / "own", other)

    class Own(Categorical):
        pass

    method = bf.algorithms.fedavg(network, likelihood=Own())
    run(method, rows, evaluate_every=None).client(0).save(tmp_path / "needs")
    with pytest.raises(CheckpointError, match=r"needs the method .*predictions use .*Own"):
        bf.load_client(tmp_path / "needs", network)
    assert bf.load_client(tmp_path / "needs", method).name == "client 0"
