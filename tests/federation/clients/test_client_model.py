"""One client's own model: what it takes and refuses, as a module, as files, on its own."""

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

import bayesfl as bf
from bayesfl.composition.predictors import LinearisedLaplace
from bayesfl.data import ClientData, FederatedData
from bayesfl.federation.clients import client_model, predict
from bayesfl.federation.errors import CheckpointError
from bayesfl.federation.run.result import Result
from bayesfl.federation.store import files
from bayesfl.likelihoods import Gaussian
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
    assert (one.name, one.client, one.class_names, one.round) == (
        "Bern",
        2,
        ("mild", "grave", "none"),
        3,
    )
    x, _ = named.test.client(2)
    assert torch.equal(one.predict(x).probs, ditto.client(np.int64(2)).predict(x).probs)
    assert repr(one) == "ClientModel('Bern' after round 3; inputs (8,))"
    assert_close(ditto.predict().client("Bern").probs, one.predict(x).probs, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"no client 'Zürich'.*7 names .*'Zurich'"):
        ditto.client("Zürich")
    with pytest.raises(ValueError, match=r"0 to 6, got 7"):
        ditto.client(7)


def test_it_is_on_its_own(ditto: Result):
    """Neither later training nor what a user does with its module changes it, nor does it change
    the federation.
    """
    one = ditto.client("Chur")
    x = torch.randn(4, 8)
    before = one.predict(x).probs
    state = {k: v.clone() for k, v in ditto.private["w"].items()} if "w" in ditto.private else {}
    network = one.model()
    assert not network.training
    assert all(p.requires_grad for p in network.parameters())
    with torch.no_grad():
        for p in network.parameters():
            p.zero_()
    for tensors in ditto.private.values():
        for t in tensors.values():
            t.add_(0.0)
    assert torch.equal(one.predict(x).probs, before)
    assert torch.equal(ditto.client("Chur").predict(x).probs, before)
    assert all(torch.equal(ditto.private["w"][k], v) for k, v in state.items())


def test_rows_of_any_kind(ditto: Result):
    """Arrays, lists and tensors of any real numbers; one row or many give the same."""
    one, x = ditto.client(0), torch.randn(5, 8)
    probs = one.predict(x).probs
    assert probs is not None
    assert probs.shape == (5, 3)
    for other in (x.numpy(), x.tolist(), x.double().numpy(), x.numpy().astype(np.longdouble)):
        assert_close(one.predict(other).probs, probs, atol=0, rtol=0)
    assert_close(
        torch.cat([p for r in range(5) if (p := one.predict(x[r : r + 1]).probs) is not None]),
        probs,
        atol=1e-12,
        rtol=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_of_any_precision_are_converted(model, named: FederatedData, dtype: torch.dtype):
    """As users of numpy and pandas hold them; the predictions are those of the same numbers in
    float32.
    """
    one = run(
        bf.algorithms.fedavg(model, epochs=1), named, rounds=1, evaluate_every=None, dtype=dtype
    ).client(0)
    whole = np.arange(16).reshape(2, 8) % 2
    probs = one.predict(whole.astype("float32")).probs
    for kind in ("float16", "float32", "float64"):
        assert torch.equal(one.predict(whole.astype(kind)).probs, probs)  # type: ignore[arg-type]
        assert torch.equal(one.predict(torch.from_numpy(whole.astype(kind))).probs, probs)  # type: ignore[arg-type]
    assert torch.equal(one.predict(torch.from_numpy(whole).bfloat16()).probs, probs)  # type: ignore[arg-type]
    assert torch.equal(one.predict(pd.DataFrame(whole, dtype="Int64")).probs, probs)  # type: ignore[arg-type]


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
            r"^x: columns \['town'\] hold no numbers; .*get_dummies",
        ),
        (torch.randn(5, 7), ValueError, r"\[N, 8\], got \[5, 7\]"),
        (torch.randn(8), ValueError, r"\[N, 8\], got \[8\]"),
        (torch.randn(0, 8), ValueError, r"got \[0, 8\]"),
        (torch.tensor(1.0), ValueError, r"got \[\]"),
        (torch.tensor([[1.0] * 8, [float("nan")] * 8]), ValueError, "first in row 1"),
        ([["a"] * 8], ValueError, r"x must be an array of numbers"),
        (
            torch.randn(2, 8, dtype=torch.complex64),
            ValueError,
            r"^x must be real numbers, got torch.complex64; pass real and imaginary",
        ),
        (None, TypeError, "None"),
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
        ((torch.zeros(2, 8),), ValueError, r"^x must hold the inputs .*\['x'\], got \['x\[0\]'\]"),
        ({"x": torch.zeros(2, 8)}, ValueError, r"^x must hold .*\['x'\], got \[\"x\['x'\]\"\]"),
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
        UserWarning, match="predictions of 'Chur' for 2 rows are not finite, the first is row 1"
    ):
        probs = one.predict([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]).probs
    assert probs is not None
    assert probs.isnan().any(-1).tolist() == [False, True, True]


