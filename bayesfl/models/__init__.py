"""Networks with a body and a head, which personal federated learning treats differently.

Every network here has parameters named `body.*` and `head.*`, draws its start from its own seed and
does not use torch's global generator. `split` gives any other module the same two names.
"""

from bayesfl.models.converting import group_norm
from bayesfl.models.cutting import SplitModel, split
from bayesfl.models.hugging_face import logits
from bayesfl.models.networks import char_lstm, cifar100_cnn, leaky_cnn, lenet, mlp
from bayesfl.models.starts import anew
from bayesfl.models.transformer import transformer

__all__ = [
    "SplitModel",
    "anew",
    "char_lstm",
    "cifar100_cnn",
    "group_norm",
    "leaky_cnn",
    "lenet",
    "logits",
    "mlp",
    "split",
    "transformer",
]
