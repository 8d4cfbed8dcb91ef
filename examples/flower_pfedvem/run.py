"""pFedVEM over a network with TLS and authenticated nodes, on this machine, and beside it the same
as a simulation.

    pip install 'bayesfl[flower]'
    python examples/flower_pfedvem/run.py [--rounds 3] [--out runs/flower]

Makes certificates and node keys, starts a SuperLink and two SuperNodes on loopback, runs the app in
this folder, prints its history, compares the server and every client's predictions with those of a
simulation, and stops everything that it started.
"""

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from flower_pfedvem.task import federation, method  # noqa: E402 (after the path is set)
from loopback import network  # noqa: E402 (after the path is set)

import bayesfl as bf  # noqa: E402 (after the path is set)
from bayesfl.base.trees import flatten  # noqa: E402 (after the path is set)
from bayesfl.federation.store import files  # noqa: E402 (after the path is set)
from bayesfl.flower import load  # noqa: E402 (after the path is set)

CLIENTS = 2


def main() -> None:
    """Runs the federation twice, over the network and in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds in all (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/flower"), help="a new folder (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(
            f"--out must be a new folder, and {arguments.out} holds something; give another, or "
            "delete it"
        )
    folder = arguments.out.absolute() / "server"
    with network(arguments.out, CLIENTS) as loopback:
        print(
            f"SuperLink on 127.0.0.1:{loopback.port}, {CLIENTS} nodes; logs in {arguments.out}",
            flush=True,
        )
        run = loopback.submit(
            HERE, clients=CLIENTS, rounds=arguments.rounds, checkpoint=str(folder)
        )
        ended = loopback.finish(run)
        print(f"run {run}: {ended}", flush=True)
        (arguments.out / "server.log").write_text(loopback.said(run))
        if ended != "finished:completed":
            raise SystemExit(f"the run failed; see {arguments.out / 'server.log'}")
    algorithm = method()
    found = load(folder, algorithm)
    columns = (
        "round",
        "cohort",
        "seconds",
        "train_nll",
        "personal_accuracy",
        "personal_nll",
        "personal_ece",
    )
    print("  ".join(f"{column:>17}" for column in columns))
    for row in found.history:
        print(
            "  ".join(f"{row[column]:>17.4g}" if column in row else " " * 17 for column in columns)
        )
    clients = federation(CLIENTS)
    told = bf.simulate(
        algorithm, clients, rounds=arguments.rounds, seed=0, evaluate_every=None, progress=False
    )
    server = _largest(flatten(found.server), flatten(told.server))
    expected = told.predict()
    probs = 0.0
    for client in range(CLIENTS):
        file = (
            arguments.out
            / "states"
            / f"client-{client}"
            / found.experiment
            / f"client-{client}"
            / "predictions.safetensors"
        )
        predicted = files.read_file(file, files.NODE)["predictions"]
        probs = max(
            probs, _largest({"probs": predicted["probs"]}, {"probs": expected.client(client).probs})
        )
    print(
        f"largest difference to the simulation: server {server:.2g}, class probabilities "
        f"{probs:.2g} (float32)"
    )


def _largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


if __name__ == "__main__":
    main()
