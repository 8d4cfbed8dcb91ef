"""The driver of phases: it selects the kernel that runs a phase and the number of clients in a
chunk.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bayesfl.base.inputs import Inputs, count, each
from bayesfl.base.options import Count, Positive, declared
from bayesfl.base.processes.ranks import LIMIT, current
from bayesfl.base.protocols import Batch, Info, Server, View
from bayesfl.composition.algorithm import Algorithm
from bayesfl.composition.phases import Descend, Once, Phase, Repeat, by_algebra
from bayesfl.engine import descent, layers, live, reference, vmap
from bayesfl.engine.crew import Crew, apart
from bayesfl.engine.network import Kernel, Network, in_microbatches
from bayesfl.engine.plan import PhasePlan
from bayesfl.models.altered import cut
from bayesfl.models.trial import draws_in_training, lively

T = TypeVar("T")
KernelName: TypeAlias = Literal["auto", "reference", "live", "layers", "vmap"]

# docs/decisions/0008: larger chunks push the weights of an MLP out of the cache; smaller ones need
# more calls for the same products.
CPU_CHUNK = 5
# Small models, whose calls cost more than their products, run more clients in a chunk, as long as
# the chunk's weights fit into this many bytes and at least CPU_CHUNKS chunks remain, so that
# workers get equal shares.
CPU_BYTES, CPU_SMALL_CHUNK, CPU_CHUNKS = 12 * 2**20, 50, 4
# Models with more weights are run client by client, because joining the states of a chunk's clients
# would copy them.
CPU_LARGE = 2_000_000
# A client in training needs about eight times the memory of its weights: state, leaves, gradients,
# momentum, pull and temporaries.
COPIES = 8


@dataclass(frozen=True)
@declared
class Engine:
    """Choose how the local work of a round is run; this changes only speed and rounding, and under
    `ClientPrivacy` the noise.

    Args:
        kernel: `reference` (pure steps, one client after another), `live` (client by client),
            `layers` (a recorded forward pass, with rules for a whole chunk), `vmap` (any module
            that torch.func can batch), or `auto`, which selects one for each phase.
        chunk: Number C of clients computed together. None selects it, on a CPU from the cohort and
            the size of the weights, on a GPU from the size of the weights and the free memory; the
            size of activations is not considered, so set it if these are large.
        microbatch: Maximum number of a client's rows that gradient steps and a run's predictions
            compute together; None for all. Memory then holds the activations of these, but outputs
            and features of all rows. A gradient step computes the forward pass twice and adds the
            gradients of microbatches, so backward hooks and `scale_grad_by_freq` see one at a time.
            Dropout and batch norm in training mode are refused. Phases with steps of their own,
            curvature and predictions by Laplace take all rows.
        workers: Number of threads that run chunks, each with one intra-op thread; None for the
            number of cores available to this process, divided by the number of ranks on this
            machine (1 on a GPU, and with the kernel `vmap`, whose Python code holds the
            interpreter's lock).
        processes: Number of processes on this machine for `simulate`, which starts and ends the
            others. None for this one; under torchrun, for its ranks.
        lost_after: Seconds without a sign of life after which a rank counts as lost and the run
            ends at all ranks.

    Example:
        >>> clients = bf.data.iid("digits", clients=2, max_size=60)
        >>> method = bf.algorithms.fedavg(bf.models.mlp(64, hidden=8, outputs=10), epochs=1)
        >>> slow = bf.simulate(method, clients, rounds=1, engine=bf.Engine("reference"))
        >>> quick = bf.simulate(method, clients, rounds=1, engine=bf.Engine(workers=1))
        >>> torch.allclose(slow.server["w"]["loc"], quick.server["w"]["loc"], atol=1e-4)
        True
    """

    kernel: KernelName = "auto"
    chunk: Count | None = None
    microbatch: Count | None = None
    workers: Count | None = None
    processes: Count | None = None
    lost_after: Positive = LIMIT

    def chunk_size(self, clients: int, algorithm: Algorithm, device: torch.device) -> int:
        """Return the number of clients in a chunk, for a cohort of `clients`.

        It does not depend on the number of workers, so that these do not change the bits of the
        result.
        """
        if self.chunk is not None:
            return self.chunk
        if device.type != "cuda":
            weights = sum(
                algorithm.layout(name).size * (block.copies or 1)
                for name, block in algorithm.blocks.items()
            )
            most = CPU_CHUNK if weights <= CPU_LARGE else 1
            if not live.has_convolutions(algorithm.model):
                most = max(
                    most,
                    min(
                        CPU_SMALL_CHUNK, CPU_BYTES // (4 * COPIES * weights), clients // CPU_CHUNKS
                    ),
                )
            return max(1, min(most, -(-clients // 2)))
        size = sum(p.numel() for p in algorithm.model.parameters()) * 4 * COPIES
        return max(1, min(clients, int(0.5 * torch.cuda.mem_get_info(device)[0] / size)))

    def worker_count(self, device: torch.device) -> int:
        """Return the number of threads that run chunks."""
        if self.workers is not None:
            return self.workers
        if device.type == "cuda" or self.kernel == "vmap":
            return 1
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        return max(1, cores // current().near)

    def crew(self, device: torch.device) -> Crew:
        """Return the worker threads for the chunks of a call; all ranks must make it."""
        current().limit = self.lost_after
        return Crew(self.worker_count(device))

    def choose(
        self,
        algorithm: Algorithm,
        phase: Descend | None,
        like: Tensor,
        x: Inputs,
        *,
        train: bool = False,
    ) -> KernelName:
        """Select the kernel that runs a phase, or predictions if `phase` is None.

        With `auto`, networks whose forward pass can be recorded are run by `layers`, except, on a
        CPU, networks with expensive steps, and on a GPU, networks with convolutions. These and all
        others are run by `live`, or on a GPU by `vmap` if torch.func can batch them.

        Args:
            algorithm: The method.
            phase: The phase; None for predictions, and for phases that are run step by step.
            like: A tensor with the run's precision and device.
            x: Inputs [N, ...] with as many examples as a client's largest batch.
            train: Whether the model is trained.

        Raises:
            ValueError: The requested kernel cannot run the model.
        """
        model, device = algorithm.model, like.device
        module = algorithm.module(like, train=train)
        if self.kernel == "vmap":
            vmap.refuse(model)
        if self.kernel != "auto":
            return self.kernel
        most = rows = count(x)
        steps = model
        if phase is not None and phase.batch_size is None and cut(model):
            moving = {*phase.blocks, *phase.noise(algorithm)}
            if all(
                name.startswith("head.")
                for block in moving
                for name in algorithm.layout(block).names
            ):
                # The body runs once, so a step computes no more than one on a usual batch.
                steps, rows = model.head, min(most, layers.USUAL)
        if device.type != "cuda":
            return "layers" if layers.light(module, x, most, rows) else "live"
        if not live.has_convolutions(steps) and layers.supported(module, x):
            return "layers"
        return "vmap" if vmap.can_batch(model) else "live"

    def run(
        self,
        algorithm: Algorithm,
        phase: Phase | Repeat,
        given: Server,
        views: View,
        plan: PhasePlan,
    ) -> tuple[View, Info]:
        """Run one phase for a chunk of clients, stacked [C, ...], and return their final views and
        diagnostics.

        With the kernel `auto`, a model that torch.func fails to batch is run by `live`, and one
        that `live` cannot run by `reference`.
        """
        if plan.order is not None:  # the kernels use the plan's order of clients
            order = torch.from_numpy(plan.order).to(views["n"].device)
            done = self._tried(algorithm, phase, given, tree_map(lambda t: t[order], views), plan)
            back = order.argsort()
            return tree_map(lambda t: t[back], done)
        return self._tried(algorithm, phase, given, views, plan)

    def _tried(
        self,
        algorithm: Algorithm,
        phase: Phase | Repeat,
        given: Server,
        views: View,
        plan: PhasePlan,
    ) -> tuple[View, Info]:
        """Run a phase, see `run`, for clients in the plan's order."""
        try:
            return self._run(algorithm, phase, given, views, plan)
        except RuntimeError as error:
            known = not vmap.can_batch(algorithm.model)
            if self.kernel != "auto" or not vmap.failed(algorithm.model, error):
                raise
            plan.rewind()
            return (
                reference.run(algorithm, phase, given, views, plan)
                if known
                else self._tried(algorithm, phase, given, views, plan)
            )

    def _run(
        self,
        algorithm: Algorithm,
        phase: Phase | Repeat,
        given: Server,
        views: View,
        plan: PhasePlan,
    ) -> tuple[View, Info]:
        like = views["n"]
        algorithm.module(like)  # made here, because torch.func allows no copy inside
        descends = [p for p in getattr(phase, "phases", (phase,)) if by_algebra(p)]
        kernel = self.choose(
            algorithm,
            phase if by_algebra(phase) else None,
            like,
            plan.examples,
            train=bool(descends),
        )
        if self.kernel == "auto" and kernel == "layers" and any(p.energy.at for p in descends):
            # At other weights the network runs in evaluation mode, which may not be recordable.
            can = layers.supported(algorithm.module(like), plan.examples)
            kernel = "layers" if can else "live"
        if lively(algorithm.model) and self._trains(algorithm.model, phase):
            kernel = "layers" if kernel == "layers" else "live"
        elif (
            kernel == "reference"
            or not phase.batched
            or not (descends or vmap.can_batch(algorithm.model))
        ):
            return reference.run(algorithm, phase, given, views, plan)
        if kernel != "live" or not descends:
            return self._chunk(algorithm, phase, given, views, plan, kernel)
        done = [
            self._chunk(
                algorithm,
                phase,
                given,
                tree_map(lambda t, c=c: t[c : c + 1], views),
                plan.client(c),
                kernel,
            )
            for c in range(len(plan.ids))
        ]
        # A single client's tensors are not copied.
        return tree_map(lambda *rows: torch.cat(rows), *done) if len(done) > 1 else done[0]

    def _trains(self, model: nn.Module, phase: Phase | Repeat) -> bool:
        """Return whether a phase trains a model with random operations or with norms that have
        statistics, which only the kernels `layers` and `live` support.

        Raises:
            ValueError: Another kernel was requested, or the phase has its own steps.
        """
        inner = getattr(phase, "phases", (phase,))
        what = (
            "dropout or other draws"
            if draws_in_training(model)
            else "batch norm or other statistics"
        )
        told = f"{type(model).__name__} has {what} in training mode"
        if own := [p for p in inner if not by_algebra(p) and not isinstance(p, Once)]:
            raise ValueError(
                f"{told}, which the steps of {type(own[0]).__name__} do not support; put the model "
                "in eval mode, or use a method whose phases are Descend"
            )
        if all(isinstance(p, Once) for p in inner):
            return False
        can = ("auto", "layers", "live")
        if self.kernel not in can or self.microbatch or not phase.batched:
            asked = (
                f"kernel={self.kernel!r}"
                if self.kernel not in can
                else f"microbatch={self.microbatch}"
                if self.microbatch
                else "a phase that is run separately (batched=False)"
            )
            raise ValueError(
                f"{told}, which {asked} cannot train; use kernel='auto', 'layers' or 'live', "
                "microbatch=None, and phases with batched=True"
            )
        return True

    def _chunk(
        self,
        algorithm: Algorithm,
        phase: Phase | Repeat,
        given: Server,
        views: View,
        plan: PhasePlan,
        kernel: KernelName,
    ) -> tuple[View, Info]:
        info: Info = {}
        for inner, batch in plan.turns(phase):
            active = len(plan.ids) if batch is None else len(batch["weight"])
            front = views if active == len(plan.ids) else tree_map(lambda t, a=active: t[:a], views)
            if by_algebra(inner):
                new, seen = descent.descend(
                    algorithm,
                    inner,
                    given,
                    front,
                    plan,
                    self._kernel(kernel),
                    batch=batch,
                    alone=kernel == "live",
                )
            else:
                with apart(inner):
                    new, seen = vmap.run(
                        algorithm, inner, given, front, plan, batch, losses=self._losses
                    )
            if active < len(plan.ids):  # the others have finished their batches
                new = _with_rest(new, views)
                seen = _with_rest(seen, {key: info[key] for key in seen})
            views, info = new, info | seen
        return phase.end(views) if isinstance(phase, Repeat) else views, info

    def _kernel(self, name: KernelName) -> Kernel:
        whole = KERNEL_OF[name]
        return whole if self.microbatch is None else in_microbatches(whole, self.microbatch)

    def _losses(
        self, algorithm: Algorithm, parts: tuple[str, ...], views: View, batch: Batch
    ) -> Tensor:
        """Compute `Algorithm.losses_of_copies` for a chunk of clients, [C, B] or [C, M, B], with
        the kernel.
        """
        outputs = self.outputs(algorithm, parts, views, batch["x"], {})
        losses = algorithm.likelihood.nll(outputs, batch["y"].unsqueeze(1))
        return losses if algorithm.copies(parts) else losses.squeeze(1)

    def outputs(
        self,
        algorithm: Algorithm,
        parts: tuple[str, ...],
        views: View,
        x: Inputs,
        noise: dict[str, Tensor],
    ) -> Tensor:
        """Compute the outputs [C, S, N, O] of a chunk of clients at `x` [C, N, *]: at draws if
        there is noise {block: [C, S, D]}, otherwise at the mean, with S = 1.
        """
        kernel = self.choose(algorithm, None, views["n"], each(lambda t: t[0], x))
        kernel = "live" if kernel == "reference" else kernel
        if kernel == "live" and count(x) > 1:
            everything = (views, x, noise)
            rows = [tree_map(lambda t, c=c: t[c : c + 1], everything) for c in range(count(x))]
            return torch.cat([self.outputs(algorithm, parts, *row) for row in rows])
        drawn = {
            part: descent.draw(algorithm, part, views[part], noise)
            for part in algorithm.whole(parts)
        }
        leaves = {
            key: leaf
            for part, vector in drawn.items()
            for key, leaf in algorithm.layout(part).leaves(vector).items()
        }
        through = Network(algorithm.module(views["n"]), self._kernel(kernel))(leaves, x)
        return through.outputs if through.lifted else through.outputs.unsqueeze(1)


def _with_rest(front: Any, whole: Any) -> Any:
    """Return tensors [C, ...] of a chunk: those of its first clients, followed by those of the
    other clients in `whole`.
    """
    return tree_map(lambda first, every: torch.cat([first, every[len(first) :]]), front, whole)


KERNEL_OF: dict[str, Kernel] = {
    "live": live.kernel,
    "layers": layers.kernel,
    "vmap": vmap.kernel,
}
