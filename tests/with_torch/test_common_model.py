"""Strategies that keep a model on each rank: the common model between epochs, and their state beside a checkpoint."""

from __future__ import annotations

import json
import os
import zipfile

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from mpiddl.strategies import make_strategy  # noqa: E402
from mpiddl.torch.coordinator import Coordinator  # noqa: E402
from mpiddl.torch.interception import Interception  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=2)

STRATEGIES = ["local-sgd:period=7", "gossip:graph=complete,period=3,bits=4", "gossip:graph=matching,momentum=average",
              "delayed:ahead=1", "elastic:period=2", "local-sgd:period=4,delay=2"]


@pytest.fixture
def program(link, comm, tmp_path_factory):
    """``program(strategy, load)``: two epochs, or the second one from a checkpoint. Returns what it saw."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("checkpoints")))
    rows = torch.randn(45, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, (rows[:, :1] > 0).float())

    def ran(strategy, load=False, path=f"{folder}/half.pt", change=False, freeze="", removes=False):
        torch.manual_seed(7)
        model = torch.nn.Linear(4, 1)
        coordinator = Coordinator(link.Dup(), make_strategy(strategy).resolve(link)[0])
        interception = Interception(coordinator)
        try:
            optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            if load:
                found = torch.load(path)
                model.load_state_dict(found["model"])
                optimiser.load_state_dict(found["optimiser"])
            seen, models = [], []
            for epoch in range(load, 2):
                for a, b in DataLoader(data, batch_size=5):
                    optimiser.zero_grad()
                    torch.nn.functional.mse_loss(model(a), b).backward()
                    optimiser.step()
                    if freeze == "inside" and len(models) == 3:
                        model.weight.requires_grad_(False)
                    models.append(len(set(comm.allgather(model.weight.detach().sum().item()))))
                seen.append(comm.allgather(model.weight.detach().clone()))
                if change:
                    with torch.no_grad():
                        model.weight.fill_(epoch)
                if freeze == "between":
                    model.weight.requires_grad_(False)
                if epoch == 0 and comm.rank == 0:
                    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, path)
            if removes and comm.rank == 0:
                os.remove(path)
            coordinator.finish()
            return seen, models, model.weight.detach().clone(), coordinator.facts.notes
        finally:
            interception.remove()
            for parameters in coordinator.sets:
                parameters.free()
            coordinator.comm.Free()

    ran.path = f"{folder}/half.pt"
    return ran


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_have_the_common_model_between_epochs(program, comm, strategy):
    seen, models, final, _ = program(strategy)
    for weights in seen:
        assert all(torch.equal(each, weights[0]) for each in weights)
    assert max(models) > 1 or comm.size == 2
    assert len({tuple(each.view(-1).tolist()) for each in comm.allgather(final)}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_that_loads_a_checkpoint_continues_as_if_it_had_not_stopped(program, strategy):
    _, models, final, notes = program(strategy)
    assert not notes
    _, again, same, notes = program(strategy, load=True)
    assert torch.equal(final, same) and again == models[len(models) // 2 :]
    assert "the ranks continued with their models" in notes[0]


def test_what_the_program_changes_between_epochs_stays(program):
    alone, _, _, _ = program("local-sgd:period=100")
    seen, _, _, _ = program("local-sgd:period=100", change=True)
    assert not torch.allclose(seen[1][0], alone[1][0])
    again, _, _, _ = program("local-sgd:period=100", load=True, change=True)
    assert torch.equal(again[0][0], seen[1][0])


@pytest.mark.parametrize("when", ["between", "inside"])
def test_parameters_that_are_frozen_are_equal_on_all_ranks(program, when):
    seen, _, _, _ = program("local-sgd:period=100", freeze=when)
    assert all(torch.equal(each, seen[0][0]) for weights in seen for each in weights)


def test_the_state_is_removed_with_its_checkpoint(program, comm):
    program("local-sgd:period=100")
    assert comm.bcast(os.path.exists(f"{program.path}.mpiddl"))
    program("local-sgd:period=100", removes=True)
    assert not comm.bcast(os.path.exists(f"{program.path}.mpiddl"))


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_state_that_does_not_fit_is_not_used(program, comm, content):
    program("local-sgd:period=7")
    if comm.rank == 0:
        with open(f"{program.path}.mpiddl", "r+b") as file:
            whole = file.read()
            file.seek(0)
            file.truncate()
            file.write(content if content is not None else whole[:-900] + bytes([whole[-900] ^ 1]) + whole[-899:])
    comm.barrier()
    _, _, _, notes = program("local-sgd:period=7", load=True)
    assert "was not used, it cannot be read" in notes[0]


def test_a_state_of_another_strategy_is_not_used(program):
    program("local-sgd:period=7")
    _, _, _, notes = program("local-sgd:period=5", load=True)
    assert "it is of the strategy LocalSGD" in notes[0]


@pytest.mark.parametrize("strategy", ["gossip:graph=complete", "local-sgd:period=3"])
def test_two_optimisers_and_a_rank_without_rows(link, comm, strategy):
    rows = torch.arange(2.0 * comm.size + 1).view(-1, 1)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    coordinator = Coordinator(link.Dup(), make_strategy(strategy).resolve(link)[0])
    interception = Interception(coordinator)
    try:
        optimisers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        for _ in range(2):
            for (a,) in DataLoader(TensorDataset(rows), batch_size=2 * comm.size):
                for model, optimiser in zip(models, optimisers, strict=True):
                    optimiser.zero_grad()
                    model(a).square().mean().backward()
                    optimiser.step()
        coordinator.finish()
    finally:
        interception.remove()
    assert len(set(comm.allgather(tuple(model.weight.item() for model in models)))) == 1
    for parameters in coordinator.sets:
        parameters.free()
    coordinator.comm.Free()


def test_a_state_of_another_form_is_not_used(program, comm):
    program("local-sgd:period=7")
    path = f"{program.path}.mpiddl"
    if comm.rank == 0:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        manifest = json.loads(members["manifest.json"])
        manifest["states"][1] = {"list": []}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in (members | {"manifest.json": json.dumps(manifest).encode()}).items():
                archive.writestr(name, content)
    comm.barrier()
    _, _, _, notes = program("local-sgd:period=7", load=True)
    assert "what it holds has another form" in notes[0]
