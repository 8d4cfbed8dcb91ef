"""The same run twice: simulated, and over a network of processes with TLS on this machine.

    python benchmarks/network.py [--quick] [--figure]

Runs the app of examples/flower_pfedvem with four nodes, and its method on the same data as a
simulation, both evaluated after every round. Results: benchmarks/results/network.json, and the
README's picture, docs/images/readme.png, whose other half is of benchmarks/results/truth.json
(--figure draws it from the results that are there).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import script

import bayesfl as bf
from bayesfl.evaluation.history import History
from bayesfl.evaluation.plots.look import BLUE, GREY, INK, OKABE_ITO, clean, new_figure
from bayesfl.flower import load

APP = script.ROOT / "examples" / "flower_pfedvem"
sys.path.insert(0, str(APP))

from flower_pfedvem.task import federation, method  # noqa: E402 (after the path is set)
from loopback import network  # noqa: E402 (after the path is set)

CLIENTS, ROUNDS = 4, 10
MEASURES = ("train_nll", "personal_accuracy", "personal_nll")
WAYS = {
    "exact posterior": "exact posterior",
    "bf.stats.mixed": "bf.stats.mixed",
    "fedavg, heads": "result.heads()",
    "pfedmap, Laplace of heads": "pFedMAP + Laplace",
    "pfedvem": "pFedVEM",
    "pfedvem_held": "pFedVEM, scales held",
}
"""What the picture shows of the truth test, and how it is called there."""


def over_a_network(folder: Path, clients: int, rounds: int) -> dict[str, list[float]]:
    """Return measures by round of a run over a network, which keeps its files in a folder."""
    with network(folder, clients) as loopback:
        run = loopback.submit(
            APP, clients=clients, rounds=rounds, evaluate_every=1, checkpoint=str(folder / "server")
        )
        ended = loopback.finish(run, seconds=3600)
        if ended != "finished:completed":
            raise RuntimeError(f"the run ended as {ended}:\n{loopback.said(run)}")
    return by_round(load(folder / "server", method()).history)


def simulated(clients: int, rounds: int) -> dict[str, list[float]]:
    """Return measures by round of the same run as a simulation."""
    result = bf.simulate(
        method(), federation(clients), rounds=rounds, seed=0, evaluate_every=1, progress=False
    )
    return by_round(result.history)


def by_round(history: History) -> dict[str, list[float]]:
    """Return measures, [rounds] each."""
    return {name: history[name].tolist() for name in MEASURES}


def draw(twice: dict[str, Any], truth: dict[str, Any]) -> None:
    """Draw how often intervals hold beside the same run twice."""
    figure = new_figure((9.0, 3.4))
    ours, same = figure.subplots(1, 2, width_ratios=(1.15, 1))
    ours.axvline(0.9, color=INK, linewidth=1, linestyle=":")
    ours.text(0.89, -0.75, "promised: 90 %", ha="right", va="center", fontsize="small")
    for place, way in enumerate(WAYS):
        for shift, problem, colour in ((-0.14, "linear", BLUE), (0.14, "logistic", OKABE_ITO[1])):
            cell = truth["cells"].get(f"{problem}/{way}")
            if cell is None:
                continue
            share, error = cell["coverage"]["90"]
            ours.errorbar(
                share,
                place + shift,
                xerr=1.96 * error,
                fmt="o" if problem == "linear" else "s",
                color=colour,
                markersize=5,
                label=f"{problem} regression" if place == 1 else None,
            )
    ours.set_yticks(range(len(WAYS)), list(WAYS.values()))
    ours.set(xlim=(0.28, 1.0), ylim=(len(WAYS) - 0.5, -1.1))
    ours.set_xticks([0.3, 0.5, 0.7, 0.9], ["30 %", "50 %", "70 %", "90 %"])
    ours.set_title("How often 90 % intervals hold, by method", fontsize="medium", loc="left")
    ours.legend(loc="upper left", frameon=False, fontsize="small")
    rounds = range(1, len(twice["simulated"]["personal_nll"]) + 1)
    same.plot(
        rounds, twice["simulated"]["personal_nll"], color=GREY, linewidth=7, alpha=0.45,
        solid_capstyle="round", label="in a notebook",
    )  # fmt: skip
    same.plot(
        rounds, twice["network"]["personal_nll"], "o-", color=BLUE, markersize=3.5, linewidth=1.2,
        label="over Flower, four processes, TLS",
    )  # fmt: skip
    same.set(xlabel="round", ylabel="test NLL, clients' mean (nats)", ylim=(0, None))
    same.set_xticks([1, *range(5, len(rounds) + 1, 5)])
    same.set_title("The same run, simulated and deployed", fontsize="medium", loc="left")
    same.legend(loc="upper right", frameon=False, fontsize="small")
    for ax in (ours, same):
        clean(ax, grid="y" if ax is same else None)
    script.write_figure("readme", figure)


def main() -> None:
    """Runs both, prints their largest difference, and writes the results."""
    given = script.arguments(__doc__, figure=script.FIGURE)
    if not given.figure:
        clients, rounds, made = (2, 2, None) if given.quick else (CLIENTS, ROUNDS, script.made())
        with tempfile.TemporaryDirectory() as folder:
            found = {
                "network": over_a_network(Path(folder), clients, rounds),
                "simulated": simulated(clients, rounds),
            }
        for name in MEASURES:
            pairs = zip(found["network"][name], found["simulated"][name], strict=True)
            print(f"{name}: at most {max(abs(a - b) for a, b in pairs):.2g} apart")
        if given.quick:
            return
        script.write("network", **made, clients=clients, rounds=rounds, **found)
    draw(script.saved("network"), script.saved("truth"))


if __name__ == "__main__":
    main()
