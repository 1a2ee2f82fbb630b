"""`mpiddl run` with programs that have no DataLoader: forward passes are divided, and the weights are those of one rank."""

from __future__ import annotations

import re
import sys

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more]

HEAD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(5)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(7, 5), torch.arange(7) % 3
def small():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
def weights(name, model):
    print(name, *(p.detach().abs().sum().item() for p in model.parameters()))
def train(name, model, loss, optimiser=None, steps=3):
    optimiser = optimiser or torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    weights(name, model)
"""

ALIKE = HEAD + """
class Own(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)
    def forward(self, *args, **options):
        return self.function(self, *args, **options)

model = small()
for _ in range(3):
    for kept in (x, x[2:], x[:1]):
        nn.functional.cross_entropy(model(kept), y[:len(kept)]).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
weights("by-hand", model)

model, leaf = small(), x.clone().requires_grad_()
def penalty():
    out = model(leaf)
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    return out.square().mean() + (grad.norm(dim=1) - 1).square().mean()
train("second-derivative", model, penalty)

model, rows = nn.Embedding(20, 3, sparse=True), torch.arange(36).reshape(9, 4) % 13
train("sparse", model, lambda: model(rows).square().mean(), torch.optim.SparseAdam(model.parameters(), lr=0.1))

for reentrant in (False, True):
    model = Own(lambda self, x: self.b(checkpoint(self.a, x, use_reentrant=reentrant)), a=nn.Linear(5, 8), b=nn.Linear(8, 3))
    train(f"checkpoint-{reentrant}", model, lambda: nn.functional.cross_entropy(model(leaf), y))

model = Own(lambda self, x, y=None: (self.a(x), nn.functional.cross_entropy(self.a(x), y)), a=nn.Linear(5, 3))
train("loss-inside", model, lambda: model(x, y=y)[1])

model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))
model(x)
train("lazy", model, lambda: nn.functional.cross_entropy(model(x), y))

model, calls = small(), []
model.register_forward_hook(lambda *args: calls.append(len(args[1][0])))
train("hooks", model, lambda: nn.functional.cross_entropy(model(x), y))
assert calls == [7, 7, 7], calls

model = small()
compiled = torch.compile(model, backend="aot_eager")
train("compiled", model, lambda: nn.functional.cross_entropy(compiled(x), y))

model, steps = Own(lambda self, x, h: (lambda out, h: (self.b(out).flatten(0, 1), h))(*self.a(x, h)),
                   a=nn.LSTM(5, 4), b=nn.Linear(4, 3)), torch.randn(6, 9, 5)
hidden = torch.zeros(1, 9, 4), torch.zeros(1, 9, 4)
def next_steps():
    global hidden
    out, hidden = model(steps, tuple(each.detach() for each in hidden))
    return nn.functional.cross_entropy(out, torch.arange(54) % 3)
train("hidden-state", model, next_steps)

model = small()
lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.8)
def closure():
    lbfgs.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss
for _ in range(2):
    lbfgs.step(closure)
weights("closure", model)

generator, critic = nn.Linear(2, 5), nn.Linear(5, 1)
of_generator, of_critic = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic))
for _ in range(3):
    noise = torch.randn(7, 2)
    of_critic.zero_grad()
    (critic(generator(noise).detach()).mean() - critic(x).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(generator(noise)).mean()).backward()
    of_generator.step()
weights("two-optimisers", nn.ModuleList([generator, critic]))

