"""Plain torch code whose random draws have addresses: no generator goes on from one call to the
next, in whatever thread it runs.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MASK = 2**64 - 1
_HERE = threading.local()


class Addressed(TorchDispatchMode):
    """A context in which every random operation of torch draws from a generator of its own, seeded
    by a key and the number of draws before.

    It holds in the thread that enters it. A context made anew with the same key repeats the draws.

    Args:
        key: A number of 64 bits, as `random.key` gives it for an address.
        start: Number of draws that are passed over, of code at the same address that runs before.

    Raises:
        ValueError: An operation cannot be given a generator, or has been given one by the code that
            calls it.
    """

    def __init__(self, key: int, start: int = 0) -> None:
        super().__init__()
        self._key, self._start = key, start
        self.drawn = start

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out a guard against compilation around every operation, which takes as long as all
        else here.
        """
        return False

    def restart(self) -> None:
        """Let the draws begin anew, for code that runs several times with the same ones."""
        self.drawn = self._start

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
            raise ValueError(
                f"{func} is called with a generator of its own, which no seed of a run repeats; "
                "leave generator= out"
            )
        named = {name: value for name, value in named.items() if name != "generator"}
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **named)
        drawing = _with_generator(func)
        if drawing is None:
            raise ValueError(
                f"{func} draws random numbers and takes no generator, so that no seed repeats it; "
                "use another operation"
            )
        device = named.get("device") or next(
            (a.device for a in args if isinstance(a, Tensor)), "cpu"
        )
        return drawing(*args, **named, generator=self._generator(torch.device(device)))

    def _generator(self, device: torch.device) -> torch.Generator:
        self.drawn += 1
        return torch.Generator(device).manual_seed(_mixed(self._key + self.drawn))

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Compute `native_dropout`, which torch gives no generator."""
        kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(
            1 - p, generator=self._generator(x.device)
        )
        return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


@contextlib.contextmanager
def at_address(key: int, start: int = 0) -> Iterator[None]:
    """Enter a context in which `drawing` gives this thread one `Addressed` of these arguments, so
    that it covers no more than it must.
    """
    before, _HERE.mode = getattr(_HERE, "mode", None), Addressed(key, start)
    try:
        yield
    finally:
        _HERE.mode = before


def drawing() -> AbstractContextManager[Any]:
    """Return the context in which code of the user's draws at the address of `at_address`, or does
    nothing, where there is none.

    Each time it is asked for, the draws begin anew.
    """
    mode: Addressed | None = getattr(_HERE, "mode", None)
    if mode is None:
        return nullcontext()
    mode.restart()
    return mode


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _idle(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Say whether an operation that may draw does not: its rate of dropout is 0, or it is not in
    training.
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
    """Return the overload of an operation that takes a generator, itself or another of the same
    arguments; None if there is none.
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
    """Mix a number's bits (splitmix64), so that neighbouring numbers seed unlike generators."""
    word = (word * 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
