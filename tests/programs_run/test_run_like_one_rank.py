"""`mpiddl run`: what programs do beside their training leaves the weights those of one rank."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.no_mpi, pytest.mark.more]

PROGRAM = """
import collections, copy, dataclasses, importlib.util, queue, random, threading
import numpy as np
assert importlib.util.find_spec("torch")  # as libraries ask whether it is there
import torch
import accelerate
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
torch.manual_seed(5)
random.seed(5)
np.random.seed(5)
torch.set_default_dtype(torch.float64)
x = torch.randn(12, 4)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
mse = nn.functional.mse_loss

def weights(name, model, *more):
    print(name, *(p.detach().abs().sum().item() for p in model.parameters()), *more)

def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)

class Own(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.function, self.state, self.seen = nn.Linear(4, 3), forward, {}, collections.deque()
    def forward(self, *args, **options):
        return self.function(self, *args, **options)

def train(name, forward, *args, steps=3, loss=lambda out: out.square().mean(), more=lambda model: ()):
    model = Own(forward)
    optimiser = sgd(model)
    for step in range(steps):
        optimiser.zero_grad()
        loss(model(x + step, *args)).backward()
        optimiser.step()
    weights(name, model, *more(model))

# with a loader
model = nn.Linear(4, 1)
for epoch in range(60):
    optimiser = sgd(model, 0.1 * 0.98**epoch)
    for a, b in DataLoader(data, batch_size=12):
        optimiser.zero_grad()
        mse(model(a), b).backward()
        optimiser.step()
weights("optimisers-anew", model)

model = nn.Linear(4, 1)
optimiser = sgd(model)
for a, b in DataLoader(data, batch_size=6):
    for goal in (b, -b):
        for param, grad in zip(model.parameters(), torch.autograd.grad(mse(model(a), goal), list(model.parameters()))):
            param.grad = grad
        optimiser.step()
weights("autograd-grad", model)

model, optimiser = copy.deepcopy((model, optimiser))
for a, b in DataLoader(data, batch_size=6):
    optimiser.zero_grad()
    mse(model(a), b).backward()
    optimiser.step()
weights("copied", model)

class Thread(threading.Thread):
    def __init__(self, batches):
        super().__init__(daemon=True)
        self.batches, self.queue = batches, queue.Queue(1)
    def run(self):
        for each in self.batches:
            self.queue.put(each)
        self.queue.put(None)
    def __iter__(self):
        self.start()
        return iter(self.queue.get, None)

def batches_of(sizes):
    ends = np.cumsum(sizes)
    return DataLoader(data, batch_sampler=[list(range(end - size, end)) for size, end in zip(sizes, ends)])

for name, loader in (("few-rows-in-the-middle", batches_of([4, 1, 4, 2, 1])),
                     ("read-ahead", accelerate.ahead(batches_of([4, 1, 4, 2, 1]))),
                     ("read-ahead-uneven", accelerate.ahead(batches_of([5, 5, 2]))), ("thread", Thread(batches_of([5, 5, 2])))):
    model = nn.Linear(4, 1)
    optimiser = sgd(model, 0.3)
    for a, b in loader:
        optimiser.zero_grad()
        mse(model(a), b).backward()
        optimiser.step()
    weights(name, model)

first, second = nn.Linear(4, 1), nn.Linear(4, 1)
for part in (first, second):
    for a, b in batches_of([4, 1, 4, 2, 1]):
        part.zero_grad()
        mse(part(a), b).backward()
        with torch.no_grad():
            for param in part.parameters():
                param -= 0.1 * param.grad
    optimiser = sgd(first)
weights("by-hand-after-an-optimiser-of-the-same", nn.Sequential(first, second))

model, head = nn.Linear(4, 3), nn.Linear(3, 1)
optimiser = sgd(head)
for a, b in batches_of([4, 1, 4, 2, 1]):
    head.zero_grad(), model.zero_grad()
    mse(head(model(a)), b).backward()
    optimiser.step()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
weights("a-part-by-hand", nn.Sequential(model, head))

head, experts = nn.Linear(3, 1), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
optimiser = sgd(head)
gate = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 2, 1, 2, 0])
for rows, a, b in DataLoader(TensorDataset(gate, x, y), batch_size=4):
    head.zero_grad(), experts.zero_grad()
    mse(head(torch.stack([experts[number](row) for number, row in zip(rows.tolist(), a)])), b).backward()
    optimiser.step()
    with torch.no_grad():
        for param in experts.parameters():
            param -= 0.1 * (0 if param.grad is None else param.grad)
