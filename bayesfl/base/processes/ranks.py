"""The processes of one run, its ranks: every rank runs the same program and computes some of the
chunks of clients.

Ranks send each other tensors of bytes with gloo. Each rank sends signs of life from a separate
thread; if a rank sends none, or ends, the run ends at all ranks.
"""

import atexit
import itertools
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesfl.base.processes.packing import OWN, packed, unpacked

T = TypeVar("T")
SIGN = 5.0
"""Seconds between two signs of life."""
LIMIT = 60.0
"""Seconds without a sign of life after which a rank counts as lost."""
START = timedelta(minutes=30)
"""Maximum time that a rank waits for the others to start."""
FOREVER = timedelta(days=20)
"""Maximum time that a rank waits for another that sends signs of life."""
FEW = 10
"""Maximum number of clients that a message names."""
AROUND = "bayesfl.base."
"""Modules of functions that wrap a user's call; they are skipped when the call is named."""
ENDED = "ended"
"""The last sign of life of a rank that has ended normally."""
FOLDER, LOCK = "bayesfl-ranks-", "lock"
"""Start of the names of folders with shared memory, and the file in each that its owner locks."""
OF_PROCESS = "BAYESFL_RANK_OF"
"""Environment variable with the id of the process that is a rank; its children are not ranks."""


class LostRankError(RuntimeError):
    """Raised when a rank has ended, or makes another call than the others."""


class Alone:
    """Represent the only process of a run without ranks; defines the interface of `Ranks`.

    Attributes:
        rank: The number of this process, from 0.
        size: Number of processes.
        near: Number of processes on each machine.
        limit: Seconds without a sign of life after which a rank counts as lost.
        compares: Whether the processes must compare their arguments, as each makes its own.
    """

    rank, size, near, limit = 0, 1, 1, LIMIT
    compares = False

    def every(self, make: Callable[[], T]) -> list[T]:
        """Return the results of `make` at all ranks, in their order; an error at one is raised at
        all.

        Raises:
            LostRankError: A rank has ended, or makes another call.
        """
        return [make()]

    def relay(self, state: T, step: Callable[[T], T]) -> T:
        """Pass a state through `step` at one rank after another, and return the final state.

        Args:
            state: The initial state, from rank 0.
            step: Function that runs at each rank on the state from the rank before.

        Raises:
            LostRankError: See `every`.
        """
        return step(state)

    def dealt(self, costs: Sequence[float], rank: int | None = None) -> slice:
        """Return the chunks that a rank computes, as a contiguous slice.

        Args:
            costs: The time that each chunk takes, in any unit.
            rank: The rank; None for this one.
        """
        return slice(0, len(costs))

    def copied(self, tree: T) -> T:
        """Return a copy of a nest of tensors; on CPUs the ranks of one machine share one copy in
        mapped memory.
        """
        return tree_map_only(Tensor, torch.clone, tree)

    def shares(self, device: torch.device) -> bool:
        """Return whether the ranks share the memory of such a copy."""
        return True

    def hold(self, held: Callable[[int], list[str]]) -> None:
        """Set the function that lists the clients of a rank, for a message about its loss."""


