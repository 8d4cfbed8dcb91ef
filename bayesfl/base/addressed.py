"""Plain torch code whose random draws depend on an address only: no generator carries over from one
call to the next, in any thread.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASK = 2**64 - 1


class Addressed(TorchDispatchMode):
    """Draw every random operation of torch from its own generator, seeded by a key and the number
    of earlier draws.

    The context applies to the thread that enters it. A new context with the same key repeats the
    draws.

    Args:
        key: An integer of 64 bits, as `random.key` returns for an address.
        start: Number of draws to skip, because code at the same address makes them first.

    Raises:
        ValueError: An operation accepts no generator, or the calling code passes one.
    """

    def __init__(self, key: int, start: int = 0) -> None:
        super().__init__()
        self._key = key
        self.drawn = start

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip a guard against compilation around every operation, which takes as long as the
        whole rest.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if not _may_draw(func) or _idle(func, args, named):
            return func(*args, **named)
        if named.get("generator") is not None:
            return self._given(func, args, named)
        named = {name: value for name, value in named.items() if name != "generator"}
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **named)
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].copy_(self._kept(args[0], *args[1:], **named))
        drawing = _with_generator(func)
        if drawing is None:
            raise ValueError(
                f"{func} draws random numbers and accepts no generator, so no seed can repeat it; "
                "use another operation"
            )
        device = named.get("device") or next(
            (a.device for a in args if isinstance(a, Tensor)), "cpu"
        )
        return drawing(*args, **named, generator=self._generator(torch.device(device)))

    def _given(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        raise ValueError(
            f"{func} is called with its own generator, which no seed of a run repeats; "
            "leave generator= out"
        )

    def _generator(self, device: torch.device) -> torch.Generator:
        self.drawn += 1
        return torch.Generator(device).manual_seed(_mixed(self._key + self.drawn))

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Compute `native_dropout`, which accepts no generator in torch."""
        kept = self._kept(x, 1 - p)
        return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept

    def _kept(self, like: Tensor, p: float = 0.5) -> Tensor:
        self.drawn += 1
        return bernoulli([self._key], self.drawn - 1, like.shape, p, like.device)[0]


class Seeded(Addressed):
    """Draw every random operation of torch that is called without a generator from one generator
    for each device, seeded by `seed`.

    The numbers are those after `torch.manual_seed(seed)`. The generators that all threads share are
    neither read nor changed, and code in the block that seeds them has no effect.

    Args:
        seed: An integer of 64 bits.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._generators: dict[torch.device, torch.Generator] = {}

    def _given(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        return func(*args, **named)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._key)
        return self._generators[device]

    def _kept(self, like: Tensor, p: float = 0.5) -> Tensor:
        return torch.empty_like(like).bernoulli_(p, generator=self._generator(like.device))


def bernoulli(
    keys: Sequence[int], draw: int, shape: Sequence[int], p: float, device: torch.device
) -> Tensor:
    """Return the dropout masks that `bernoulli_(p)` would draw in each of C contexts
    `Addressed(key)`, bool [C, *shape].

    An entry is a hash of the context's key, the draw and its position, so all entries are computed
    at once, with the same result on every device. The hash is two rounds of a mixer of 32 bits in
    which every input bit changes each output bit with probability near 1/2 (Wellons, "Prospecting
    for hash functions", 2018).
    """
    words = torch.tensor([_signed(_mixed(key + draw + 1), 64) for key in keys])
    low, high = words.view(-1, 1).view(torch.int32).to(device).split(1, 1)
    place = torch.arange(math.prod(shape), dtype=torch.int32, device=device)
    hashed = _stirred(_stirred(place ^ low).add_(high))
    limit = min(round(p * 2**32) - 2**31, 2**31 - 1)
    return (hashed < limit).view(len(keys), *shape)


def _stirred(words: Tensor) -> Tensor:
    """Return words of 32 bits mixed, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words ^= (words >> shift) & (2 ** (32 - shift) - 1)  # a shift that brings in zeros
        words *= _signed(factor, 32)
    words ^= (words >> 16) & 0xFFFF
    return words


def _signed(word: int, bits: int) -> int:
    """Return the signed integer with the same bits as a word."""
    return word - 2**bits if word >= 2 ** (bits - 1) else word


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _idle(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether an operation that may draw does not draw: its dropout rate is 0, or it is not
    in training.
    """
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given = {
        **defaults,
        **dict(zip((a.name for a in func._schema.arguments), args, strict=False)),
        **named,
    }
    rates = [
        given[name]
        for name in ("dropout_p", "dropout", "p")
        if isinstance(given.get(name), int | float)
    ]
    off = any(given.get(name) is False for name in ("train", "training"))
    return off or (_with_generator(func) is None and bool(rates) and not any(rates))


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of an operation that accepts a generator and has the same arguments; None
    if there is none.
    """
    own = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in [
        func,
        *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()),
    ]:
        arguments = [(a.name, str(a.type)) for a in overload._schema.arguments]
        without = [a for a in arguments if a[0] != "generator"]
        if len(without) < len(arguments) and without == [a for a in own if a[0] != "generator"]:
            return overload
    return None


def _mixed(word: int) -> int:
    """Mix a number's bits (splitmix64), so that neighbouring numbers give unrelated seeds."""
    word = (word * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
