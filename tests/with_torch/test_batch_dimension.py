"""Which dimension counts samples: found for the usual kinds of modules, and not found where samples are mixed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.mpi(min_size=2)  # one rank has nothing to divide
nn = torch.nn


def found(link, module, *args, **options):
    from mpiddl.torch.batch_dimension import find_division

    return find_division(module, (args, options), link.size, link.rank, link.allgather)


def of(inputs, outputs):
    from mpiddl.torch.batch_dimension import Division, Place

    def places(given):
        return tuple(Place(each) if isinstance(each, int) else each for each in given)

    return Division(places(inputs), places(outputs))


class Flattened(nn.Module):
    """Gives (steps * samples, classes), as language models do."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 5), nn.Linear(5, 2)

    def forward(self, x, hidden):
        out, hidden = self.rnn(x, hidden)
        return self.head(out).flatten(0, 1), hidden


class WithLoss(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.head, self.reduction = nn.Linear(3, 4), reduction

    def forward(self, x, target=None):
        out = self.head(x)
        return out, nn.functional.cross_entropy(out, target, reduction=self.reduction)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        out = self.head(x)
        return out - out.mean(0)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.hidden, self.sizes = nn.RNN(3, 4), None, []

    def forward(self, x):
        out, self.hidden = self.rnn(x, self.hidden)
        self.sizes.append(len(x))
        return out


def test_samples_in_the_first_dimension(link):
    assert found(link, nn.Linear(3, 2), torch.zeros(9, 3)) == of([0], [0])
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    assert found(link, images, torch.zeros(9, 1, 8, 8)) == of([0], [0])
    assert found(link, nn.LSTM(3, 5, batch_first=True), torch.zeros(9, 8, 3)) == of([0], [0, 1, 1])


def test_samples_in_the_second_dimension(link):
    assert found(link, nn.LSTM(3, 5), torch.zeros(8, 9, 3)) == of([1], [1, 1, 1])
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    assert found(link, layer, torch.zeros(10, 9, 8), src_mask=mask) == of([1, None], [1])


def test_samples_in_a_flattened_dimension(link):
    from mpiddl.torch.batch_dimension import Place

    assert found(link, Flattened(), torch.zeros(8, 9, 3), torch.zeros(1, 9, 5)) == of([1, 1], [Place(0, inner=True), 1])


def test_losses_inside_the_module(link):
    from mpiddl.torch.batch_dimension import Reduced

    torch.manual_seed(1)
    x, target = torch.zeros(9, 3), torch.arange(9) % 4
    assert found(link, WithLoss("mean"), x, target=target) == of([0, 0], [0, Reduced(mean=True)])
    assert found(link, WithLoss("sum"), x, target=target) == of([0, 0], [0, Reduced(mean=False)])


def test_samples_that_depend_on_each_other_are_not_divided(link):
    for module, shape in ((Mixed(), (9, 3)), (Stateful(), (8, 9, 3))):
        assert isinstance(found(link, module, torch.zeros(shape)), str)
    assert "a trial in evaluation mode failed" in found(link, nn.Linear(3, 2), torch.zeros(9, 4))


def test_the_module_is_as_before(link):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module[2].eval()
    stateful, x = Stateful(), torch.zeros(8, 9, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    found(link, module, torch.ones(9, 3))
    found(link, stateful, x)
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [each.training for each in module] == [True, True, False]
    assert stateful.hidden is None
    assert stateful.sizes == []
    assert not torch.any(x)
