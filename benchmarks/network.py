"""The same run twice: simulated, and over a network of processes with TLS on this machine.

    python benchmarks/network.py [--quick] [--figure]

Runs the app of examples/flower_pfedvem with four nodes, and its method on the same data as a
simulation, both evaluated after every round. Results: benchmarks/results/network.json, and
docs/images/network.png (--figure draws it from the results that are there).
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import script

import bayesfl as bf
from bayesfl.evaluation.history import History
from bayesfl.evaluation.plots.look import BLUE, GREY, clean, new_figure
from bayesfl.flower import load

APP = script.ROOT / "examples" / "flower_pfedvem"
sys.path.insert(0, str(APP))

from flower_pfedvem.task import federation, method  # noqa: E402 (after the path is set)
from loopback import network  # noqa: E402 (after the path is set)

CLIENTS, ROUNDS = 4, 10
MEASURES = ("train_nll", "personal_accuracy", "personal_nll")


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


def draw(twice: dict[str, Any]) -> None:
    """Draw the same run twice."""
    figure = new_figure((5.6, 3.2))
    same = figure.subplots()
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
    clean(same, grid="y")
    script.write_figure("network", figure)


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
    draw(script.saved("network"))


if __name__ == "__main__":
    main()