def test_targets_have_means_and_variances(tmp_path: Path):
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
    """Of nothing, of several clients, of a run, of another method; damaged; and the folder of a
    client is no saved run.
    """
    method = ditto.algorithm
    with pytest.raises(CheckpointError, match=files.CLIENT_FILE):
        bf.load_client(tmp_path, method)
    ditto.client(0).save(tmp_path / "one" / "deep")
    assert bf.load_client(tmp_path / "one", method).name == "Zurich"
    with pytest.raises(CheckpointError, match="holds a client's own model, not a run"):
        bf.load(tmp_path / "one" / "deep", method)
    ditto.client(1).save(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"2 of them.*one.*two"):
        bf.load_client(tmp_path, method)
    for number in (0, 1):  # of two nodes that call their clients the same
        ditto.client(1).save(tmp_path / "shared" / "experiment" / f"client-{number}")
    with pytest.raises(CheckpointError, match=r"several clients, 2 of them.*client-0.*client-1"):
        bf.load_client(tmp_path / "shared", method)
    with pytest.raises(CheckpointError, match=r"another method: ditto\.epochs: saved 1, given 2;"):
        bf.load_client(
            tmp_path / "two",
            bf.algorithms.ditto(bf.models.mlp(8, hidden=16, outputs=3), epochs=2, batch_size=10),
        )
    with pytest.raises(CheckpointError, match=r"parameters"):
        bf.load_client(
            tmp_path / "two",
            bf.algorithms.ditto(bf.models.mlp(8, hidden=5, outputs=3), epochs=1, batch_size=10),
        )
    ditto.save(tmp_path / "run")
    (tmp_path / "run" / "state.safetensors").rename(tmp_path / "run" / files.CLIENT_FILE)
    with pytest.raises(
        CheckpointError, match=r"holds a run of bf\.simulate, not a client's own model"
    ):
        bf.load_client(tmp_path / "run", method)
    file = tmp_path / "two" / files.CLIENT_FILE
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        bf.load_client(tmp_path / "two", method)
    with pytest.raises(TypeError, match="algorithm"):
        bf.load_client(tmp_path / "two", None)  # type: ignore[arg-type]


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
    with pytest.raises(ValueError, match=r"'Basel'.* bytes, more than 100; .*plug_in=True"):
        one.save(tmp_path / "Basel")
    assert not (tmp_path / "Basel").exists()
    one.save(tmp_path / "Basel", plug_in=True)
    plain = bf.load_client(tmp_path / "Basel", result.algorithm)
    assert_close(plain.predict(x).probs, one.predict(x, draws=0).probs, atol=1e-12, rtol=0)
    assert repr(plain).endswith("at the means)")
    plain.save(tmp_path / "again")
    assert bf.load_client(tmp_path / "again", result.algorithm).plug_in


def test_the_network_that_a_client_chose_is_its_module(model, named: FederatedData, tmp_path: Path):
    """Of IFCA's several; from a file, too, and for clients that chose differently."""
    result = run(
        bf.algorithms.ifca(model, clusters=3, epochs=1, batch_size=10), named, evaluate_every=None
    )
    chosen = {}
    for j in range(named.clients):
        (x, _), one = named.test.client(j), result.client(j)
        one.save(tmp_path / str(j))
        for made in (one, bf.load_client(tmp_path / str(j), result.algorithm)):
            outputs = made.model()(x.double()).detach()
            assert_close(outputs.softmax(-1), one.predict(x).probs, atol=1e-12, rtol=0)
        found = torch.cat([p.detach().flatten() for p in one.model().parameters()])
        m = int(one.view["cluster"].argmax())
        assert torch.equal(found, result.server["models"]["loc"][m])
        chosen[m] = j
    assert len(chosen) > 1


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
    result = run(laplace(model), named, evaluate_every=None)
    result.client(3).save(tmp_path)
    content = (tmp_path / files.CLIENT_FILE).read_bytes()
    rows, _ = named.train.client(3)
    for row in rows:
        for dtype in (torch.float32, torch.float64):
            assert row.to(dtype).numpy().tobytes() not in content


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
    ditto.save_clients(tmp_path / "models")
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == sorted(NAMES)
    assert bf.load_client(tmp_path / "models" / "Bern", ditto.algorithm).name == "Bern"
    for bad in ("../Bern", "..", "", "a/b", "a\\b", "bern"):
        other = replace(
            ditto, known=replace(named, client_names=("Bern", bad, *NAMES[2:3], *"abcd"))
        )
        with pytest.raises(ValueError, match="folders"):
            other.save_clients(tmp_path / "bad")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models"]


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


