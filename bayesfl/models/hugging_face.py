"""Hugging Face's models as networks that return their logits."""

from typing import Any

from torch import Tensor, nn


class _Logits(nn.Module):
    """A network that calls a model of `transformers` on one tensor, or on several by name, and
    returns its logits.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._input = str(getattr(model, "main_input_name", "input_ids"))
        self._pad = getattr(getattr(model, "config", None), "pad_token_id", None)

    def forward(self, x: Tensor | None = None, **named: Tensor) -> Tensor:
        """Compute logits [B, O] of T tokens by number, [B, T], whole numbers of any dtype, or of
        the model's own input, such as images.

        Inputs by name are passed on as they are.
        """
        if x is None:
            return self.model(**named).logits
        if self._input != "input_ids":
            return self.model(**{self._input: x}).logits
        tokens = x.long()
        options: dict[str, Any] = (
            {} if self._pad is None else {"attention_mask": (tokens != self._pad).long()}
        )
        return self.model(input_ids=tokens, **options).logits


def logits(model: nn.Module) -> nn.Module:
    """Wrap a model of Hugging Face's `transformers`, such as a sequence or an image classifier, so
    that it returns its logits.

    Inputs are a mapping, as a tokenizer gives it, or one tensor. Models of text take the tokens'
    numbers then, [B, T]; rows are filled up to one length, T tokens, with the token
    `model.config.pad_token_id`, which the attention then leaves out. Where the model has no such
    token, every position counts. Other models take their `main_input_name`, such as `pixel_values`
    [B, 3, height, width]. The parameters keep their names, with `model.` before them.

    A model from `from_pretrained` is in evaluation mode, and trains without dropout until
    `model.train()` is called. One built from a configuration is in training mode.

    Args:
        model: The model; its outputs have an attribute `logits`, [B, O].

    Example:
        >>> from types import SimpleNamespace
        >>> class Classifier(nn.Module):  # stands for one of the classes of transformers
        ...     def forward(self, input_ids):
        ...         return SimpleNamespace(logits=torch.zeros(len(input_ids), 2))
        >>> bf.models.logits(Classifier())(torch.zeros(3, 7)).shape
        torch.Size([3, 2])
    """
    return _Logits(model)
