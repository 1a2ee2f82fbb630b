"""`mpiddl run`: an unchanged program of PyTorch makes the steps of one rank, on any number of ranks."""

from __future__ import annotations

import json
import re
import sys

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more]

HEAD = """
import sys, torch
from torch import nn
torch.manual_seed(3)
x = torch.randn(203, 10, dtype=torch.float64)
y = (x[:, 0] * x[:, 1] > 0).long()
data = torch.utils.data.TensorDataset(x, y)
model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).double()
def weights():
    print("weights", *(p.detach().abs().sum().item() for p in model.parameters()))
"""

TRAIN = HEAD + """
loader = torch.utils.data.DataLoader(data, batch_size={batch}, shuffle=True{loader})
optimiser = {optimiser}
schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.9)
for epoch in range(2):
    for number, (a, b) in enumerate(loader):
        optimiser.zero_grad({zero})
        for _ in range({passes}):
            nn.functional.cross_entropy(model(a), b, reduction="{reduction}").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
    schedule.step()
    with torch.no_grad():
        print("rows", sum(len(b) for _, b in loader))
weights()
"""

USUAL = {"batch": 20, "loader": "", "zero": "", "passes": 1, "reduction": "mean",
         "optimiser": "torch.optim.Adam(model.parameters(), lr=0.01)"}

CASES = [
    {},
    {"batch": 3},
    {"zero": "set_to_none=False"},
    {"passes": 2},
    {"reduction": "sum", "optimiser": "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"},
    {"loader": ", num_workers=1, drop_last=True"},
    {"optimiser": "torch.optim.AdamW([{'params': model[0].parameters(), 'lr': 0.1}, {'params': model[2].parameters()}])"},
    {"optimiser": "torch.optim.SGD(model[2].parameters(), lr=0.5)"},  # the gradients of all parameters are clipped
    {"optimiser": "torch.optim.SGD(model[:1].parameters(), lr=0.01)", "reduction": "sum"},
]


