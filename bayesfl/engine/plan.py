"""The plan of one phase for a chunk of clients: the clients that train in each step, their examples
and their noise.

All random numbers are drawn here, from addresses; kernels only compute. Clients are ordered by
decreasing number of steps, so those still training in step t are a prefix of the chunk.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.addressed import Addressed
from bayesfl.base.inputs import Inputs, each, first
from bayesfl.base.options import whole
from bayesfl.base.protocols import Batch
from bayesfl.base.random import Purpose, Stage, generator, key
from bayesfl.composition.phases import Once, Phase, Repeat, steps_on_batch
from bayesfl.data import ClientData
from bayesfl.data.split import all_finite

DRAWS = 2**33
"""Number of draws reserved for one call of a model, the first half for its body."""


def passes(
    phase: Phase | Repeat, ids: np.ndarray, given: Mapping[str, Any], *, seed: int, round: int
) -> np.ndarray:
    """Return the number of passes of each client in a round, [C].

    Args:
        phase: The phase.
        ids: Clients [C].
        given: State that every client received, with the number that `epochs` may name.
        seed: The experiment's seed.
        round: Round of the federation, from 0.

    Raises:
        ValueError: The phase's function, or the number that it names, is not an integer of at least
            1.
    """
    epochs = float(given[phase.epochs]) if isinstance(phase.epochs, str) else phase.epochs
    if not callable(epochs):
        number = int(epochs) if float(epochs).is_integer() else epochs
        return np.full(len(ids), whole(f"epochs={phase.epochs!r}", number, least=1))
    found = [
        epochs(client, generator(seed, Purpose.EPOCHS, round=round, client=client))
        for client in ids.tolist()
    ]
    return np.array([whole("epochs", number, least=1) for number in found])


class PhasePlan:
    """Draw the batches and the noise of one phase for a chunk of C clients.

    Args:
        phase: The phase, whose epochs, steps and batch size are used.
        split: The clients' training data.
        ids: Clients [C]: their places in `split`, and in the addresses of their randomness.
        given: State that every client received, see `passes`.
        seed: The experiment's seed.
        round: Round of the federation, from 0.
        stage: Training (the default), fine-tuning or adaptation.
        position: Place of the phase among those in its list that shuffle or draw.
        dtype: Precision of example weights and noise.

    Attributes:
        ids: The clients by decreasing number of steps; ties keep the given order.
        order: Their places among the given clients, [C]; None if the order is unchanged.
        steps: Number of steps of each client, [C], not increasing.
        seconds: Seconds spent on `batches`, `noise` and `steps`; the kernels add the last.
    """

    def __init__(
        self,
        phase: Phase | Repeat,
        split: ClientData,
        ids: np.ndarray,
        given: Mapping[str, Any] = MappingProxyType({}),
        *,
        seed: int = 0,
        round: int = 0,
        stage: Stage = Stage.TRAIN,
        position: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._phase, self._split, self._dtype = phase, split, dtype
        self._seed, self._address = seed, {"round": round, "stage": int(stage), "phase": position}
        counts, size = split.counts[ids], phase.batch_size
        per_epoch = np.ones_like(counts) if size is None else -(-counts // size)
        steps = (
            np.full(len(ids), phase.steps)
            if phase.steps
            else (passes(phase, ids, given, seed=seed, round=round) * per_epoch)
        )
        order = np.argsort(-steps, kind="stable")
        self.order = None if (np.diff(order) == 1).all() else order
        self.ids, self._counts = ids[order], counts[order]
        self._per_epoch, self.steps = per_epoch[order], steps[order]
        self.seconds = {"steps": 0.0, "batches": 0.0, "noise": 0.0}
        self._forwards = 0

    @property
    def still(self) -> bool:
        """Return whether every step uses the same inputs."""
        return (
            self._phase.batch_size is None
            and not isinstance(self._phase, Repeat)
            and not self._augments
        )

    @property
    def _augments(self) -> bool:
        return self._split.augment is not None and not isinstance(self._phase, Once)

    def client(self, place: int) -> "PhasePlan":
        """Return the same plan for only the client at `place`; it shares the clock, and continues
        to read the same noise.
        """
        one = PhasePlan.__new__(PhasePlan)
        one.__dict__.update(
            {
                k: v
                for k, v in self.__dict__.items()
                if k not in ("_everything", "_orders", "active", "_forward_keys")
            }
        )
        one.order = None
        for name in ("ids", "_counts", "_per_epoch", "steps"):
            setattr(one, name, getattr(self, name)[place : place + 1])
        one._generators = self._generators[place : place + 1]
        return one

    def rewind(self) -> None:
        """Restart the noise, for a phase that is run again from its start."""
        self.__dict__.pop("_generators", None)
        self._forwards = 0

    def draws(self, active: int) -> tuple[list[int], int]:
        """Return the addresses of the model's own draws in the phase, for the first `active`
        clients, and the maximum number of draws in earlier steps.
        """
        self._forwards += 1
        return self._forward_keys[:active], (self._forwards - 1) * DRAWS

    @property
    def examples(self) -> Inputs:
        """Return as many rows as the largest batch has, [N, ...], without augmentation."""
        most = int(self._counts.max())
        return self._split.take(self._split.index[: min(most, self._phase.batch_size or most)])

    def batch(self, step: int, active: int) -> Batch:
        """Return the examples of the first `active` clients in `step`, [active, B, ...]; padding
        has weight 0.

        Inputs are augmented if the split has an augmentation, except for a `Once`, which measures
        and does not train.
        """
        start = perf_counter()
        if self._phase.batch_size is None:
            batch = {
                name: each(lambda t: t[:active], value) for name, value in self._everything.items()
            }
        else:
            index, places, weight, width = self._orders[step]
            if active < len(index) or width < index.shape[1]:
                index, places, weight = (t[:active, :width] for t in (index, places, weight))
            batch = self._gather(index) | {"weight": weight, "index": places}
        if self._augments:
            batch = batch | {
                "x": self._augmented(batch["x"], (batch["weight"] > 0).sum(1).tolist(), step)
            }
        self.seconds["batches"] += perf_counter() - start
        return batch

    def noise(self, shapes: Mapping[str, tuple[int, int]], active: int) -> dict[str, Tensor]:
        """Draw standard normals {block: [active, S, size]}; every client's generator is read block
        by block.
        """
        if not shapes:
            return {}
        start = perf_counter()
        out = {}
        for name, shape in shapes.items():
            buffer = np.empty((active, *shape), np.float32)
            for place in range(active):
                self._generators[place].standard_normal(out=buffer[place], dtype=np.float32)
            out[name] = torch.from_numpy(buffer).to(dtype=self._dtype, device=self._split.device)
        self.seconds["noise"] += perf_counter() - start
        return out

    def turns(self, phase: Phase | Repeat) -> Iterator[tuple[Phase, Batch | None]]:
        """Yield the plan's own `phase` and no batch; for a `Repeat`, the inner phases of every
        turn, with the batch that they share.

        The batch contains the clients that still train in the turn, a prefix of the chunk.
        """
        if not isinstance(phase, Repeat):
            yield phase, None
            return
        for t in range(int(self.steps.max())):
            batch = self.batch(t, self.active[t])
            for inner in phase.inner:
                yield inner, batch

    def walk(
        self, phase: Phase, shapes: Mapping[str, tuple[int, int]], batch: Batch | None = None
    ) -> Iterator[tuple[int, Batch, dict[str, Tensor]]]:
        """Yield, for every step of a phase, the number of clients in training, their examples and
        their noise.

        Args:
            phase: The plan's own phase, or one inside the plan's `Repeat`.
            shapes: {block: (S, size)} of the noise.
            batch: The batch of all steps of a phase inside a `Repeat`; None outside one.
        """
        if batch is not None:
            active = len(batch["weight"])
            for _ in range(steps_on_batch(phase)):
                yield active, batch, self.noise(shapes, active)
            return
        for t in range(int(self.steps.max())):
            active = self.active[t]
            data = self.batch(t, active) if getattr(phase, "data", True) else {}
            yield active, data, self.noise(shapes, active)

    @cached_property
    def active(self) -> list[int]:
        """Return the number of clients that still train in each step; they are a prefix of the
        chunk.
        """
        return (self.steps > np.arange(self.steps.max())[:, None]).sum(1).tolist()

    @cached_property
    def _forward_keys(self) -> list[int]:
        return [
            key(self._seed, Purpose.FORWARD, client=int(client), **self._address)
            for client in self.ids
        ]

    @cached_property
    def _generators(self) -> list[np.random.Generator]:
        return [
            generator(self._seed, Purpose.NOISE, client=int(client), **self._address)
            for client in self.ids
        ]

    def _gather(self, index: Tensor) -> Batch:
        flat = index.reshape(-1)
        y, environment = self._split.y, self._split.environment
        batch: dict[str, Any] = {
            "x": each(lambda t: t.unflatten(0, index.shape), self._split.take(flat)),
            "y": y.index_select(0, flat).unflatten(0, index.shape),
        }
        if environment is not None:
            # One-hot, so that the number of environments is a shape: under vmap, functions cannot
            # read it from values.
            batch["environment"] = F.one_hot(environment[index], self._split.environments).to(
                self._dtype
            )
        return batch

    def _augmented(self, x: Inputs, counts: list[int], step: int) -> Inputs:
        """Augment inputs [C, B, ...], only each client's own n rows; padding repeats the first of
        these.
        """
        augment, done = self._split.augment, []
        assert augment is not None
        for c, n in enumerate(counts):
            address = key(
                self._seed, Purpose.AUGMENT, client=int(self.ids[c]), index=step, **self._address
            )
            with Addressed(address):
                given = each(lambda t, c=c, n=n: t[c, :n].clone(), x)
                new = all_finite("augment", self._split.changed("augment", augment, given), given)
            width = first(x).shape[1]
            done.append(
                each(
                    lambda t, n=n, width=width: torch.cat(
                        [t, t[:1].expand(width - n, *t.shape[1:])]
                    ),
                    new,
                )
            )
        return tree_map(lambda *rows: torch.stack(rows), *done)

    @cached_property
    def _everything(self) -> Batch:
        """Return all examples of every client, padded to the longest."""
        places = np.arange(self._counts.max())[None]
        inside = places < self._counts[:, None]
        index = self._split.offsets[self.ids][:, None] + np.where(inside, places, 0)
        batch = self._gather(
            self._split.index[torch.from_numpy(index).to(self._split.index.device)]
        )
        weight = torch.from_numpy(inside).to(dtype=self._dtype, device=self._split.device)
        return batch | {
            "weight": weight,
            "index": torch.from_numpy(np.where(inside, places, 0)).to(self._split.device),
        }

    @cached_property
    def _orders(self) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        """Return for every step: places in the shared tensors and in the client's own rows [C, B],
        weights, and the widest batch.
        """
        total, chunk = int(self.steps.max()), len(self.ids)
        size = int(min(self._phase.batch_size, self._counts.max()))
        places = np.zeros((total, chunk, size), np.int64)
        weight = np.zeros((total, chunk, size), bool)
        epochs = -(-self.steps // self._per_epoch)
        for c, (n, steps, per_epoch) in enumerate(
            zip(self._counts, self.steps, self._per_epoch, strict=True)
        ):
            order = np.zeros((epochs[c], int(per_epoch) * size), np.int64)
            address = {**self._address, "client": int(self.ids[c])}
            for epoch, row in enumerate(order):
                drawn = generator(self._seed, Purpose.PERMUTATION, index=epoch, **address)
                row[:n] = drawn.permutation(int(n))
            places[:steps, c] = order.reshape(-1, size)[:steps]
            weight[:steps, c] = np.broadcast_to(np.arange(order.shape[1]) < n, order.shape).reshape(
                -1, size
            )[:steps]
        widths = weight.sum(2).max(1).tolist()
        index = places + self._split.offsets[self.ids][None, :, None]
        device = self._split.device
        tensors = (
            self._split.index[torch.from_numpy(index).to(self._split.index.device)],
            torch.from_numpy(places).to(device),
            torch.from_numpy(weight).to(dtype=self._dtype, device=device),
        )
        return list(zip(*(t.unbind(0) for t in tensors), widths, strict=True))


def chunks(ids: np.ndarray, counts: np.ndarray, size: int) -> list[np.ndarray]:
    """Split the clients `ids` into chunks of at most `size`, by decreasing `counts` [J] of
    examples, ties in the order given.
    """
    order = ids[np.argsort(-counts[ids], kind="stable")]
    return [order[start : start + size] for start in range(0, len(order), size)]
