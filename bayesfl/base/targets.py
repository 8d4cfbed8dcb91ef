"""The targets of a federation, from which a likelihood determines the number of outputs that a
network needs.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

Task: TypeAlias = Literal["classification", "regression"]

IGNORE = -100
"""The label of a position without label, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Describe the targets of a federation's data.

    Args:
        task: `classification` or `regression`.
        count: Number of classes, or of numbers for each example.
        y: Labels [N] or [N, ...], or numbers [N] or [N, O].
    """

    task: Task
    count: int
    y: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example's labels or numbers; () where there is one."""
        return tuple(self.y.shape[1:])

    def check(self, likelihood: object, task: Task) -> None:
        """Check that the targets have the task that a likelihood needs.

        Raises:
            ValueError: They have another task.
        """
        if self.task != task:
            raise ValueError(
                f"likelihood {type(likelihood).__name__} is for {task}, the data are for "
                f"{self.task}; build the algorithm with likelihood="
                + (
                    "Gaussian(scale=...)"
                    if self.task == "regression"
                    else "Categorical(), or the data with task='regression'"
                )
            )
