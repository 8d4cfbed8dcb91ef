"""The server's side: rounds over a network, with the simulation's cohorts, draws and sums."""

import contextlib
import inspect
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from torch.utils._pytree import tree_map

from bayesfl.base.checks import instance, number, whole
from bayesfl.base.trees import nest
from bayesfl.composition.algorithm import Algorithm
from bayesfl.engine.plan import chunks
from bayesfl.federation.admission import LARGEST, PROTOCOL, Admission, Message, attempts, check_cohort, check_replies, objection, shares
from bayesfl.federation.checkpoint import KEPT, held
from bayesfl.federation.errors import FailedRound
from bayesfl.federation.identity import fingerprint
from bayesfl.federation.predict import choose
from bayesfl.federation.replies import Gate, Gather
from bayesfl.federation.settings import DTYPES, METHOD, Settings, name_of
from bayesfl.flower import deployed, records
from bayesfl.flower.deployed import Deployed
from bayesfl.flower.post import Failure, ask
from bayesfl.flower.roster import REMIND, Roster
from bayesfl.flower.states import name_of as state_name

log = logging.getLogger(__name__)


class BadClients(RuntimeError):
    """Clients whose replies are missing or bad, where that stops the run."""


def server_app(algorithm: Algorithm, **options: Any) -> ServerApp:
    """A Flower ServerApp that runs `serve` with these options.

    Where they depend on the run's configuration, call `serve` in a main function of your own.

    Raises:
        TypeError: `algorithm` is no Algorithm, or `serve` has no such option.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    inspect.signature(serve).bind(None, algorithm, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, algorithm, **options)

    return app


def serve(
    grid: Grid,
    algorithm: Algorithm,
    *,
    clients: int,
    rounds: int,
    participation: float = 1.0,
    sampling: Literal["fixed", "bernoulli"] | None = None,
    train: Literal["cohort", "all"] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    timeout: float = 600.0,
    min_clients: int = 1,
    below_minimum: Literal["skip", "repeat"] = "skip",
    on_bad_client: Literal["stop", "skip"] = "skip",
    max_norm: float | None = 100.0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = 1,
) -> Deployed:
    """Trains a federation over Flower's grid: the same numbers as `simulate` with the same seed, to rounding.

    It waits until all clients are there, runs the rounds, and at last has every client predict its test data with the final model. Where
    the folder of checkpoints holds this experiment, it goes on from the newest one, after `timeout` seconds without those who are missing.

    Args:
        grid: Flower's, as a ServerApp gets it.
        algorithm: The method, the same as the clients' to the last option.
        clients: How many there are; their ids are 0 to J - 1.
        rounds: Rounds in all, those done before included.
        participation: See `simulate`; so are `sampling`, `train`, `seed` and `dtype`.
        sampling: `fixed` or `bernoulli`; None for the method's own.
        train: `cohort` or `all`; None for the method's own.
        seed: Of everything random, on the clients, too.
        dtype: In which precision.
        timeout: Seconds that a client has for its reply.
        min_clients: Replies that a round needs.
        below_minimum: What becomes of a round with fewer: `skip` leaves all as it was, `repeat` tries again, three times in all.
        on_bad_client: `skip` a client whose reply is missing or bad, which starts its next round from its last state that was taken, or
            `stop` the run.
        max_norm: How many times as far as is usual in the round a client may go from what it was sent, see
            `bayesfl.Admission`; None for no such check.
        checkpoint: A folder for checkpoints of the server; without one a server that was killed starts anew.
        every: Rounds between checkpoints; the last round always makes one.

    Raises:
        TypeError: `algorithm` is no Algorithm.
        ValueError: An option is outside its range, another server is at work on the folder, or the method tunes a number and no client has
            validation data.
        CheckpointError: The folder holds another run.
        BadClients: A reply is missing or bad and that stops the run.
        FailedRound: A round that is to be repeated came to nothing three times.
        DivergenceError: The server's state is no longer finite.
        httpx.HTTPError, OSError: The SuperLink cannot be reached.
    """
    instance("algorithm", algorithm, Algorithm, METHOD)
    drawn, trained = algorithm.sampling if sampling is None else sampling, algorithm.train if train is None else train
    settings = Settings(rounds, participation, drawn, trained, seed, None)
    admission = Admission(on_bad_client, min_clients, below_minimum, max_norm)
    whole("clients", clients, least=1)
    whole("every", every, least=1)
    admission.check(settings.largest(clients))
    if settings.seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, which a message can hold, got {seed}")
    if not number("timeout", timeout) > 0:
        raise ValueError(f"timeout is in seconds and must be > 0, got {timeout}")
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype must be a floating-point type such as torch.float32, got {dtype!r}")
    with contextlib.nullcontext() if checkpoint is None else deployed.alone(Path(checkpoint)):
        run = _Run(grid, admission, float(timeout), checkpoint, every)
        state = run.begin(algorithm, settings, clients, dtype)
        while state.round < settings.rounds:
            state = run.round(state)
        return run.evaluate(state)


@dataclass
class _Run:
    """One run of a server.

    Args:
        grid: Flower's.
        admission: Which replies are taken.
        timeout: Seconds that a client has.
        folder: For checkpoints.
        every: Rounds between them.
    """

    grid: Grid
    admission: Admission
    timeout: float
    folder: str | os.PathLike[str] | None
    every: int
    roster: Roster = field(init=False)
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """`base` of each checkpoint that is kept, by its round."""
    named: set[int] = field(default_factory=set)
    """Clients of whom the log says that they have very much data."""

    def begin(self, algorithm: Algorithm, settings: Settings, clients: int, dtype: torch.dtype) -> Deployed:
        """The state to go on from, and the clients there."""
        keys: dict[int, str] = {}
        counts: dict[int, int] = {}
        goes_on = self.folder is not None and bool(held(self.folder))
        session = secrets.token_hex(4)
        if self.folder is not None and goes_on:
            state, keys, counts = deployed.read(self.folder, algorithm)
            state = deployed.resumed(state, settings, clients, dtype)
            state = replace(state, sessions=(*state.sessions, session))
            log.info("going on after round %d of experiment %s", state.round, state.experiment)
            self.kept = deployed.bases(self.folder, clients)
        else:
            server = algorithm.init(clients, seed=settings.seed, dtype=dtype)
            start, base = algorithm.rows(server), ("",) * clients
            state = Deployed(algorithm, settings, secrets.token_hex(8), (session,), 0, server, start, base, dtype=dtype)
        hello = {"protocol": PROTOCOL, "algorithm": fingerprint(algorithm), "experiment": state.experiment}
        patience = 2 * self.timeout + REMIND  # a round may last as long as its slowest client is waited for
        self.roster = Roster(clients, hello, patience, keys, counts=counts)
        self.roster.wait(self.grid, least=self.admission.min_clients, patience=self.timeout if goes_on else None)
        predictor = algorithm.predictor
        if predictor is not None and len(predictor.grid) > 1 and not sum(self.roster.validation.values()):
            raise ValueError(
                f"{predictor.tunes} is chosen on validation data, and no client has any: give them some, or give the method a number, as "
                f"{predictor.tunes}=1.0"
            )
        self._save(state)  # experiment, session and keys, before anything depends on them
        return state

    def round(self, state: Deployed) -> Deployed:
        """A round later, checkpointed where that is due."""
        tried = attempts(self.admission, lambda attempt: self._round(state, attempt))
        if isinstance(tried, FailedRound):
            tried = replace(state, round=state.round + 1), {"round": state.round + 1, "cohort": 0, **tried.row}
        state, row = tried
        state.history.append(row)
        log.info("round %d of %d: %s", state.round, state.settings.rounds, ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
        if state.round % self.every == 0 or state.round == state.settings.rounds:
            self._save(state)
        return state

    def _round(self, state: Deployed, attempt: int) -> tuple[Deployed, dict[str, Any]]:
        start = time.perf_counter()
        algorithm, settings, round = state.algorithm, state.settings, state.round
        chosen = settings.cohort(state.clients, round)
        check_cohort(len(chosen), round, self.admission.min_clients)
        senders = set(chosen.tolist())
        declared = algorithm.uplink(state.dtype)
        most = records.most_bytes(declared)
        replies: dict[int, dict[str, Tensor]] = {}
        acknowledged: set[int] = set()
        losses: dict[int, float] = {}
        lost, up = 0, 0
        self.roster.look(self.grid)
        counts = self._counts()
        gate = Gate(algorithm, state.server, Gather(algorithm, state.server, round), self.admission, round, state.history, counts)
        orders = self._orders(state, np.arange(state.clients) if settings.train == "all" else chosen, senders)
        down = sum(_size(content) for node, content in orders.values() if node)
        for client, reply in self._ask("train", orders, group=f"{round}.{attempt}"):
            if isinstance(reply, Failure):
                lost += reply.lost and client in senders
                gate.drop(client, reply.reason)
                continue
            try:
                up += _size(reply)
                message = _message(reply, most) if client in senders else _acknowledgement(reply)
                reason = objection(message, declared if client in senders else {}, round)
            except records.RecordError as error:
                reason = str(error)
            else:
                replies[client] = dict(message.tensors)
                if (loss := _measure(reply, "train_nll")) is not None:
                    losses[client] = loss
            if reason:
                gate.drop(client, reason)
            else:
                acknowledged.add(client)
        came = sorted(senders & acknowledged)
        if came:
            (order,) = chunks(np.array(came), counts, len(came))
            rows = nest({name: torch.stack([replies[client][name] for client in order.tolist()]) for name in declared})
            sent = {name: rows.pop(name) for name, block in algorithm.blocks.items() if block.pool}
            gate.hold(order, torch.from_numpy(counts[order]).to(state.dtype), sent, rows)
        dropped = gate.close()
        if dropped and not self.admission.skips:
            raise BadClients(f"round {round}, counted from 0: " + "; ".join(f"client {c}: {gate.dropped[c]}" for c in dropped))
        taken = [client for client in came if client not in dropped]
        counted = {"lost": lost, "rejected": len(chosen) - lost - len(taken), "bytes_up": up, "bytes_down": down}
        try:
            check_replies(len(taken), round, self.admission.min_clients)
            server = gate.server()
        except FailedRound as error:
            error.row |= counted
            raise
        made, known = state_name(round + 1, state.sessions[-1]), acknowledged - set(dropped)
        base = tuple(made if client in known else name for client, name in enumerate(state.base))
        inside = [losses[client] for client in taken if client in losses]
        row: dict[str, Any] = {
            "round": round + 1,
            "cohort": len(taken),
            "seconds": time.perf_counter() - start,
            "train_nll": float(np.mean(inside)) if inside else float("nan"),
            **counted,
            "uplink_norm": gate.usual,
        }
        return replace(state, round=round + 1, server=server, base=base), row

    def _counts(self) -> np.ndarray:
        """Training examples of all clients, [J], 0 where they are not known; the log names who says that it has very many."""
        counts = self.roster.sizes()
        for client in np.flatnonzero(shares(counts) >= LARGEST).tolist():
            if client not in self.named:
                self.named.add(client)
                log.warning(
                    "client %d says that it has %d training examples, the median client %g",
                    client,
                    counts[client],
                    np.median(counts[counts > 0]),
                )
        return counts

    def evaluate(self, state: Deployed) -> Deployed:
        """The final model down, every client's predictions made where its data are, and the mean of what they measured."""
        predictor, value = state.algorithm.predictor, float("nan")
        self.roster.look(self.grid)
        if predictor is not None and predictor.grid:
            try:
                value = predictor.grid[0] if len(predictor.grid) == 1 else self._tuned(state)
            except ValueError as error:
                log.warning("nothing is predicted: %s", error)
                return state
        found: dict[str, list[float]] = {}
        orders = self._orders(state, np.arange(state.clients), set(), value=value)
        for client, reply in self._ask("evaluate", orders, group="evaluate"):
            if isinstance(reply, Failure):
                log.warning("client %d did not predict: %s", client, reply.reason)
                continue
            for name in records.MEASURES:
                if (measure := _measure(reply, name)) is not None:
                    found.setdefault(f"personal_{name}", []).append(measure)
        if found:
            last = state.history.rows[-1]
            last |= {name: float(np.mean(values)) for name, values in found.items()} | {"evaluated": max(map(len, found.values()))}
            last |= {} if np.isnan(value) else {"tuned": value}
            log.info("evaluation: %s", ", ".join(f"{k} {v:.4g}" for k, v in last.items() if k.startswith("personal_")))
            self._save(state)
        return state

    def _tuned(self, state: Deployed) -> float:
        """The number that the method's predictor tunes, from sums over the clients' validation data.

        Raises:
            ValueError: No client has said how good the candidates are, or none is any good.
        """
        predictor = state.algorithm.predictor
        assert predictor is not None
        total, examples = torch.zeros(len(predictor.grid), dtype=torch.float64), 0
        asked = np.array([client for client, n in sorted(self.roster.validation.items()) if n])
        wanted = {"scores": ((len(predictor.grid),), torch.float64)}
        for client, reply in self._ask("evaluate.tune", self._orders(state, asked, set()), group="tune"):
            try:
                if isinstance(reply, Failure):
                    raise records.RecordError(reply.reason)
                tensors = records.unpack(reply, "scores", records.setting(reply, "digest", str), most=records.most_bytes(wanted))
                shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                if shapes != wanted:
                    raise records.RecordError(f"it sent {shapes}, not {wanted}")
                if bool((tensors["scores"].isnan() | tensors["scores"].isneginf()).any() or tensors["scores"].isposinf().all()):
                    raise records.RecordError("its scores are not numbers")
            except records.RecordError as error:
                log.warning("client %d has no part in tuning %s: %s", client, predictor.tunes, error)
                continue
            total += tensors["scores"]
            examples += self.roster.validation[client]
        if not examples:
            raise ValueError(f"no client has scored the candidates for {predictor.tunes}")
        return choose(predictor, total, examples)

    def _ask(self, kind: str, orders: dict[int, tuple[int, RecordDict]], *, group: str) -> Iterator[tuple[int, RecordDict | Failure]]:
        """Each client and its reply, or why there is none."""
        yield from ask(self.grid, kind, {c: order for c, order in orders.items() if order[0]}, timeout=self.timeout, group=group)
        for client, (node, _) in orders.items():
            if not node:
                yield client, Failure("its node has not come")

    def _orders(
        self, state: Deployed, ids: np.ndarray, senders: set[int], *, value: float = float("nan")
    ) -> dict[int, tuple[int, RecordDict]]:
        """{client: (node, or 0 where there is none, what it is told)}; the tensors for all are the same bytes."""
        algorithm = state.algorithm
        common, addressed = algorithm.share(state.server, torch.from_numpy(ids))
        given = algorithm.given(common, state.round, state.settings.rounds)
        shared, digest = records.pack({name: t for name, t in given.items() if name not in ("round", "rounds")})
        told = {
            "protocol": PROTOCOL,
            "algorithm": fingerprint(algorithm),
            "experiment": state.experiment,
            "sessions": list(state.sessions),
            "round": state.round,
            "rounds": state.settings.rounds,
            "seed": state.settings.seed,
            "dtype": name_of(state.dtype),
            "value": value,
            "keeps": bool(state.start),
            "common_digest": digest,
        }
        orders: dict[int, tuple[int, RecordDict]] = {}
        for place, client in enumerate(ids.tolist()):
            base = state.base[client]
            start = {} if base else tree_map(lambda t: t[None], state.start)
            own, digest = records.pack({"addressed": tree_map(lambda t, i=place: t[i : i + 1], addressed), "start": start})
            named = sorted({base, *(names[client] for names in self.kept.values())} - {""})
            config = {**told, "client": client, "base": base, "named": named, "sends": client in senders, "own_digest": digest}
            content = RecordDict({"config": ConfigRecord(config), "common": shared, "own": own})
            orders[client] = (self.roster.nodes.get(client, 0), content)
        return orders

    def _save(self, state: Deployed) -> None:
        if self.folder is None:
            return
        deployed.write(self.folder, state, self.roster.keys, self.roster.counts)
        self.kept = dict(sorted((self.kept | {state.round: state.base}).items())[-KEPT:])


def _message(reply: RecordDict, most: int) -> Message:
    """What a client of the cohort replied.

    Raises:
        RecordError: It is no such message.
    """
    tensors = records.unpack(reply, "up", records.setting(reply, "digest", str), most=most)
    return Message(tensors, records.setting(reply, "round", int), records.setting(reply, "protocol", int))


def _acknowledgement(reply: RecordDict) -> Message:
    """What a client replied that trained outside the cohort: nothing but that it did.

    Raises:
        RecordError: It is no such message.
    """
    return Message({}, records.setting(reply, "round", int), records.setting(reply, "protocol", int))


def _measure(reply: RecordDict, name: str) -> float | None:
    """A number that a client measured, where it is there and finite."""
    found = reply.get("metrics")
    value = found.get(name) if isinstance(found, MetricRecord) else None
    return float(value) if isinstance(value, float) and np.isfinite(value) else None


def _size(content: RecordDict) -> int:
    """Bytes of a message's tensors."""
    return sum(len(array.data) for record in content.values() if isinstance(record, ArrayRecord) for array in record.values())
