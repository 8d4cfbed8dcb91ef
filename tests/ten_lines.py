"""The README's program, small: what an installed wheel must run, and a type checker must accept."""

import tempfile

import torch

import bayesfl as bf

torch.set_num_threads(1)
clients = bf.data.concept_drift("digits", clients=4, seed=0)
model = bf.models.mlp(clients.inputs, hidden=20, outputs=clients.classes)
algorithm = bf.algorithms.pfedvem(model, head_epochs=2, body_epochs=1)
result = bf.simulate(algorithm, clients, rounds=2, participation=0.5, seed=0)
print(result.history)
probs = result.predict(clients.test).probs
assert probs is not None
assert probs.shape[:2] == (4, int(clients.counts["test"].max()))
x, y = clients.train.client(0)
assert len(x.flatten(1)) == len(y)
assert bf.plots.reliability(result).axes[0].get_title() is not None
with tempfile.TemporaryDirectory() as folder:
    result.save(folder)
    again = bf.simulate(
        algorithm,
        clients,
        rounds=3,
        participation=0.5,
        seed=0,
        resume=bf.load(folder, algorithm, clients),
    )
assert again.round == 3
