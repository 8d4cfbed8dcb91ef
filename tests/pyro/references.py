"""Means and standard deviations of the ten models by Pyro's own NUTS on the pooled rows.

`python -m tests.pyro.references [NAME ...]` writes references.json anew; it takes an hour.
"""

import json
import sys
from pathlib import Path

import torch
from pyro.infer import MCMC, NUTS

from tests.pyro.models import MODELS, pooled

PATH = Path(__file__).with_name("references.json")


def main(names: list[str]) -> None:
    """Sample four chains of each model."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name in names or MODELS:
        model, shared, rows = MODELS[name]
        rows = {
            site: tuple(
                t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in of
            )
            for site, of in rows.items()
        }
        # made anew, as priors in a module keep the dtype of their time
        model = type(model)() if isinstance(model, torch.nn.Module) else model
        torch.manual_seed(0)
        kernel = NUTS(
            pooled(model, rows, shared),
            target_accept_prob=0.9,
            jit_compile=True,
            ignore_jit_warnings=True,
        )
        chains = MCMC(kernel, num_samples=4000, warmup_steps=1000, disable_progbar=True)
        chains.run()
        found = {
            key: {"mean": t.mean(0).tolist(), "sd": t.std(0).tolist()}
            for key, t in chains.get_samples().items()
        }
        known = json.loads(PATH.read_text()) if PATH.exists() else {}
        PATH.write_text(json.dumps(known | {name: found}, indent=1))
        print(
            name,
            {k: float(v["n_eff"].min()) for k, v in chains.diagnostics().items() if "n_eff" in v},
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