class Ranks(Alone):
    """Represent the ranks of a run; see `Alone`.

    Args:
        store: The store in which they meet.
        rank: The number of this process, from 0.
        size: Number of processes, > 1.
        near: Number of ranks on each machine; their numbers are contiguous.
        lost: Function that receives the message when another rank is lost; it must end the
            computation that waits for that rank.
        start: Maximum time to wait for the other ranks to start.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        near: int,
        lost: Callable[[str], None] | None = None,
        *,
        start: timedelta = START,
    ) -> None:
        self.rank, self.size, self.near, self.limit = rank, size, near, LIMIT
        self.compares = True
        self._store, self._lost = distributed.PrefixStore("bayesfl", store), lost or _end
        self._held: Callable[[int], list[str]] = lambda _: []
        self._calls, self._over = 0, threading.Event()
        self._store.set(f"life-{rank}", self._sign())
        self._group: Any = distributed.ProcessGroupGloo(
            distributed.PrefixStore("gloo", self._store), rank, size, start
        )
        signs = distributed.PrefixStore("bayesfl", store.clone())
        self._life = threading.Thread(target=self._watch, args=(signs,), daemon=True)
        self._life.start()

    def close(self) -> None:
        """Close the connections, and signal to other ranks that this one has ended."""
        self._over.set()
        self._life.join()
        with suppress(RuntimeError):
            self._store.set(f"life-{self.rank}", ENDED)
        self._group, self._held = None, lambda _: []

    def every(self, make: Callable[[], T]) -> list[T]:
        """Return the results of `make` at all ranks; see `Alone.every`."""
        about, (value, error) = self._call(), _tried(make)
        message = packed(about | {"value": value, "error": _told(error)})
        if self.rank:
            self._send(message, 0)
        found = [message, *(self._receive(r) for r in range(1, self.size) if not self.rank)]
        found = [unpacked(one) for one in unpacked(self._spread(packed(found), 0))]
        self._compare(found, error)
        found[self.rank]["value"] = value
        for rank, one in enumerate(found):
            _raise(one["error"], error if rank == self.rank else None)
        return [one["value"] for one in found]

    def relay(self, state: T, step: Callable[[T], T]) -> T:
        """Pass a state through `step` at one rank after another; see `Alone.relay`."""
        about, last, error = self._call(), self.size - 1, None
        now = about | {"value": state, "error": None, "rank": 0}
        if self.rank:
            now = unpacked(self._receive(self.rank - 1))
        if now["error"] is None and now["call"] == about["call"]:
            value, error = _tried(lambda: step(now["value"]))
            now |= {"value": value, "error": _told(error), "rank": self.rank}
        message = packed(now)
        if self.rank < last:
            self._send(message, self.rank + 1)
        done = unpacked(self._spread(message, last))
        self._compare([about, done], error)
        _raise(done["error"], error if done["rank"] == self.rank else None)
        return done["value"]

    def dealt(self, costs: Sequence[float], rank: int | None = None) -> slice:
        """Return the chunks that a rank computes; see `Alone.dealt`."""
        rank = self.rank if rank is None else rank
        ends = np.cumsum([0.0, *costs])
        middles = (ends[1:] + ends[:-1]) / 2 * self.size / max(ends[-1], math.ulp(0.0))
        return slice(*np.searchsorted(middles, [rank, rank + 1]).tolist())

    def copied(self, tree: T) -> T:
        """Return a copy of a nest of tensors in shared memory; see `Alone.copied`."""
        if self.near == 1 or not tree_leaves(tree):
            return super().copied(tree)
        leads, made, count = self.rank % self.near == 0, list[T](), itertools.count()
        with ExitStack() as held:
            folders = self.every(lambda: _folder(tree, held) if leads else "")
            folder = Path(folders[self.rank - self.rank % self.near])

            def mapped(t: Tensor) -> Tensor:
                if t.device.type != "cpu" or not t.numel():
                    return t.clone()
                name, size = str(folder / str(next(count))), t.numel()
                found = torch.from_file(name, shared=True, size=size, dtype=t.dtype).view(t.shape)
                return found.copy_(t) if leads else found

            self.every(lambda: made.append(tree_map_only(Tensor, mapped, tree)))
        return made[0]

    def shares(self, device: torch.device) -> bool:
        """Return whether ranks share the memory of a copy; see `Alone.shares`."""
        return self.near == self.size and device.type == "cpu"

    def hold(self, held: Callable[[int], list[str]]) -> None:
        """Set the function that lists the clients of a rank; see `Alone.hold`."""
        self._held = held

    def _call(self) -> dict[str, Any]:
        """Return the number of this exchange, and the functions that make it, the user's call
        first.
        """
        self._calls += 1
        names, frame = [], sys._getframe()
        while frame is not None:
            module = str(frame.f_globals.get("__name__"))
            if module.startswith(OWN) and not module.startswith(AROUND):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        return {"call": [self._calls, *reversed(names)]}

    def _compare(self, found: Sequence[Mapping[str, Any]], error: Exception | None) -> None:
        calls = [one["call"] for one in found]
        if any(call != calls[0] for call in calls):
            # The first function that is not the same; the user's call where a rank has no further.
            shared = min(map(len, calls))
            place = next((k for k in range(1, shared) if len({c[k] for c in calls}) > 1), shared)
            names = [str(call[place] if len(call) > place else call[1]) for call in calls]
            raise error or LostRankError(
                f"ranks make different calls at once: {', '.join(names)}; each must make the same "
                "calls in the same order, on the same data"
            )

    def _spread(self, data: Tensor, root: int) -> Tensor:
        """Send the bytes of one rank to all ranks, and return them."""
        if self.rank != root:
            return self._receive(root)
        for other in range(self.size):
            if other != root:
                self._send(data, other)
        return data

    def _send(self, data: Tensor, other: int) -> None:
        with self._spoken(other):
            self._group.send([torch.tensor([len(data)])], other, 0).wait(FOREVER)
            self._group.send([data], other, 0).wait(FOREVER)

    def _receive(self, other: int) -> Tensor:
        with self._spoken(other):
            length = torch.zeros(1, dtype=torch.int64)
            self._group.recv([length], other, 0).wait(FOREVER)
            data = torch.empty(int(length), dtype=torch.uint8)
            self._group.recv([data], other, 0).wait(FOREVER)
        return data

    @contextmanager
    def _spoken(self, other: int) -> Iterator[None]:
        """Raise LostRankError with the rank's name if its connection has ended."""
        try:
            yield
        except RuntimeError as error:
            message = self._named(other, "has ended")
            with suppress(RuntimeError):  # the store may have ended, too
                # The first message has the cause: other ranks end because of this one.
                message = self._store.compare_set("lost", "", message).decode()
            raise LostRankError(message) from error

    def _named(self, other: int, what: str) -> str:
        held = self._held(other)
        more = f" and {len(held) - FEW} more" * (len(held) > FEW)
        trained = f"; it trained {', '.join(held[:FEW])}{more}" * bool(held)
        return (
            f"rank {other} of {self.size} {what}{trained}. To continue a run with checkpoint=, "
            "repeat the command; a call that all ranks must make, such as simulate or predict, "
            "must not stand behind `if bf.rank() == 0`"
        )

    def _sign(self) -> str:
        """Return a sign of life: the process's number, and the time."""
        return f"{os.getpid()} {time.time()}"

    def _watch(self, store: Any) -> None:
        """Send signs of life, and end the process if another rank sends none."""
        seen = {other: ("", time.monotonic()) for other in range(self.size) if other != self.rank}
        while not self._over.wait(SIGN):
            with suppress(RuntimeError):  # the store has ended
                store.set(f"life-{self.rank}", self._sign())
                for other, (sign, _) in seen.items():
                    now = store.get(f"life-{other}").decode()
                    if now != sign or now == ENDED:
                        seen[other] = (now, time.monotonic())
            other = min(seen, key=lambda rank: seen[rank][1])
            sign, since = seen[other]
            if time.monotonic() - since > self.limit:
                if other // self.near == self.rank // self.near and sign[:1].isdigit():
                    # Torchrun waits half a minute for a stopped process.
                    os.kill(int(sign.split()[0]), signal.SIGKILL)
                self._lost(self._named(other, f"has sent no sign of life for {self.limit:.0f} s"))


