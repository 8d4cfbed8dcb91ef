"""Calibrate a federation of hospitals, audit its promises, and watch what comes after: by client,
with exact intervals and an alarm.

    # four hospitals, heart disease yes or no; the data are read from BAYESFL_DATA:
    python examples/promises.py
    # handwritten digits of six clients, which need no file:
    python examples/promises.py --data digits

Every client holds back a part of its rows: `validation` for a temperature and a bias, `calibration`
for sets. The script prints

- the measures before and after;
- the audit of the test rows by client;
- for every client's model the evidence of its alarm on its own test rows, and on all rows that each
  other client holds back, not all of which raise it; few calibration rows make an alarm slow.

Tables and figures are written into a run folder.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import bayesfl as bf
from bayesfl.base.files import atomic_path, atomic_write
from bayesfl.data import FederatedData
from bayesfl.evaluation.calibration import Bias, Conformal, Temperature
from bayesfl.federation.run.result import Result

HELD_BACK = {"validation": 0.15, "calibration": 0.4}


def federation(options: argparse.Namespace) -> FederatedData:
    """The clients."""
    if options.data == "heart":
        return bf.data.heart_disease(root=options.data_root, seed=options.seed, **HELD_BACK)
    return bf.data.dirichlet("digits", clients=6, alpha=0.3, seed=options.seed, **HELD_BACK)


def calibrated(clients: FederatedData, options: argparse.Namespace) -> tuple[Result, Result]:
    """Ditto as it was trained, and with its steps of calibration, whose sums are secure."""
    model = bf.models.mlp(clients.inputs, hidden=16, outputs=clients.outputs, seed=options.seed)
    method = bf.algorithms.ditto(model, epochs=2, batch_size=16)
    result = bf.simulate(
        method, clients, rounds=options.rounds, seed=options.seed, evaluate_every=None
    )
    steps = Temperature(), Bias(), Conformal(level=options.level)
    return result, result.calibrate(*steps, aggregation=bf.SecureSum())


def rows(
    clients: FederatedData, place: int, splits: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a client in some splits, one after the other."""
    x, y = zip(*(clients.splits[name].client(place, raw=True) for name in splits), strict=True)
    return torch.cat(x), torch.cat(y)


def main() -> None:
    """Runs, prints, and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        choices=("heart", "digits"),
        default="heart",
        help="the federation (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds of training (default: %(default)s)"
    )
    parser.add_argument(
        "--level",
        type=float,
        default=0.9,
        help="probability that a set is to hold the truth (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of partition and run (default: %(default)s)"
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        default=None,
        help="folder of the data (default: BAYESFL_DATA, else the user's cache)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/promises"),
        help="folder of tables and figures (default: %(default)s)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    clients = federation(options)
    result, served = calibrated(clients, options)
    lines = [str(clients)]
    for name, one in (("as trained", result), ("calibrated", served)):
        found = one.predict().summary(clients.test)
        lines.append(
            f"{name}: accuracy {found['accuracy']:.3f}, NLL {found['nll']:.3f}, ECE "
            f"{found['ece']:.3f}"
        )
    audit = served.audit()
    lines += [
        "",
        str(audit),
        "",
        "last evidence on the rows of (column) by the alarm of (row), * where it ever reached 20:",
    ]
    names, watches = clients.client_names, {}
    lines.append(" " * 14 + "".join(f"{name[:12]:>14}" for name in names))
    for home in names:
        model, cells = served.client(home), []
        for place, where in enumerate(names):
            watch = model.alarm().see(
                model.scores(
                    *rows(clients, place, ["test"] if where == home else ["test", *HELD_BACK])
                )
            )
            watches[home, where] = watch
            cells.append(f"{watch.evidence:.3g}{'*' if watch.raised else ' '}")
        lines.append(f"{home[:14]:14}" + "".join(f"{cell:>14}" for cell in cells))
    text = "\n".join(lines)
    print(text)
    atomic_write(options.out / "promises.txt", text + "\n")
    first = names[0]
    shown = {}
    for where in names:
        seen = watches[first, where].history
        name = f"{first}'s own" if where == first else f"{where}'s"
        shown[name] = {"row": range(1, len(seen) + 1), "evidence": seen}
    title = f"the alarm of {first}"
    evidence = bf.plots.learning_curves(shown, metric="evidence", x="row", title=title)
    evidence.axes[0].set_yscale("log")
    evidence.axes[0].axhline(1 / watches[first, first].delta, linestyle="--", color="0.2")
    for name, figure in (
        ("coverage.png", bf.plots.coverage(audit)),
        ("evidence.png", evidence),
    ):
        with atomic_path(options.out / name) as temporary:
            figure.savefig(temporary)
    print(f"\ntables and figures are in {options.out}")


if __name__ == "__main__":
    main()
