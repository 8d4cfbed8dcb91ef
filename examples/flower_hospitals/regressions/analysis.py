"""What is asked: a logistic regression with an intercept for each hospital, Cox's with one baseline
hazard, and a mixed one whose effect of treatment differs between hospitals.
"""

from pathlib import Path

import bayesfl as bf
from bayesfl.stats.asking import Sites


def analysis(sites: Sites, out: Path, *, exact_times: bool = False) -> None:
    """Fit, print, and store tables and the sheets of what left each hospital. With `exact_times`
    Cox's regression asks for the days of deaths, which the hospitals' policy refuses.
    """
    out.mkdir(parents=True, exist_ok=True)
    fits = {
        "glm": bf.stats.glm(sites, family="binomial", intercept="per_site"),
        "cox": bf.stats.cox(sites, time="months", event="died", exact_times=exact_times),
        "mixed": bf.stats.mixed(sites, family="binomial", random=["1", "treated"]),
    }
    for name, fit in fits.items():
        print(fit, end="\n\n", flush=True)
        fit.table().to_csv(out / f"{name}.csv")
        (out / f"{name}-released.json").write_text(fit.released.to_json())