model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
model(x[:2])  # fewer than two for each rank: whole
weights("batch-norm", model)
print("averages", model[1].running_mean.sum().item())
"""


def named(text: str) -> dict[str, list[float]]:
    found = [line.split() for line in text.splitlines() if re.match(r"[a-zA-Z-]+ [-\d]", line)]
    return {name: list(map(float, numbers)) for name, *numbers in found}


def table(text: str) -> str:
    """What was done, without the breaks of lines."""
    return " ".join(line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 3)


def test_weights_are_those_of_one_rank(tmp_path, command, mpirun):
    program = tmp_path / "program.py"
    program.write_text(ALIKE)
    alone = named(command(sys.executable, program).stdout)
    assert len(alone) == 14
    for ranks in (2, 3):
        found = mpirun(ranks, "mpiddl", "run", program)
        assert found.returncode == 0, found.stderr
        mine = named(found.stdout)
        assert {name: mine[name] == pytest.approx(alone[name], rel=1e-9) for name in alone} == dict.fromkeys(alone, True)
        said = table(found.stderr)
        assert f"each was divided over {ranks} ranks" in said
        for reason in ("it has hooks of the program", "use_reentrant=True", "or more can be divided"):
            assert reason in said


OTHER = HEAD + """
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
model = small()
for _ in range(3):
    (model(x + rank).square().mean()).backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
assert len(set(MPI.COMM_WORLD.allgather(repr([p.sum().item() for p in model.parameters()])))) == 1
"""


def test_ranks_with_other_samples_average_their_gradients(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(OTHER)
    found = mpirun(3, "mpiddl", "run", program)
    assert found.returncode == 0, found.stderr
    assert "3 forward passes of other samples on each rank" in table(found.stderr)


RANDOM = HEAD + """
from mpi4py import MPI
dropout = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
dropout[0].weight.data.copy_(torch.eye(5))
dropout[0].bias.data.zero_()
before = torch.get_rng_state()
out = dropout(torch.ones(40, 5))
assert not torch.equal(before, torch.get_rng_state())
assert out.shape == (40, 5)
rows = (out != 0).long() @ (2 ** torch.arange(5))
assert len(set(rows.tolist())) > 8, rows  # the ranks' masks differ
assert not torch.equal(rows[:20], rows[20:])
assert len(set(MPI.COMM_WORLD.allgather((repr(out.tolist()), repr(torch.get_rng_state().tolist()))))) == 1

class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.seen = nn.Linear(5, 5), nn.Dropout(0.5), []
    def forward(self, x):
        out = self.drop(self.a(x))
        self.seen.append((out == 0).tolist())
        return out

model = Drops()
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in torch.utils.data.DataLoader(torch.ones(8, 5), batch_size=8):
    checkpoint(lambda x: model(x), rows, use_reentrant=False, early_stop=False).square().sum().backward()
assert len(model.seen) == 2 and model.seen[0] == model.seen[1]  # the same units once more in the backward pass
assert len(set(map(repr, MPI.COMM_WORLD.allgather(model.seen[0])))) == MPI.COMM_WORLD.size
"""


def test_random_numbers_differ_between_ranks_in_a_pass_only(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(RANDOM)
    found = mpirun(2, "mpiddl", "run", program)
    assert found.returncode == 0, found.stderr


def test_strategies_that_exchange_models_only_replicate(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(HEAD + 'model = small()\ntrain("once", model, lambda: model(x).square().mean())\n')
    found = mpirun(2, "mpiddl", "run", "--strategy", "gossip", program)
    assert found.returncode == 0, found.stderr
    assert "divides only the batches of a DataLoader" in table(found.stderr)
    assert "only replicated, not distributed" in table(found.stderr)


def test_ranks_that_differentiate_different_passes_are_one_error(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(HEAD + """
from mpi4py import MPI
model = small()
for _ in range(3):
    out = model(x)
    if MPI.COMM_WORLD.rank:
        out.mean().backward()
""")
    found = mpirun(2, "mpiddl", "run", program)
    assert found.returncode != 0
    assert "expected the same on all ranks" in found.stderr


EVALUATED = HEAD + """
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    model.eval()
    print("rows", sum(len(b) for _, b in loader))
    model.train()
    for a, b in loader:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward() if len(a) > 1 else None
        optimiser.step()
"""


def test_a_loader_iterated_in_evaluation_mode_is_whole(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(EVALUATED)
    found = mpirun(2, "mpiddl", "run", program)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["rows", "7", "rows", "7"]
    assert "iterated 2 times: each batch was divided over 2 ranks; iterated 2 times whole" in table(found.stderr)