weights("experts-by-hand", nn.Sequential(head, *experts))

model, teacher = nn.Linear(4, 1), nn.Linear(4, 1)
optimiser = sgd(model)
for a, b in batches_of([4, 1, 4, 2, 1]):
    count = getattr(teacher, "count", 0)
    optimiser.zero_grad()
    out = model(a)
    (mse(out, b) + mse(out, teacher(a).detach()) / (1 + count)).backward()
    optimiser.step()
    teacher.count = count + 1
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), model.parameters()):
            slow.lerp_(fast, 0.5)
weights("teacher", model)

model = nn.Linear(4, 1)
optimiser = sgd(model)
for a, b in DataLoader(data, batch_size=6):
    for c, d in batches_of([4, 1, 4, 2, 1]):
        inner = sgd(model)
        optimiser.zero_grad()
        mse(model(c), d).backward()
        inner.step()
weights("optimisers-in-nested-loops", model)

loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
model = nn.Linear(4, 1)
optimiser = sgd(model)
for epoch in range(2):
    batches, number = iter(loader), torch.rand(1).item()
    for a, b in batches:
        optimiser.zero_grad()
        mse(model(a), b).backward()
        optimiser.step()
    batches, number = iter(DataLoader(data, batch_size=6, shuffle=True)), number + torch.rand(1).item()
    for a, b in batches:
        optimiser.zero_grad()
        mse(model(a), b).backward()
        optimiser.step()
weights("order-of-samples", model, number)

for fold in range(2):
    train_rows, kept = random_split(data, [8, 4])
    model = nn.Linear(4, 1)
    optimiser = sgd(model)
    for a, b in DataLoader(train_rows, batch_size=4, shuffle=True):
        optimiser.zero_grad()
        mse(model(a), b).backward()
        optimiser.step()
    weights("fold", model, *kept.indices)

model, times = nn.Linear(4, 1), 0
optimiser = sgd(model)
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("once")
for number, (a, b) in enumerate(DataLoader(data, batch_size=4)):
    optimiser.zero_grad()
    try:
        out = model(a)
        mse(Fails.apply(out) if number == 1 else out, b).backward()
    except ValueError:
        continue
    optimiser.step()
weights("caught-backward", model)

model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
optimiser = sgd(model)
for a, b in DataLoader(data, batch_size=5):
    optimiser.zero_grad()
    mse(model(a), b).backward(create_graph=True)
    sum(param.grad.square().mean() for param in model.parameters()).backward()
    optimiser.step()
weights("penalty-of-gradients", model)

table, model = nn.Embedding(3, 1, sparse=True), nn.Linear(4, 1)
both = torch.optim.SparseAdam(table.parameters(), lr=0.1), sgd(model)
for a, b in DataLoader(data, batch_size=3):
    for optimiser in both:
        optimiser.zero_grad()
    out, rows = model(a), (a[:, 0] > 0).nonzero()[:, 0]
    if len(rows):
        out = out + torch.zeros_like(out).index_copy(0, rows, table((a[rows, 1] > 0).long()))
    mse(out, b).backward()
    for optimiser in both:
        optimiser.step()
weights("sparse", model, table.weight.sum().item())

model = nn.Linear(4, 1).float()
optimiser = sgd(model)
for dtype in (torch.float32, torch.float64):
    model.to(dtype)
    for a, b in DataLoader(data, batch_size=5):
        optimiser.zero_grad()
        mse(model(a.to(dtype)), b.to(dtype)).backward()
        optimiser.step()
print("other-dtype", *(round(p.detach().abs().sum().item(), 4) for p in model.parameters()))

model = nn.Linear(4, 1)
optimiser = sgd(model, 0.01)
for a, b in DataLoader(data, batch_size=11):  # the second batch has one row
    mse(model(a), b, reduction="sum").backward()
optimiser.step()
weights("accumulated-sum", model)

model = nn.Linear(4, 1)
of_each = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
def step_now(param):
    of_each[param].step()
    of_each[param].zero_grad()
for param in model.parameters():
    param.register_post_accumulate_grad_hook(step_now)
for a, b in DataLoader(data, batch_size=6):
    mse(model(a), b).backward()
weights("step-in-backward", model)

