"""The examples as commands: what is finished is on disk, experiments are not mixed, mistakes are
one line.
"""

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bayesfl as bf
from bayesfl.optim import Adam

SENSITIVITY = "benchmarks/results/sensitivity.json"
SMALL = [
    "--clients",
    "4",
    "--rounds",
    "1",
    "--participation",
    "0.5",
    "--algorithms",
    "fedavg",
    "fedper",
    "--seeds",
    "0",
    "1",
]


def load(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return load("pfedvem")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_every_method_goes_over_its_data_equally_often(example, tmp_path):
    """20 passes for the head and 5 for the body, or 25 for a whole model; in two rounds half of the
    clients at a time make one round of a client.
    """
    arguments = [*SMALL[:2], "--rounds", "2", "--participation", "0.5", "--seeds", "0"]
    assert example.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    rows = json.loads((tmp_path / "run" / "table.json").read_text())["rows"]
    assert len(rows) == len(example.METHODS) + 2
    assert {row["passes"][0] for row in rows.values()} == {25.0}


def test_rates_are_those_that_validation_chose(example):
    saved = json.loads((Path(__file__).parents[2] / SENSITIVITY).read_text())["rates"]
    for name, by_rate in saved["nll"].items():
        means = {rate: sum(nll) for rate, nll in by_rate.items() if None not in nll}
        assert example.DIGITS[name] == float(min(means, key=lambda rate: means[rate]))


@pytest.mark.slow
def test_what_is_finished_is_on_disk(example, tmp_path):
    """Another seed in the same folder is trained beside the first, whose numbers stay; another
    participation is another run.
    """
    out = tmp_path / "run"
    small = [*SMALL[: SMALL.index("--seeds")], "--out", str(out)]
    assert example.main([*small, "--seeds", "0"]) == 0
    first = json.loads((out / "table.json").read_text())["rows"]
    before = {path: path.read_bytes() for path in (out / "runs").glob("*.record")}
    assert len(before) == 2
    assert example.main([*small, "--seeds", "0", "1"]) == 0
    assert len([*(out / "runs").glob("*.record")]) == 4
    assert all(path.read_bytes() == content for path, content in before.items())
    rows = json.loads((out / "table.json").read_text())["rows"]
    assert {name: row["nll"][:1] for name, row in rows.items()} == {
        name: row["nll"] for name, row in first.items()
    }
    assert {path.name for path in out.iterdir()} == {
        "runs",
        "table.json",
        "reliability.png",
        "learning_curves.png",
    }
    assert example.main([*small, "--seeds", "0", "--participation", "1"]) == 0
    assert len([*(out / "runs").glob("*.record")]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "fedem",
            "--clients 4 --rounds 1 --test 20 --rates 0.1 0.3",
            ["FedAvg: rate 0.", "L1 of equal weights", "Clustered FL has clusters of"],
        ),
        (
            "fedpac",
            "--clients 4 --rounds 1 --train 20 --rates 0.1 --seeds 0",
            ["label skew\n", "after NLL", "weight on the own group 0."],
        ),
        (
            "perinvfl",
            "--rounds 1 --anneal 1 --rates 0.1 0.2 --lams 1 2",
            ["personal rate", "(colour alone)", "PerInvFL-DRO"],
        ),
    ],
)
def test_an_example_goes_on_from_its_runs(name, arguments, words, tmp_path, capsys, monkeypatch):
    """The second time nothing is trained, and the same is printed."""
    example, given = load(name), [*arguments.split(), "--out", str(tmp_path)]
    example.main(given)
    shown = capsys.readouterr().out
    assert all(one in shown for one in words)
    monkeypatch.setattr(bf.study.cells.Cell, "_ran", None)
    example.main(given)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("pfedvem", ["--clients", "3"], 1, r"error: \w+, seed 0: clients .*multiple of 2"),
        ("pfedvem", ["--rounds", "0"], 2, r"error: rounds .*1.* got 0"),
        ("pfedvem", ["--dataset", "mnist"], 1, r"error: \w+, seed 0: .*'mnist' is not on disk"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, name, arguments, code, message):
    """And leave no folder behind that would be in the way of the next try."""
    monkeypatch.setenv("BAYESFL_DATA", str(tmp_path / "absent"))
    small = SMALL if name == "pfedvem" else []
    assert load(name).main([*small, *arguments, "--out", str(tmp_path / "run")]) == code
    error = capsys.readouterr().err
    assert re.match(message, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_divergence_is_one_line_and_the_others_go_on(example, tmp_path, capsys, monkeypatch):
    """Exit code 1, and the table is of the method that went through."""
    diverging = replace(example.PRESETS["digits"], rates={"fedavg": 1e30})
    monkeypatch.setitem(example.PRESETS, "digits", diverging)
    out = tmp_path / "run"
    assert example.main([*SMALL, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: FedAvg, seed 0: ")
    assert error.count("\n") == 1
    rows = json.loads((out / "table.json").read_text())["rows"]
    assert {name: len(row["accuracy"]) for name, row in rows.items()} == {"FedPer": 2}


@pytest.mark.slow
def test_invariance_is_looked_at(tmp_path, capsys):
    """The slopes are those of each client's own model on its training data, sureness that of the
    global model at each angle.
    """
    example = load("perinvfl")
    example.main(["--rounds", "2", "--anneal", "1", "--out", str(tmp_path)])
    table = json.loads((tmp_path / "table.json").read_text())
    rows, written = table["rows"], table["references"]
    out = capsys.readouterr().out
    assert ("p = 0.1" in out, "*" in out) == (True, False)
    clients = example.federation("digits", 0, upright=False)
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("(")] == list(
        written
    )
    for p in example.CASES:
        # Colour agrees with the label in so many of 359 images, which are the same in each case.
        assert abs(written["(colour alone)"][f"p{p}"] - p) < 3 * (0.25 / 359) ** 0.5
        assert (written["(coin)"][f"p{p}"], written["(shape, at most)"][f"p{p}"]) == (0.5, 0.75)
    images, labels = clients.test.client(2)
    seen = torch.tensor([float(image[1].sum()) > float(image[0].sum()) for image in images])
    assert abs(float((seen == labels.bool()).double().mean()) - 0.1) < 0.15
    near = {key: value + 0.009 for key, value in written["(colour alone)"].items()}
    for told, sentence in (
        (
            {"A": near, "B": near | {"p0.3": near["p0.3"] + 0.01}, "C": near},
            "Within a point of colour alone in every column, so not told from it: A, C.",
        ),
        ({"B": near | {"p0.3": 0.9}}, ""),
    ):
        assert example.colour_alone(told, written["(colour alone)"]) == sentence
    options = {"personal_optimiser": Adam(1e-3), "lam": 1.0, "anneal": 1}
    algorithm = example.METHODS["PerInvFL-DRO"](example.network(clients, 0), **options)
    result = bf.simulate(
        algorithm,
        clients,
        rounds=2,
        train="all",
        evaluate_every=None,
        engine=bf.Engine(workers=1),
        progress=False,
    )
    images = []
    for j in range(4):
        x, y = clients.train.client(j)
        own = algorithm.layout("theta").leaves(result.private["theta"]["loc"][j])
        logits = algorithm.outputs(own, x)[:, 0]
        slope = float(((logits.sigmoid() - y) * logits).mean())
        assert rows["PerInvFL-DRO"][f"g{j}"] == pytest.approx(slope, abs=1e-5)
        images.append(torch.stack([image.rot90(4 - j, (1, 2)) for image in x]))
    shared = algorithm.layout("w").leaves(result.server["w"]["loc"])
    turns = [
        float(algorithm.outputs(shared, torch.cat(images).rot90(k, (2, 3))).abs().mean())
        for k in range(4)
    ]
    assert [rows["PerInvFL-DRO"][f"turn{k}"] for k in range(4)] == pytest.approx(turns, abs=1e-5)
    case = bf.data.recoloured(clients, 0.3)
    hits = result.predict(case).summary(case)["accuracy"]
    assert rows["PerInvFL-DRO"]["p0.3"] == pytest.approx(hits, abs=1e-9)
    assert rows["IRM"]["worst"] == min(rows["IRM"][f"p{p}"] for p in example.CASES)
    assert "rate" not in rows["IRM"]


def test_an_image_alone_is_shifted_as_it_is_among_others():
    """By at most two pixels, each image by its own draw; a shift of nothing is among them."""
    example = load("networks")
    x = torch.arange(2 * 16.0).view(2, 1, 4, 4).expand(2, 3, 4, 4)
    torch.manual_seed(0)
    found = {tuple(example.shifted(x)[0, 0].flatten().tolist()) for _ in range(300)}
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2), mode="replicate")[0, 0]
    assert found == {
        tuple(padded[i : i + 4, j : j + 4].flatten().tolist()) for i in range(5) for j in range(5)
    }
    assert example.shifted(x).shape == x.shape


