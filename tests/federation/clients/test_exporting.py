"""A client's model as an ONNX file, by ONNX's own runtime."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from torch import nn

import bayesfl as bf
from bayesfl import calibration
from bayesfl.evaluation.calibration import Bias, Temperature
from bayesfl.federation.clients.client_model import ClientModel
from bayesfl.federation.run.result import Result
from bayesfl.likelihoods import Bernoulli, Categorical, Gaussian

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def trained(method: bf.Algorithm, rows: Any) -> Result:
    return bf.simulate(method, rows, rounds=2, progress=False, evaluate_every=None)


def served(client: ClientModel, x: Any, raw: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """What the file's graph makes of rows `raw`, as many as there are and one alone; and its
    metadata.
    """
    client.export(folder / "model.onnx", x)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    inputs = {one.name: np.asarray(t) for one, t in zip(session.get_inputs(), raw, strict=True)}
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True))
    first = session.run(None, {name: t[:1] for name, t in inputs.items()})
    for name, one in zip(names, first, strict=True):
        np.testing.assert_allclose(one, found[name][:1], atol=1e-6)
    (entry,) = onnx.load(folder / "model.onnx").metadata_props
    return {**found, "about": json.loads(entry.value)}


def brighter(x: Any) -> Any:
    return x.float() / 16 - 0.5


@pytest.mark.slow
def test_a_calibrated_client_is_served_as_it_predicts(tmp_path: Path):
    """Transform, temperature and bias are inside the graph; thresholds and names beside it."""
    rows = bf.data.iid("digits", clients=3, validation=0.2, calibration=0.2)
    rows = rows.transformed(brighter)
    network = bf.models.mlp(rows.inputs, hidden=8, outputs=10)
    steps = (calibration.Temperature(), calibration.Bias())
    result = trained(bf.algorithms.ditto(network), rows).calibrate(*steps, calibration.Conformal())
    own, x = result.client(1), rows.test.x[rows.test.index[:9]]
    found = served(own, x, (x,), tmp_path)
    np.testing.assert_allclose(found["probs"], own.predict(x).probs, atol=1e-5)
    plain = replace(own, steps=()).predict(x).probs
    assert np.abs(found["probs"] - plain.numpy()).max() > 1e-3
    said = found["about"]
    assert said["client"] == "client 1"
    assert said["class_names"] == [str(k) for k in range(10)]
    assert [one["step"] for one in said["steps"]][-1] == "Conformal"
    assert said["steps"][-1]["threshold"] == own.steps[-1].own["threshold"][0].tolist()
    with pytest.warns(UserWarning, match=r"leaves out its calibration \(Temp.*export"):
        own.model()


@pytest.mark.slow
def test_a_frames_columns_are_beside_the_graph(tmp_path: Path):
    rng, n = np.random.default_rng(0), 300
    frame = pd.DataFrame({"age": rng.normal(60, 10, n), "sex": rng.choice(["f", "m"], n)})
    frame["ward"] = rng.choice(["Basel", "Bern"], n)
    frame["ill"] = np.where(frame.age + rng.normal(0, 5, n) > 60, "yes", "no")
    rows, columns = bf.data.from_frame(frame, target="ill", client="ward")
    network = bf.models.mlp(rows.inputs, hidden=4, outputs=2)
    own = trained(bf.algorithms.fedper(network), rows).client("Bern")
    x = columns.apply(frame)
    found = served(own, frame, (x,), tmp_path)
    np.testing.assert_allclose(found["probs"], own.predict(frame).probs, atol=1e-5)
    assert bf.data.Columns.from_json(json.dumps(found["about"]["prepared"])) == columns


class Sum(nn.Module):
    """A number of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.one(a) + self.other(b)


@pytest.mark.slow
def test_numbers_of_several_inputs_and_mixtures(tmp_path: Path):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(40, width)).astype("float32") for width in (3, 2))
    rows = bf.data.from_arrays({"a": a, "b": b}, a[:, :1] + b[:, 1:], client_ids=np.arange(40) % 2)
    own = trained(bf.algorithms.fedavg(Sum(), likelihood=Gaussian(0.5)), rows).client(0)
    x = {"a": a, "b": b}
    found = served(own, x, (a, b), tmp_path)
    np.testing.assert_allclose(found["mean"], own.predict(x).mean, atol=1e-5)
    digits = bf.data.iid("digits", clients=2)
    network = bf.models.mlp(digits.inputs, hidden=4, outputs=10)
    images = digits.test.client(0)[0]
    mixed = trained(bf.algorithms.fedem(network, components=2), digits).client(0)
    found = served(mixed, images, (images,), tmp_path)
    np.testing.assert_allclose(found["probs"], mixed.predict(images).probs, atol=1e-5)


def test_a_posterior_is_refused(tmp_path: Path):
    """A graph has none: it would serve other probabilities than the client."""
    rows = bf.data.iid("digits", clients=2)
    network = bf.models.mlp(rows.inputs, hidden=4, outputs=10)
    method = replace(
        bf.algorithms.fedper(network), predictor=bf.predictors.LinearisedLaplace(precision=1.0)
    )
    with pytest.raises(ValueError, match=r"over a posterior, .*plug_in=True"):
        trained(method, rows).client(0).export(tmp_path / "model.onnx", rows.test.client(0)[0])


class Remarked(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, outputs)

    def forward(self, x: Any) -> Any:
        return self.linear(x)  # a remark of John Doe's


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["three classes", "two classes", "learned scale"])
def test_graphs_are_right_where_predictions_are_sure(kind: str, tmp_path: Path):
    """Logits of a hundred, whose sigmoids are 0 in float32; and a file has no source text, which
    may tell more than the network.
    """
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    y, outputs, likelihood, steps = {
        "three classes": (np.digitize(x[:, 0], [-1, 1]), 3, Categorical(), (Temperature(), Bias())),
        "two classes": ((x[:, 0] > 0).astype(int), 1, Bernoulli(), (Temperature(),)),
        "learned scale": (1e3 * x[:, 0], 2, Gaussian(scale="learned"), ()),
    }[kind]
    rows = bf.data.from_arrays([x, x], [y, y], validation=0.3)
    method = bf.algorithms.fedavg(Remarked(outputs), epochs=1, likelihood=likelihood)
    result = trained(method, rows)
    own = (result.calibrate(*steps) if steps else result).client(0)
    found = served(own, x, (100 * x,), tmp_path)
    wanted = own.predict(100 * x)
    for name in found.keys() - {"about"}:
        np.testing.assert_allclose(found[name], getattr(wanted, name), rtol=1e-4, atol=1e-5)
    file = (tmp_path / "model.onnx").read_bytes()
    assert not [text for text in (b"John Doe", b"test_exporting") if text in file]
