"""`mpiddl.torch.distribute`: the steps of one rank on many, and what is wrong in one sentence."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more]

PROGRAM = """
import torch, mpiddl.torch
from torch import nn
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
torch.manual_seed(3)
x = torch.randn(53, 6, dtype=torch.float64)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if {norm} else nn.Tanh(), nn.Linear(8, 2)).double()
if rank:
    nn.init.zeros_(model[0].weight)
optimiser = torch.optim.{optimiser}
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimiser, loader = mpiddl.torch.distribute(model, optimiser, loader, {options})
assert len(loader) == 7 and loader.batch_size == 8 and len(loader.dataset) == 53
rows = 0
for epoch in range(3):
    model.train()
    for number, (a, b) in enumerate(loader):
        if number == 5 + rank and {leaves}:
            break
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(a), b, reduction="{loss}").backward()
        optimiser.step()
        rows += len(a)
    with torch.no_grad():
        assert sum(len(b) for _, b in loader) == 53
    model.eval()
    assert sum(len(b) for _, b in loader) == 53
found = nn.functional.cross_entropy(model(x), y).item()
for each in range(MPI.COMM_WORLD.size):
    if each == rank:
        print("rows", rows, "weights", *(p.detach().abs().sum().item() for p in model.parameters()), "loss", found, flush=True)
    if not {leaves}:
        MPI.COMM_WORLD.Barrier()
"""

USUAL = {"norm": False, "optimiser": "Adam(model.parameters(), lr=0.01)", "options": "", "leaves": False, "loss": "mean"}

CASES = [
    {},
    {"loss": "sum", "options": "loss='sum'", "optimiser": "SGD(model.parameters(), lr=0.01, momentum=0.9)"},
    {"options": "'two-step'",
     "optimiser": "AdamW([{'params': model[0].parameters(), 'lr': 0.1}, {'params': model[2].parameters()}])"},
]


def lines(text: str) -> list[tuple[int, list[float], float]]:
    found = []
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["rows"]:
            end = words.index("loss")
            found.append((int(words[1]), list(map(float, words[3:end])), float(words[end + 1])))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_ranks_make_the_steps_of_one(tmp_path, mpirun, case):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**USUAL | case))
    (alone,) = lines(mpirun(1, "python", program).stdout)
    assert alone[0] == 3 * 53
    found = mpirun(3, "python", program)
    assert found.returncode == 0, found.stderr
    mine = lines(found.stdout)
    assert sum(rows for rows, _, _ in mine) == 3 * 53
    assert len(mine) == 3
    for _, weights, _ in mine:
        assert weights == pytest.approx(alone[1], rel=1e-9)


@pytest.mark.parametrize("strategy", ["gossip", "local-sgd:period=2", "asgd"])
def test_strategies_train(tmp_path, mpirun, strategy):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**USUAL | {"options": f"strategy={strategy!r}", "norm": True,
                                                 "optimiser": "SGD(model.parameters(), lr=0.1)"}))
    found = mpirun(2, "python", program)
    assert found.returncode == 0, found.stderr
    assert all(loss < 0.75 for _, _, loss in lines(found.stdout))


def test_ranks_may_leave_their_loops_at_different_steps(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(**USUAL | {"leaves": True}))
    found = mpirun(3, "python", program)
    assert found.returncode == 0, found.stderr
    assert len(lines(found.stdout)) == 3


OWN_BATCHES = """
import torch, mpiddl.torch
from mpi4py import MPI
model = torch.nn.Linear(2, 1)
model, optimiser = mpiddl.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.full((4, 2), 1.0 + MPI.COMM_WORLD.rank)
model(x).mean().backward()
assert torch.allclose(model.weight.grad, torch.full((1, 2), 1 + (MPI.COMM_WORLD.size - 1) / 2)), model.weight.grad
"""


def test_without_a_loader_gradients_are_averaged(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(OWN_BATCHES)
    found = mpirun(3, "python", program)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(("call", "wanted"), [
    ("model, model", "optimizer: got Linear, expected a torch.optim.Optimizer"),
    ("model, optimiser, [1, 2]", "loader: got list, expected a torch.utils.data.DataLoader"),
    ("model, optimiser, strategy='gosip'", "did you mean 'gossip'?"),
    ("model, lbfgs", "optimizer: got LBFGS, which needs the loss of all ranks"),
    ("model, optimiser, loss='men'", "loss: got 'men', expected one of mean, sum"),
    ("model, optimiser, loss='sum'", "loss: got 'sum' without a loader"),
])
def test_bad_arguments_are_one_error(call, wanted):
    import torch

    import mpiddl.torch
    from mpiddl.errors import UsageError

    model = torch.nn.Linear(2, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        eval(f"distribute({call})", {"distribute": mpiddl.torch.distribute, "model": model, "optimiser": optimiser,
                                     "lbfgs": torch.optim.LBFGS(model.parameters())})
    assert wanted in str(caught.value)


def test_under_mpiddl_run_it_is_one_error(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(OWN_BATCHES)
    found = mpirun(2, "mpiddl", "run", program)
    assert found.returncode != 0
    assert found.stderr.count("mpiddl: error:") == 1
    assert "distributes it already" in found.stderr


TWO_MODELS = """
import torch, mpiddl.torch
from torch import nn
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
loader = torch.utils.data.DataLoader(torch.randn(9, 4), batch_size=4)
critic, generator = nn.Linear(4, 1), nn.Linear(2, 4)
of_critic, of_generator = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (critic, generator))
critic, of_critic, loader = mpiddl.torch.distribute(critic, of_critic, loader)
generator, of_generator = mpiddl.torch.distribute(generator, of_generator)
for _ in range(2):
    for real in loader:
        of_critic.zero_grad()
        critic(real).square().mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        generator(real[:, :2]).square().mean().backward()
        of_generator.step()
both = nn.ModuleList([critic, generator])
print("rows", 0, "weights", *(p.detach().abs().sum().item() for p in both.parameters()), "loss", 0)
"""


def test_two_models_and_a_batch_of_one_row(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(TWO_MODELS)
    (alone,) = lines(mpirun(1, "python", program).stdout)
    found = mpirun(2, "python", program)
    assert found.returncode == 0, found.stderr
    assert lines(found.stdout)[0][1] == pytest.approx(alone[1], rel=1e-9)
