"""Three regressions over three hospitals, each with a CSV file of its own, over a network with TLS
and authenticated nodes on this machine, and beside it the same as a simulation.

    pip install 'bayesfl[flower]'
    python examples/flower_hospitals/run.py [--out runs/hospitals]

Makes the files of made-up patients, starts a SuperLink and three SuperNodes on loopback, runs the
app in this folder, prints what it has found, compares it with the simulation, and stops everything
that it started.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "flower_pfedvem")]

from made_up import PATIENTS, network_of  # noqa: E402 (likewise)
from regressions.analysis import analysis  # noqa: E402 (after the path is set)
from regressions.site import tables  # noqa: E402 (likewise)

from bayesfl.stats import Policy  # noqa: E402 (likewise)


def same_digits(found: Path, wanted: Path) -> bool:
    """Return whether the tables of two folders of results are the same, digit for digit."""
    names = ("glm.csv", "cox.csv", "mixed.csv")
    return all((found / name).read_text() == (wanted / name).read_text() for name in names)


def main() -> None:
    """Runs the analysis twice, over the network and in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/hospitals"),
        help="a new folder (default: %(default)s)",
    )
    out = parser.parse_args().out.absolute()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out must be a new folder, and {out} holds something; give another")
    with network_of(out) as loopback:
        print(
            f"SuperLink on 127.0.0.1:{loopback.port}, {len(PATIENTS)} nodes; logs in {out}",
            flush=True,
        )
        run = loopback.submit(HERE, out=str(out / "network"))
        ended = loopback.finish(run, seconds=600.0)
        print(f"run {run}: {ended}", flush=True)
        (out / "server.log").write_text(loopback.said(run))
        if ended != "finished:completed":
            raise SystemExit(f"the run failed; see {out / 'server.log'}")
    files = {name: str(out / "data" / f"{name}.csv") for name in PATIENTS}
    here = tables(files, Policy.read(HERE / "policy.toml"))
    analysis(here, out / "here")
    same = same_digits(out / "network", out / "here")
    print(f"the network's tables are the simulation's, digit for digit: {same}")


if __name__ == "__main__":
    main()
