"""Models of `transformers` as networks of one tensor, made on the spot: nothing is downloaded."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayesfl as bf
from bayesfl.data.recipes.torchvision import torchvision

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 3,
    "initializer_range": 0.5,
}


def made(name: str, **config: Any) -> Any:
    """One of its classifiers, of its configuration; imported late, as it takes seconds."""
    torchvision()  # transformers imports it
    import transformers

    of = "Image" if name == "ViT" else "Sequence"
    model = getattr(transformers, f"{name}For{of}Classification")
    return model(getattr(transformers, f"{name}Config")(**config)).eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    return made("Bert", vocab_size=50, max_position_embeddings=16, **SMALL)


def test_tokens_of_any_dtype_give_the_models_own_logits():
    model, tokens = bert(), torch.randint(1, 50, (4, 7))
    for given in (tokens, tokens.double()):
        assert torch.equal(bf.models.logits(model)(given), model(input_ids=tokens).logits)


def test_a_tokenizers_mapping_trains_as_one_tensor_does():
    """Tokens and mask by name, with dropout; the mask is the one that is made of a single
    tensor.
    """
    model = bert().train()
    tokens = torch.randint(1, 50, (30, 6), generator=torch.Generator().manual_seed(1))
    tokens[::3, 4:] = 0
    named = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    ends = []
    for x in (tokens, named):
        data = bf.data.from_arrays(x, tokens[:, 0] % 3, client_ids=[0, 1, 2] * 10)
        method = bf.algorithms.fedavg(bf.models.logits(model), epochs=1, batch_size=5)
        ends.append(
            bf.simulate(method, data, rounds=1, dtype=torch.float64, progress=False).server["w"][
                "loc"
            ]
        )
    assert torch.equal(*ends)


def test_filled_up_rows_give_what_the_short_ones_give():
    """The attention leaves the token `pad_token_id` out, which is 0 here."""
    model, tokens = bert(), torch.randint(1, 50, (4, 7))
    filled = torch.cat([tokens, torch.zeros(4, 5, dtype=torch.long)], dim=1)
    assert_close(bf.models.logits(model)(filled), model(input_ids=tokens).logits, rtol=0, atol=1e-5)
    # So it is the mask that does it.
    assert (model(input_ids=filled).logits - model(input_ids=tokens).logits).abs().max() > 0.01


def test_a_model_without_a_token_for_filling_up_reads_every_position():
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model, tokens = made("GPT2", num_labels=3, **sizes), torch.randint(0, 50, (1, 7))
    assert model.config.pad_token_id is None
    assert torch.equal(bf.models.logits(model)(tokens.float()), model(input_ids=tokens).logits)


def test_images_are_passed_by_their_own_name():
    model = made("ViT", image_size=8, patch_size=4, num_channels=1, **SMALL)
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(bf.models.logits(model)(images), model(pixel_values=images).logits)


def test_it_trains_and_is_equal_by_every_kernel_that_can_run_it():
    """torch.func cannot batch its attention mask: `auto` finds that out, and `vmap` refuses it with
    the remedy.
    """
    tokens = torch.randint(1, 50, (30, 6), generator=torch.Generator().manual_seed(1))
    data = bf.data.from_arrays(tokens, tokens[:, 0] % 3, client_ids=[0, 1, 2] * 10)
    method = bf.algorithms.fedavg(bf.models.logits(bert()), epochs=1, batch_size=5)
    found = {
        kernel: bf.simulate(
            method, data, rounds=2, dtype=torch.float64, engine=bf.Engine(kernel), progress=False
        ).server["w"]["loc"]
        for kernel in ("auto", "live", "reference")
    }
    assert (
        found["auto"] - method.layout("w").ravel(dict(method.model.named_parameters()))
    ).abs().max() > 1e-3
    assert_close(found, dict.fromkeys(found, found["reference"]), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"word_embeddings.*kernel='live' or 'auto'"):
        bf.simulate(method, data, rounds=1, engine=bf.Engine("vmap"), progress=False)


def test_a_model_that_was_not_wrapped_is_refused_with_the_remedy():
    class Answers(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"logits": super().forward(x)}

    data = bf.data.from_arrays(torch.randn(20, 2), torch.arange(20) % 2, client_ids=[0, 1] * 10)
    with pytest.raises(ValueError, match=r"Answers returns a dict.*bf\.models\.logits"):
        bf.simulate(bf.algorithms.fedavg(Answers(2, 2)), data, rounds=1, progress=False)