def test_names_too_long_for_folders_are_refused(
    ditto: Result, named: FederatedData, tmp_path: Path
):
    """Counted in bytes, before anything is written."""
    for name, bytes_ in (("x" * 300, 300), ("ü" * 128, 256)):
        long = replace(ditto, known=replace(named, client_names=(*NAMES[:6], name)))
        with pytest.raises(
            ValueError,
            match=rf"'{name[:40]}'\.\.\. has {bytes_} bytes, more than the "
            r"255.*result\.client\(\.\.\.\)\.save",
        ):
            long.save_clients(tmp_path / "models")
    assert not list(tmp_path.iterdir())
    replace(ditto, known=replace(named, client_names=(*NAMES[:6], "x" * 255))).save_clients(
        tmp_path
    )


def test_the_servers_network_is_a_module(ditto: Result, model, named: FederatedData):
    network = ditto.model()
    assert_close(network(torch.ones(1, 8).double()).shape, torch.Size([1, 3]))
    loc = torch.cat([p.detach().flatten() for p in network.parameters()])
    assert torch.equal(loc, ditto.server["w"]["loc"])
    for method, words in (
        (bf.algorithms.fedper(model), r"\['head'\]"),
        (bf.algorithms.fedem(model), "mixtures"),
    ):
        with pytest.raises(
            ValueError, match=rf"no whole network: .*{words}.*result\.client\(name\)"
        ):
            run(method, named, rounds=1, evaluate_every=None).model()


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
    assert torch.equal(
        made.get_parameter("body.0.weight").float(), network.get_parameter("body.0.weight")
    )
    assert (
        made.get_parameter("body.0.weight").data_ptr()
        != network.get_parameter("body.0.weight").data_ptr()
    )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [1, 6])
def test_the_module_is_exported(dynamic: int, tmp_path: Path):
    """By torch.export with no difference at all, and to ONNX for any number of rows, to rounding in
    float32.
    """
    import onnxruntime

    data = bf.data.from_arrays(
        torch.randn(40, 1, 12, 12), torch.arange(40) % 3, client_ids=[0, 1] * 20
    )
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 3)
    )
    model = (
        run(
            bf.algorithms.fedavg(network, epochs=1),
            data,
            rounds=1,
            evaluate_every=None,
            dtype=torch.float32,
        )
        .client(1)
        .model()
    )
    x, shapes = torch.randn(6, 1, 12, 12), ({0: torch.export.Dim("rows", min=1)},)
    exported = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    assert torch.equal(exported(x[:dynamic]), model(x[:dynamic]))
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model, (x,), path, dynamo=True, dynamic_shapes=shapes, input_names=["x"], verbose=False
    )
    (outputs,) = onnxruntime.InferenceSession(path).run(None, {"x": x[:dynamic].numpy()})
    assert_close(torch.from_numpy(outputs), model(x[:dynamic]), atol=1e-5, rtol=0)


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


def reader(predictor: bool) -> bf.Algorithm:
    network = Reader()
    if not predictor:
        return bf.algorithms.fedavg(network, epochs=1)
    return replace(
        bf.algorithms.fedavg(network, epochs=1), predictor=LinearisedLaplace("w", precision=1.0)
    )


