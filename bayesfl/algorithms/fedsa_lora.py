"""FedSA-LoRA: adapters B A of low rank on frozen weights; clients share A, and keep B.

With an input x, a frozen weight W and a client's own $B_j$, a layer computes $W x + B_j A x$. The
server averages A, weighted by clients' numbers of examples. As in the authors' configurations, a
trained classifier stays with its client, like B.

Other methods for adapters need no function of their own. `fedavg` averages A and B, although the
mean of products is not the product of means. FFA-LoRA (Sun, Li, Li, Ding, "Improving LoRA in
privacy-preserving federated learning", ICLR 2024) is `fedavg` on a model with A frozen at its
start; the mean of products is then exact. `local` keeps all adapters.

Source: Guo, Zeng, Wang, Fan, Wang, Qu, "Selective aggregation for low-rank adaptation in federated
learning", ICLR 2025, figure 1.
"""

from bayesfl.composition import Algorithm, Block, Descend, Energy, options
from bayesfl.likelihoods import Categorical
from bayesfl.optim import SGD


@options.method()
def fedsa_lora(
    model: options.Model,
    *,
    steps: options.Steps = 10,
    batch_size: options.BatchSize = 128,
    optimiser: options.Optimiser = SGD(2e-2),
    adapt_epochs: options.AdaptEpochs = 20,
    likelihood: options.Likelihood = Categorical(),
) -> Algorithm:
    """Federate the adapters of `model` by FedSA-LoRA: the server averages every A; B and all other
    trained parameters stay on their client.

    A client that joins later receives A, and trains the rest on its data, from its start.

    Args:
        model: A frozen network with adapters `lora_A` and `lora_B`, as peft's `get_peft_model`
            and `inject_adapter_in_model` name them.

    Raises:
        ValueError: No trainable parameter has `lora_A` in its name, or all have.

    Example:
        >>> from collections import OrderedDict
        >>> clients = bf.data.concept_drift("digits", clients=4)
        >>> adapter = OrderedDict(lora_A=nn.Linear(64, 3, bias=False), lora_B=nn.Linear(3, 5))
        >>> method = bf.algorithms.fedsa_lora(nn.Sequential(adapter))
        >>> list(method.uplink(method.init(4)))  # what a client sends each round
        ['A.loc']
        >>> result = bf.simulate(method, clients, rounds=1)
    """
    both, rest = ("A", "B"), {"batch_size": batch_size, "optimiser": optimiser}
    return Algorithm(
        model,
        {"A": Block("*lora_A*"), "B": Block("!*lora_A*", pool=None, keep=True)},
        (Descend(Energy(both, both, likelihood="mean"), steps=steps, **rest),),
        parts=both,
        likelihood=likelihood,
        adapt=(Descend(Energy("B", both, likelihood="mean"), epochs=adapt_epochs, **rest),),
    )