def test_a_frozen_layer_and_its_term():
    """The term begins at zero, is of the rank, and alone is trained."""
    example = load("networks")
    layer = torch.nn.Linear(5, 3)
    adapted = example.Adapted(layer, 2, 0.5)
    x = torch.randn(4, 5)
    assert torch.equal(adapted(x), layer(x))
    assert [name for name, p in adapted.named_parameters() if p.requires_grad] == [
        "lora_A",
        "lora_B",
    ]
    with torch.no_grad():
        adapted.lora_B.normal_()
    term = adapted.lora_B @ adapted.lora_A
    assert torch.linalg.matrix_rank(term) == 2
    torch.testing.assert_close(adapted.eval()(x), layer(x) + x @ term.T)


@pytest.mark.slow
def test_clients_of_networks():
    """Bytes of a camera each, that reach the model as floats; shares of missing pixels; texts as
    int64, whose label comes next.
    """
    example = load("networks")
    images = example.resnet(example.QUICK["resnet"], None).data(0)
    assert images.train.x.dtype == torch.uint8
    x = images.train.client(0)[0]
    assert (x.dtype, x.shape[1:], float(x.min()), float(x.max())) == (
        torch.float32,
        (3, 8, 8),
        0.0,
        1.0,
    )
    assert images.train.client(1)[0].mean() > 0.5 > x.mean()
    both = example.two_inputs(example.QUICK["two_inputs"], None).data(0).train
    shares = [float(both.client(j)[0]["missing"].double().mean()) for j in range(3)]
    assert shares == pytest.approx([0, 0.375, 0.75], abs=0.04)
    texts = example.texts(example.QUICK["transformer"], 0, None, length=32).train
    assert texts.x.dtype == torch.int64
    x, y = texts.client(2)
    assert torch.equal(x[1, 29 - 3 :][:3], x[0, 29:])
    assert any(int(label) in row.tolist() for row, label in zip(x, y, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:predictive_precision is at the (lower|upper) edge",  # as hardly anything is trained
    "ignore:There is a performance drop",  # torch's attention under vmap
)
def test_networks_run(tmp_path, capsys):
    """Every network under its methods at its quick size; frozen norms stay."""
    example = load("networks")
    example.main(["--quick", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert all(f"{part}, Size" in shown for part in example.PARTS)
    for name, size in example.QUICK.items():
        part = example.PARTS[name](size, None)
        assert all(f"\n{title} " in shown for title in (*part.methods, *part.laplace))
    part = example.adapters(example.QUICK["adapters"], None)
    algorithm = part.methods["FedAvg"](part.model(part.data(0), 0))
    assert list(algorithm.blocks) == ["w"]
    assert all("lora" in name or name.startswith("head.") for name in algorithm.layout("w").names)


@pytest.mark.slow
def test_hospitals_run(tmp_path, capsys):
    """On the institutions that ship with lifelines; what a meta-analysis does by its definition."""
    pytest.importorskip("lifelines", reason="lifelines is not installed")
    example = load("hospitals")
    absent = ["--out", str(tmp_path / "out"), "--data-root", str(tmp_path)]
    assert example.main(absent) == 0
    assert sorted(files(tmp_path)) == ["out/lung-cancer-mixed.png", "out/lung-cancer-sums.png"]
    assert "5 of 9" in capsys.readouterr().out
    study = example.lung()
    sites = bf.stats.tables(study.frames, outcome=study.outcome, terms=study.terms)
    fit = bf.stats.glm(sites, family="binomial", intercept="per_site")
    own = [bf.stats.glm(sites.only([f"centre {n}"]), family="binomial") for n in (1, 12, 13, 16, 3)]
    place = own[0].names.index("ecog")
    weight = 1 / torch.stack([one.covariance[place, place] for one in own])
    mean = (weight * torch.stack([one.estimate[place] for one in own])).sum() / weight.sum()
    assert example.meta_analysis(fit, "ecog") == pytest.approx(
        (float(mean), float(weight.sum() ** -0.5), 5), rel=1e-5
    )
