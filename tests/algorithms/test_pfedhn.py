"""pFedHN on linear regressions, against a plain loop over torch's own layers."""

from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data import FederatedData
from bayesfl.likelihoods import Gaussian
from bayesfl.optim import SGD
from tests.algorithms.made import COUNTS, DIM, linear_only, moments
from tests.cases import run

STEPS, RATE = 3, 0.1


class Plain(nn.Module):
    """The hypernetwork, from the server's state."""

    def __init__(self, hyper: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(hyper["v"].clone(), freeze=False)
        count = len(hyper) // 2
        parts: list[nn.Module] = []
        for k in range(count):
            weight, bias = hyper[f"weight{k}"], hyper[f"bias{k}"]
            layer = nn.Linear(*reversed(weight.shape), dtype=torch.float64)
            layer.load_state_dict({"weight": weight.clone(), "bias": bias.clone()})
            parts += [layer, *([nn.ReLU()] if k < count - 2 else [])]
        self.make = nn.Sequential(*parts)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.make(self.embed(ids))


def method(clip: float) -> bf.Algorithm:
    return bf.algorithms.pfedhn(
        linear_only(torch.full((1, DIM), 0.4)),
        embedding=4,
        hidden=6,
        layers=3,
        steps=STEPS,
        batch_size=None,
        optimiser=SGD(RATE),
        server_optimiser=SGD(0.2, momentum=0.9, weight_decay=0.1),
        clip=clip,
        likelihood=Gaussian(),
    )


def test_the_server_steps_along_the_cohorts_mean(regressions: FederatedData):
    """Two rounds, of which clipping shortens every gradient in the second case."""
    a, b = moments(regressions)
    for clip in (1e6, 0.05):
        algorithm = method(clip)
        plain = Plain(algorithm.init(len(COUNTS), dtype=torch.float64)["hyper"])
        steps = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
        for _ in range(2):
            sent = plain(torch.arange(len(COUNTS)))
            came = sent.detach().clone()
            for j, n in enumerate(COUNTS):
                for _ in range(STEPS):
                    came[j] -= RATE * (a[j] @ came[j] - b[j]) / n
            steps.zero_grad()
            sent.backward((sent.detach() - came) / len(COUNTS))
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
            steps.step()
        found = run(algorithm, regressions, rounds=2).server
        assert_close(found["hyper"]["v"], plain.embed.weight.detach(), atol=1e-7, rtol=0)
        last = found["hyper"]["weight3"]
        assert_close(last, plain.make[-1].weight.detach(), atol=1e-7, rtol=0)
        common = plain.make(plain.embed.weight.mean(0)).detach()
        assert_close(found["w"]["loc"], common, atol=1e-7, rtol=0)