def numbers(text: str, name: str) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return [float(word) for line in lines for word in line.split()[1:]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_many_ranks_make_the_steps_of_one(tmp_path, command, mpirun, case):
    program = tmp_path / "program.py"
    program.write_text(TRAIN.format(**USUAL | case))
    alone = command(sys.executable, program).stdout
    for ranks, strategy in ((2, "auto"), (4, "auto:bucket_bytes=200")):
        found = mpirun(ranks, "mpiddl", "run", "--strategy", strategy, program)
        assert found.returncode == 0, found.stderr
        assert numbers(found.stdout, "weights") == pytest.approx(numbers(alone, "weights"), rel=1e-6)
        assert numbers(found.stdout, "rows") == numbers(alone, "rows")
        assert f"divided over {ranks} ranks" in re.sub(r"[│\s]+", " ", found.stderr)


LEAVES = HEAD + """
import os
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=20)
for epoch in range(2):
    for number, (a, b) in enumerate(loader):
        if number == 4 + rank:
            break
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimiser.step()
    if rank == 1 and {leaves}:
        {how}
weights()
"""


def test_ranks_may_leave_their_loops_at_different_steps(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(LEAVES.format(leaves=True, how="sys.exit(0)"))
    found = mpirun(3, "mpiddl", "run", program)
    assert found.returncode == 0, found.stderr
    assert len(numbers(found.stdout, "weights")) == 4


def test_an_exception_on_one_rank_ends_the_job(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(LEAVES.format(leaves=True, how="raise ValueError('of rank 1')"))
    found = mpirun(3, "mpiddl", "run", program)
    assert found.returncode != 0
    assert found.stderr.count("ValueError: of rank 1") == 1


FILES = """
import os, torch
from pathlib import Path
from mpi4py import MPI
os.makedirs("out/deep", exist_ok=True)
path = Path("out/deep/model.pt")
with open(path, "wb") as file:
    torch.save({"rank": torch.tensor(MPI.COMM_WORLD.rank)}, file)
with open(path, "rb") as file:
    assert torch.load(file)["rank"] == MPI.COMM_WORLD.rank
os.replace(path, "out/final.pt")
assert path.parent.exists() and not path.exists() and os.path.exists("out/final.pt")
os.remove("kept.txt") if MPI.COMM_WORLD.rank else None
print("rank", MPI.COMM_WORLD.rank)
"""


def test_files_and_printing_come_from_rank_0(tmp_path, mpirun):
    (tmp_path / "program.py").write_text(FILES)
    (tmp_path / "kept.txt").write_text("left alone")
    found = mpirun(3, "mpiddl", "run", "--quiet", "program.py", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["rank", "0"]
    assert (tmp_path / "kept.txt").exists()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["final.pt", "kept.txt", "program.py"]


STRATEGIES = ["allreduce", "ring", "two-step", "local-sgd:period=4", "gossip", "gossip:graph=complete,period=2,bits=2",
              "delayed", "elastic", "asgd", "dc-asgd-c", "hierarchical"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_train(tmp_path, mpirun, strategy):
    program = tmp_path / "program.py"
    program.write_text(TRAIN.format(**USUAL | {"optimiser": "torch.optim.SGD(model.parameters(), lr=0.05)"}) + """
loss = nn.functional.cross_entropy(model(x), y).item()
print("loss", loss)
""")
    found = mpirun(2, "mpiddl", "run", "--strategy", strategy, program)
    assert found.returncode == 0, found.stderr
    (loss,) = numbers(found.stdout, "loss")
    assert loss < 0.72


SPARSE = """
import torch
torch.manual_seed(3)
ids = torch.randint(0, 20, (60, 4))
table = torch.nn.EmbeddingBag(20, 2, sparse=True)
data = torch.utils.data.TensorDataset(ids, ids[:, 0] % 2)
optimiser = torch.optim.SparseAdam(table.parameters(), lr=0.1)
for epoch in range(4):
    for a, b in torch.utils.data.DataLoader(data, batch_size=20):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(table(a), b)
        loss.backward()
        optimiser.step()
print("loss", torch.nn.functional.cross_entropy(table(ids), ids[:, 0] % 2).item())
"""


@pytest.mark.parametrize("strategy", ["auto", "gossip:graph=complete", "local-sgd:period=2"])
def test_sparse_gradients(tmp_path, mpirun, strategy):
    program = tmp_path / "program.py"
    program.write_text(SPARSE)
    found = mpirun(2, "mpiddl", "run", "--strategy", strategy, program)
    assert found.returncode == 0, found.stderr
    assert numbers(found.stdout, "loss")[0] < 0.6


@pytest.mark.parametrize(("strategy", "wanted"), [
    ("coded-sum", "gradients of single blocks"), ("asgd:communication=two-sided", "only serve"),
    ("gosip", "did you mean 'gossip'?")])
def test_a_strategy_that_does_not_fit_is_one_error(tmp_path, mpirun, strategy, wanted):
    program = tmp_path / "program.py"
    program.write_text(HEAD)
    found = mpirun(2, "mpiddl", "run", "--strategy", strategy, program)
    assert found.returncode == 2
    assert found.stderr.count("mpiddl: error:") == 1
    assert wanted in found.stderr


def test_optimisers_that_differ_are_one_error(tmp_path, mpirun):
    program = tmp_path / "program.py"
    program.write_text(HEAD + """
from mpi4py import MPI
optimiser = torch.optim.SGD(list(model.parameters())[MPI.COMM_WORLD.rank:], lr=0.1)
for a, b in torch.utils.data.DataLoader(data, batch_size=20):
    nn.functional.cross_entropy(model(a), b).backward()
    optimiser.step()
""")
    found = mpirun(2, "mpiddl", "run", program)
    assert found.returncode != 0
    assert found.stderr.count("mpiddl: error:") == 1
    assert "have other parameters" in found.stderr


def test_a_program_that_distributes_itself_is_refused(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    done = mpirun(2, "mpiddl", "run", program)
    assert done.returncode != 0 and "init_process_group under `mpiddl run`" in done.stderr


def test_the_summary_holds_seconds_and_bytes(mpirun, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAIN.format(**USUAL))
    done = mpirun(2, "mpiddl", "run", "--quiet", "--summary", tmp_path / "summary.json", program)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["bytes"] > 0 and summary["seconds"] > 0
    assert any("divided over 2 ranks" in said for _, said in summary["found"])


ORDERS = HEAD + """
from torch.utils.checkpoint import checkpoint
loader = torch.utils.data.DataLoader(data, batch_size=7)  # 29 batches, no row left
optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if "{case}" == "small":
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:17], y[:17]), batch_size=8)  # one row left
if "{case}" == "hook":
    model[0].register_full_backward_hook(lambda module, *_: print("norm", module.bias.grad is None) and None)
for epoch in range(3):
    if "{case}" == "other" and epoch == 1:
        optimiser = torch.optim.SGD(model[2].parameters(), lr=0.01)
    for number, (a, b) in enumerate(loader):
        if "{case}" == "turns":
            model[0].requires_grad_(number % 2 == 0)
            model[2].requires_grad_(number % 2 == 1)
        hidden = model[1](model[0](a))
        found = checkpoint(model[2], hidden, use_reentrant=True) if "{case}" == "checkpoint" else model[2](hidden)
        sums = "sum" if "{case}" in ("checkpoint", "other") else "mean"
        nn.functional.cross_entropy(found, b, reduction=sums).backward()
        optimiser.step()
        optimiser.zero_grad()
weights()
"""


@pytest.mark.parametrize("case", ["small", "checkpoint", "other", "turns", "hook"])
def test_gradients_are_those_of_one_rank_in_any_order_of_calls(tmp_path, command, mpirun, case):
    program = tmp_path / "program.py"
    program.write_text(ORDERS.format(case=case))
    alone = numbers(command(sys.executable, program).stdout, "weights")
    for strategy in ("auto", "auto:bucket_bytes=200"):
        found = mpirun(3, "mpiddl", "run", "--strategy", strategy, program)
        assert found.returncode == 0, found.stderr
        assert numbers(found.stdout, "weights") == pytest.approx(alone, rel=1e-9)
