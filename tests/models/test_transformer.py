"""The transformer: against torch's own layers with its weights, alone and in a batch, under every
kernel, in training with dropout.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl import models
from bayesfl.data import FederatedData
from bayesfl.optim import SGD, Adam
from tests.cases import run

SMALL: dict[str, Any] = {"outputs": 7, "d": 8, "layers": 2, "heads": 2}


def texts(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 7, (count, 6), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def clients() -> FederatedData:
    """Three clients of texts of six tokens, whose label is the third."""
    xs = [texts(n, n) for n in (20, 31, 12)]
    return bf.data.from_arrays(xs, [x[:, 2] for x in xs], outputs=7)


def of_torch(model: Any, **options: Any) -> nn.Module:
    """torch's encoder with norms before its layers, with the weights of a network of ours."""
    layer = nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    names = {
        "project.": "self_attn.in_proj_",
        "gather.": "self_attn.out_proj.",
        "widen.": "linear1.",
        "narrow.": "linear2.",
    }
    weights = model.body.state_dict()
    for ours, its in names.items():
        weights = {key.replace(ours, its): t for key, t in weights.items()}
    encoder.load_state_dict({key: weights[key] for key in encoder.state_dict()})
    return encoder


def test_it_computes_what_layers_of_torch_do():
    """With norms first, the embeddings of tokens and places added, the last token read."""
    model = models.transformer(6, **SMALL, dropout=0.0, seed=1)
    x = texts(5)
    embedded = model.body.embed.weight[x] + model.body.places.weight  # pyright: ignore[reportAttributeAccessIssue]
    assert_close(model(x), model.head(of_torch(model)(embedded)[:, -1]), atol=1e-6, rtol=1e-6)
    assert_close(model(x.double()), model(x))
    assert models.transformer((6,), outputs=3, tokens=7)(x).shape == (5, 3)
    assert {key.partition(".")[0] for key, _ in model.named_parameters()} == {"body", "head"}
    assert not list(model.buffers())


def test_a_text_alone_has_the_outputs_that_it_has_in_a_batch():
    """In evaluation, without gradients, to rounding; and its later tokens are seen by those before
    them.
    """
    model = models.transformer(6, **SMALL, dropout=0.5).double().eval()
    x = texts(9)
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(one) for one in x.split(1)])
    assert_close(alone, together, atol=1e-12, rtol=1e-12)
    changed = x.clone()
    changed[:, 0] = (x[:, 0] + 1) % 7
    assert (model(changed) - together).abs().max() > 1e-3


def test_what_is_dropped():
    """In training half of every attention, network and sum; in evaluation nothing, as without
    dropout.
    """
    plain, dropping = (models.transformer(6, **SMALL, dropout=rate) for rate in (0.0, 0.5))
    x = texts(4)
    assert torch.equal(plain(x), plain(x))
    assert not torch.allclose(dropping(x), plain(x))
    assert torch.equal(dropping.eval()(x), plain(x))
    assert {part.p for part in dropping.modules() if isinstance(part, nn.Dropout)} == {0.5}
    places: list[tuple[int, ...]] = []
    dropping.train()
    for part in dropping.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(lambda part, args, out: places.append(tuple(args[0].shape)))
    dropping(x)
    # attention, what it gathers, the network's inside, what it gives.
    layer = [(4, 2, 6, 6), (4, 6, 8), (4, 6, 32), (4, 6, 8)]
    assert places == [(4, 6, 8), *layer, *layer]
    # All that layers add is dropped, and the embeddings.
    body = models.transformer(6, **SMALL, dropout=0.999).body
    assert_close(body(texts(50)).abs().sum(1).median(), torch.tensor(0.0))