model = nn.Linear(4, 1)
optimiser = torch.optim.LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe")
for a, b in DataLoader(data, batch_size=5):
    def closure():
        optimiser.zero_grad()
        loss = mse(model(a), b)
        loss.backward()
        return loss
    optimiser.step(closure)
weights("closures", model)

# without
kept = []
train("list-argument", lambda m, x, found: (found.append(0), m.a(x))[1], kept, more=lambda _: (len(kept),))
cache = torch.zeros(12, 3)
train("tensor-argument", lambda m, x, cache: (out := m.a(x), cache.copy_(out.detach()))[0], cache,
      more=lambda _: (cache.sum().item(),))
model = Own(lambda m, x, center=False: m.a(x) - m.a(x).mean(0) if center else m.a(x))
for center in (False, True, False, True):
    model(x, center=center).square().mean().backward()
weights("flag", model, *(p.grad.sum().item() for p in model.parameters()))
def with_state(m, x):
    out = m.a(x) + m.state.get("h", 0.0)
    m.state["h"] = out.detach()
    m.seen.append(len(x))
    return out
train("state", with_state, more=lambda m: (sum(m.seen), m.state["h"].sum().item()))
train("random", lambda m, x: m.a(x) * random.random() * np.random.rand())
def refuses(m, x):
    if (x.abs() > 100).any():
        raise ValueError
    return m.a(x)
model = Own(refuses)
optimiser = sgd(model)
for step in range(4):
    rows = x.clone()
    rows[0, 0] = 1000.0 if step == 1 else 0.0
    try:
        out = model(rows)
    except ValueError:
        continue
    optimiser.zero_grad()
    out.square().mean().backward()
    optimiser.step()
weights("caught-forward", model)
train("more-in-training", lambda m, x: (m.a(x), m.a(x).square()) if m.training else m.a(x),
      loss=lambda found: found[0].mean() + found[1].mean())
@dataclasses.dataclass
class Found:
    out: torch.Tensor
train("dataclass", lambda m, x: Found(m.a(x)), loss=lambda found: found.out.square().mean())
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
optimiser = sgd(model)
for _ in range(2):
    optimiser.zero_grad()
    first = model(x)
    model[0].requires_grad_(False)
    second = model(x + 1)
    model[0].requires_grad_(True)
    (first.square().mean() + second.square().mean()).backward()
    optimiser.step()
weights("frozen-in-between", model)
"""


READER = """
def ahead(loader):
    batches = iter(loader)
    now = next(batches)
    for later in batches:
        yield now
        now = later
    yield now
"""
"""Reads as Accelerate's loaders do, and has its name."""


def lines(text: str) -> list[tuple[str, list[float]]]:
    found = [line.split() for line in text.splitlines()]
    return [(words[0], list(map(float, words[1:]))) for words in found if words]


def test_weights_are_those_of_one_rank(tmp_path, command, mpirun):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "accelerate.py").write_text(READER)
    alone = lines(command(sys.executable, program).stdout)
    assert len(alone) == 31
    for ranks in (2, 3):
        found = mpirun(ranks, "mpiddl", "run", program)
        assert found.returncode == 0, found.stderr
        mine = lines(found.stdout)
        assert [name for name, _ in mine] == [name for name, _ in alone]
        differ = [name for (name, wanted), (_, values) in zip(alone, mine, strict=True)
                  if values != pytest.approx(wanted, rel=1e-8)]
        assert not differ
        assert "DataLoader of TensorDataset" in found.stderr
        assert "SGD optimisers" in found.stderr  # one row for those of a class
        assert "differ between ranks" not in found.stderr


CLOSURES = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
rows = torch.randn(64, 4)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=16)

def train(step):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for x, y in loader:
        def closure():
            optimiser.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss
        loss = step(optimiser, closure)
    return [*model.weight.flatten().tolist(), model.bias.item(), loss.item()]

def loss_first(optimiser, closure):
    loss = closure()
    optimiser.step()
    return loss

print(*train(loss_first))
print(*train(lambda optimiser, closure: optimiser.step(closure)))
print(*train(lambda optimiser, closure: optimiser.step(closure=closure)))
"""


def test_a_strategy_gets_the_gradient_of_a_closure(tmp_path, mpirun):
    (tmp_path / "program.py").write_text(CLOSURES)
    found = mpirun(2, "mpiddl", "run", "--strategy", "delayed", tmp_path / "program.py")
    assert found.returncode == 0, found.stderr
    first, *others = found.stdout.splitlines()
    assert others == [first, first]