ALONE = Alone()
_RANKS: ContextVar[Alone | None] = ContextVar("ranks", default=None)
_FOUND: list[Alone] = []
_LOCK = threading.Lock()


def current() -> Alone:
    """Return the ranks of this process, as started by torchrun."""
    if (given := _RANKS.get()) is not None:
        return given
    with _LOCK:
        if not _FOUND:
            _FOUND.append(_from_environment())
        return _FOUND[0]


def rank() -> int:
    """Return the number of this process among the ranks of a run, from 0; 0 without ranks.

    Every rank runs the whole program. Put code that must run once, such as printing, behind `if
    bf.rank() == 0`.

    Example:
        >>> if bf.rank() == 0:
        ...     print("printed once")
        printed once
    """
    return current().rank


@contextmanager
def using(ranks: Alone) -> Iterator[None]:
    """Use the given ranks for the runs in this block."""
    token = _RANKS.set(ranks)
    try:
        yield
    finally:
        _RANKS.reset(token)


def _from_environment() -> Alone:
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1 or "RANK" not in os.environ or os.environ.get(OF_PROCESS):
        return ALONE
    os.environ[OF_PROCESS] = str(os.getpid())  # inherited by child processes
    store, number, size = next(iter(distributed.rendezvous("env://")))
    if number:  # the lines of rounds are logged once
        logging.getLogger("bayesfl").setLevel(logging.WARNING)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    found = Ranks(store, number, size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    atexit.register(found.close)
    return found


def _end(message: str) -> None:
    """End the process, which may be blocked in a call that cannot be interrupted."""
    print(f"bayesfl: {message}", file=sys.stderr, flush=True)
    os._exit(1)


def _folder(tree: Any, held: ExitStack) -> str:
    """Return a new folder in memory if that has room for the tensors, otherwise on disk; `held`
    removes it.
    """
    import fcntl

    sizes: list[int] = []
    tree_map_only(Tensor, lambda t: sizes.append(t.nbytes), tree)
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > 2 * sum(sizes)
    where = memory if room else Path(tempfile.gettempdir())
    for lock in where.glob(f"{FOLDER}*/{LOCK}"):  # by a process that was killed meanwhile
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    made = tempfile.mkdtemp(prefix=FOLDER, dir=where)
    held.callback(shutil.rmtree, made, ignore_errors=True)
    fresh = Path(made, "new")
    fcntl.flock(held.enter_context(fresh.open("w")), fcntl.LOCK_EX)
    fresh.rename(fresh.with_name(LOCK))  # others see the file when it is locked
    return made


def _tried(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except LostRankError:
        raise
    except Exception as error:  # all ranks raise it, whatever it is
        return None, error


def _told(error: Exception | None) -> Any:
    """Return a message that describes an error; if its class is not bayesfl's or Python's, only the
    text.
    """
    if error is None:
        return None
    kind = type(error)
    own = kind.__module__.startswith((OWN, "builtins"))
    return {
        "kind": (kind.__module__, kind.__qualname__) if own else ("builtins", "RuntimeError"),
        "said": str(error) if own else f"{kind.__qualname__}: {error}",
        "about": {key: t for key, t in vars(error).items() if isinstance(t, int | str | dict)},
    }


def _raise(told: Any, own: Exception | None) -> None:
    """Raise a rank's error if there is one: the rank's own, or one with the same class and text."""
    if own is not None:
        raise own
    if told is not None:
        module, name = told["kind"]
        kind = getattr(sys.modules.get(module), name, RuntimeError)
        error = kind.__new__(kind, told["said"])
        error.__dict__ |= dict.fromkeys(("client", "phase", "result")) | told["about"]
        raise error