def test_starts_are_drawn_from_the_seed():
    first, second, other = (
        models.transformer(6, **SMALL, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert_close(first, second, atol=0, rtol=0)
    assert not torch.equal(first["body.embed.weight"], other["body.embed.weight"])
    scaled = models.transformer(6, outputs=400, tokens=7, head_scale=0.01).head.weight
    assert 0.009 < float(scaled.detach().std()) < 0.011
    assert models.transformer(6, outputs=400, tokens=7).body.embed.num_embeddings == 7  # pyright: ignore[reportAttributeAccessIssue]


def test_kernels_agree(clients):
    model = models.transformer(6, **SMALL, dropout=0.0)
    found = [
        run(
            bf.algorithms.fedavg(model, epochs=1, batch_size=8, optimiser=SGD(0.1, momentum=0.9)),
            clients,
            2,
            kernel,
        ).server["w"]["loc"]
        for kernel in ("live", "vmap", "reference")
    ]
    assert_close(found[1:], found[:1] * 2, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
def test_it_trains_with_dropout(clients):
    """The third token is found at last; workers change no bit, and methods with a personal head or
    private norms take it.
    """
    model = models.transformer(6, **SMALL)
    algorithm, by_adam = (
        bf.algorithms.fedavg(model, epochs=epochs, batch_size=8, optimiser=optimiser)
        for epochs, optimiser in ((2, SGD(0.1, momentum=0.9)), (10, Adam(1e-2)))
    )
    first, second = (
        run(algorithm, clients, 2, engine=bf.Engine(workers=workers)).server["w"]["loc"]
        for workers in (1, 2)
    )
    assert torch.equal(first, second)
    done = bf.simulate(by_adam, clients, rounds=8, evaluate_every=None, progress=False)
    assert done.predict(clients.train).summary(clients.train)["accuracy"] > 0.9
    assert set(run(bf.algorithms.fedper(model, epochs=1), clients).private) == {"head"}
    norms = run(bf.algorithms.fedbn(model, epochs=1), clients).private["norms"]["loc"]
    assert norms.shape == (3, 2 * 8 * (2 * 2 + 1))
    assert (
        run(bf.algorithms.pfedvem(model, body_epochs=1, head_epochs=2), clients)
        .predict(draws=2)
        .probs
        is not None
    )


def test_its_curvature(clients):
    """A Laplace approximation of its head gives what that of a linear model of its
    features does.
    """
    model = models.transformer(6, **SMALL, dropout=0.0).double()
    algorithm = bf.algorithms.fedper(model, epochs=1)
    laplace = replace(
        algorithm, predictor=bf.predictors.LinearisedLaplace(block="head", precision=1.0)
    )
    client = run(laplace, clients).client(0)
    x = clients.train.client(0)[0]
    probs = client.predict(x).probs
    own = client.model().double()
    features = own.body(x)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert_close(
        probs,
        bf.posteriors.Laplace.fit(own.head, features, precision=1.0).predict(features)["probs"],
        atol=1e-6,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.transformer((1, 28), outputs=3), "too many values to unpack"),
        (lambda: models.transformer(0, outputs=3), r"inputs .*got 0"),
        (lambda: models.transformer(6, outputs=0), r"outputs .*1.* got 0"),
        (lambda: models.transformer(6, outputs=3, tokens=0), r"tokens .*1.* got 0"),
        (lambda: models.transformer(6, outputs=3, d=6.5), r"d .*got 6\.5"),  # pyright: ignore[reportArgumentType]
        (lambda: models.transformer(6, outputs=3, layers=0), r"layers .*1.* got 0"),
        (lambda: models.transformer(6, outputs=3, heads=0), r"heads .*1.* got 0"),
        (lambda: models.transformer(6, outputs=3, dropout=1.0), r"dropout .*\[0, 1\), got 1\.0"),
        (lambda: models.transformer(6, outputs=3, dropout=-0.1), r"dropout .*got -0\.1"),
        (lambda: models.transformer(6, outputs=3, dropout="0.1"), r"dropout .*got '0\.1'"),  # pyright: ignore[reportArgumentType]
        (
            lambda: models.transformer(6, outputs=3, head_scale=0.0),
            r"head_scale .*> 0 .*got 0\.0",
        ),
    ],
)
def test_sizes_that_are_none(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Masked(nn.Module):
    """Torch's encoder over texts of several lengths, whose mean takes filled-up places in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(7, 8), nn.Linear(8, 3)
        self.inner = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.embed(ids), src_key_padding_mask=~mask).mean(1))


def test_torchs_encoder_predicts_as_it_is_trained():
    """Without gradients torch puts 0 at masked places, unless it is told not to; then the two are
    another network.
    """
    ids = texts(60).numpy()
    mask = np.arange(6) < 2 + ids[:, :1] % 4
    data = bf.data.from_arrays(
        {"ids": ids, "mask": mask}, ids[:, 0] % 3, client_ids=np.arange(60) % 2
    )
    result = bf.simulate(bf.algorithms.fedavg(Masked(), epochs=2), data, rounds=2, progress=False)
    x, wanted = data.test.client(0)[0], result.predict().client(0).probs
    module = result.model()
    with torch.no_grad():
        still = module(**x).softmax(-1)
    found = [module(**x).softmax(-1).detach(), still, result.client(0).predict({**x}).probs]
    assert_close(found, [wanted] * 3, atol=1e-6, rtol=0)