@pytest.mark.parametrize("predictor", [False, True], ids=["mean", "laplace"])
@pytest.mark.parametrize("names", [False, True], ids=["tuple", "mapping"])
def test_several_inputs(names: bool, predictor: bool, tmp_path: Path, monkeypatch):
    """In the form of the training data; from a file, in pieces, and of any whole numbers; one row
    or many give the same.
    """
    data = texts(names=names)
    result = run(reader(predictor), data, evaluate_every=None)
    x: Any = data.test.client(1)[0]
    one = result.client(1)
    probs = one.predict(x).probs
    assert probs is not None
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
    named = run(reader(False), texts(names=True), rounds=1, evaluate_every=None).client(0)
    x = {"tokens": np.zeros((4, 5), dtype="int64"), "more": np.zeros((4, 2))}
    named.predict(x)
    for change, words in (
        (
            {"tokens": np.zeros((4, 5))},
            r"^x\['tokens'\] holds floats \(torch.float32\) .*trained on whole numbers "
            r".*astype\('int64'\)",
        ),
        (
            {"more": np.zeros((4, 2), dtype="int64")},
            r"^x\['more'\] holds whole numbers .*astype\('float32'\)",
        ),
        ({"more": np.zeros((3, 2))}, r"x\['tokens'\] has 4 rows and x\['more'\] has 3"),
        ({"more": np.zeros((4, 3))}, r"^x\['more'\] must have .*\[N, 2\], got \[4, 3\]"),
        ({"more": np.array([[0.0, 1.0], [0.0, np.nan]] * 2)}, r"^x\['more'\] holds NaN .* row 1"),
        ({"mask": np.zeros((4, 2))}, r"\[\"x\['tokens'\]\", \"x\['more'\]\"\], got .*mask"),
    ):
        with pytest.raises(ValueError, match=words):
            named.predict({**x, **change})
    with pytest.raises(ValueError, match=r"got \[\"x\['tokens'\]\"\]"):
        named.predict({"tokens": x["tokens"]})
    with pytest.raises(ValueError, match=r"got \['x\[0\]', 'x\[1\]'\]"):
        named.predict(tuple(x.values()))


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
    assert probs is not None
    assert_close(probs, pictures.predict().client(1).probs, atol=1e-12, rtol=0)
    assert_close(
        one.model()(split.client(1)[0].double()).softmax(-1).detach(), probs, atol=1e-12, rtol=0
    )
    assert torch.equal(one.predict(x.long()).probs, probs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^x holds 300, which is no torch.uint8"):
        one.predict(x.long().fill_(300))
    with pytest.raises(ValueError, match=r"^x holds floats .*whole numbers \(torch.uint8\)"):
        one.predict(x / 255)
    with pytest.raises(ValueError, match=r"\[N, 3, 3\], got \[8, 9\]|got \[4, 9\]"):
        one.predict(x.flatten(1))


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
    assert bf.load_client(tmp_path / "again", method, transform=bright).form.transform is bright
    with pytest.raises(
        CheckpointError,
        match=r"one.*function of inputs: transform: saved {.*bright.*}, given None; give that one "
        r"by",
    ):
        bf.load_client(tmp_path / "one", method)
    with pytest.raises(
        CheckpointError, match=r"transform\.name: saved .*bright, given .*dark; transform\.source"
    ):
        bf.load_client(tmp_path / "one", method, transform=dark)
    other = types.FunctionType(dark.__code__.replace(co_qualname="bright"), globals())
    with pytest.raises(
        CheckpointError,
        match=r"another function of inputs: transform\.source: saved \w+, given \w+;",
    ):
        bf.load_client(tmp_path / "one", method, transform=other)
    ditto.client(0).save(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"transform: saved None, given {.*bright"):
        bf.load_client(tmp_path / "two", ditto.algorithm, transform=bright)


@pytest.mark.parametrize("names", [False, True], ids=["tuple", "mapping"])
def test_a_module_of_several_inputs_is_exported(names: bool, tmp_path: Path):
    """Tokens stay whole numbers there."""
    import onnxruntime

    module = (
        run(reader(False), texts(names=names), rounds=1, evaluate_every=None, dtype=torch.float32)
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
    result = run(reader(False), texts(names=True), rounds=1, evaluate_every=None)
    result.save(tmp_path / "run")
    x: Any = result.data.test.client(0)[0]
    loaded = bf.load(tmp_path / "run", result.algorithm).client(0)
    assert torch.equal(loaded.predict(x).probs, result.client(0).predict(x).probs)  # type: ignore[arg-type]
    pictures.save(tmp_path / "pictures")
    with pytest.raises(
        ValueError,
        match=r"'1' predicts for what the transform .*bright.* makes .*bf\.load\(path, algorithm, "
        r"clients\)",
    ):
        bf.load(tmp_path / "pictures", pictures.algorithm).client(1)
    assert (
        bf.load(tmp_path / "pictures", pictures.algorithm, pictures.data).client(1).form.transform
        is bright
    )
