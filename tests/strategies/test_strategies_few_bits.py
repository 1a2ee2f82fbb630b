"""Averages in few bits: codes and what they lose, the mean by two steps, gossip that sends so, and its bytes."""

from __future__ import annotations

import shutil
import tracemalloc

import numpy as np
import pytest
from harness.mixing import SIZE, mixed, walks
from harness.short_runs import JOB, distance, on_virtual_ranks, weights
from numba import typeof

import mpiddl
from mpiddl.collectives.mean_quantised import mean_quantised, owned
from mpiddl.errors import ConvergenceError, MismatchError, UsageError
from mpiddl.kernels import quantise as quantising
from mpiddl.kernels.quantise import BLOCK, MIDDLES, add_quantised, quantise
from mpiddl.strategies import Gossip, GossipAdaptive, LocalSGD, chain, make_strategy
from mpiddl.transport import virtual

LENGTHS = [0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7]
LOST = {8: 1e-3, 4: 0.03, 2: 0.14}
"""At most, of the sum of squares of normal numbers."""

each_bits = pytest.mark.parametrize("bits", MIDDLES)
virtually = pytest.mark.no_mpi


def sent(values, bits):
    """What arrives of ``values``, and what is left of them."""
    left, arrived = values.copy(), np.zeros_like(values)
    scales, codes = np.full(-(-values.size // BLOCK), 7, np.float32), np.full(-(-values.size * bits // 8), 255, np.uint8)
    quantise(left, scales, codes, bits)
    add_quantised(arrived, scales, codes, bits)
    return arrived, left


def sent_by_numpy(values, bits):
    """The same as `sent`, a block at a time, as its text says it."""
    arrived = np.zeros_like(values)
    for begin in range(0, values.size, BLOCK):
        part = values[begin : begin + BLOCK]
        largest = abs(part).max() / part.dtype.type(MIDDLES[bits])
        scale = 0.9957 * np.sqrt(np.mean(part.astype(float) ** 2)) if bits == 2 else largest
        step = part.dtype.type(np.float32(scale))
        codes = np.clip(np.rint(part * (1 / step) + MIDDLES[bits]), 0, 2 * MIDDLES[bits])
        arrived[begin : begin + BLOCK] = (codes - MIDDLES[bits]).astype(part.dtype) * step
    return arrived


def normal(*shape, dtype=np.float64):
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


@virtually
@each_bits
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", LENGTHS)
def test_what_does_not_arrive_is_left(count, dtype, bits):
    values = normal(count, dtype=dtype)
    arrived, left = sent(values, bits)
    np.testing.assert_allclose(arrived + left, values, atol=8 * np.finfo(dtype).eps)
    for begin in range(0, count, BLOCK):
        part = slice(begin, begin + BLOCK)
        assert len(np.unique(arrived[part])) <= 2**bits
        if bits > 2:
            assert abs(left[part]).max() <= abs(values[part]).max() / MIDDLES[bits] * 0.5001
    if count > BLOCK:
        assert left @ left < LOST[bits] * (values @ values)


@virtually
@each_bits
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_codes_are_those_of_numpy(dtype, bits):
    values = normal(9 * BLOCK + 5, dtype=dtype)
    arrived, wanted = sent(values, bits)[0], sent_by_numpy(values, bits)
    near = np.isclose(arrived, wanted, rtol=1e-6, atol=1e-12)
    assert near.mean() > 0.999  # sums of squares in another order may turn what is halfway


@virtually
@each_bits
def test_what_is_kept_stays_bounded_however_few_numbers_of_a_block_change(bits):
    """One of 256 changes, always the same way: two bits say so little of it that some ten changes are under way."""
    kept, scales, codes, norms = np.zeros(BLOCK), np.empty(1, np.float32), np.empty(BLOCK * bits // 8, np.uint8), []
    for _ in range(300):
        kept[7] += 1
        quantise(kept, scales, codes, bits)
        norms.append(np.linalg.norm(kept))
    assert max(norms) < 12 and np.ptp(norms[100:]) < 3


@virtually
@each_bits
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_next_to_nothing_are_kept_and_such_as_are_none_arrive_as_none(dtype, bits):
    values = normal(4 * BLOCK, dtype=dtype)
    values[:BLOCK] = 0
    values[BLOCK : 2 * BLOCK] = np.finfo(dtype).smallest_subnormal * 3
    arrived, left = sent(values, bits)
    assert not arrived[: 2 * BLOCK].any() and left[: 2 * BLOCK].tobytes() == values[: 2 * BLOCK].tobytes()
    for bad in (np.nan, np.inf, -np.inf):
        values[2 * BLOCK + 5] = bad
        arrived, left = sent(values, bits)
        assert np.isnan(arrived).reshape(4, BLOCK).all(axis=1).tolist() == [False, False, True, False]
        assert np.isfinite(arrived[3 * BLOCK :]).all()
    assert np.isnan(sent(np.full(3, 1e300), bits)[0]).all()  # beyond what a scale can tell


def means(comm, count, bits, dtype, rounds=3):
    """Each round's mean, and what is kept after the last."""
    part = owned(count, comm.size, comm.rank)
    unsent, owed, found = np.zeros(count, dtype), np.zeros(part.stop - part.start, dtype), []
    for number in range(rounds):
        unsent += draw(count, comm.rank, number, dtype)
        mean = np.full(count, 9, dtype)
        mean_quantised(comm, unsent, owed, mean, bits)
        found.append(mean)
    return np.array(found), unsent, owed, part


def draw(count, rank, number, dtype):
    return np.random.default_rng([rank, number]).standard_normal(count).astype(dtype)


@virtually
@each_bits
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", LENGTHS)
def test_nothing_is_lost_for_good_and_all_have_the_same(size, count, bits):
    found = virtual.run(size, lambda comm: means(comm, count, bits, np.float64))
    given = np.sum([draw(count, rank, number, float) for rank in range(size) for number in range(3)], axis=0)
    kept = np.sum([unsent for _, unsent, _, _ in found], axis=0)
    for *_, owed, part in found:
        kept[part] += size * owed
    assert len({each.tobytes() for each, *_ in found}) == 1
    np.testing.assert_allclose(size * found[0][0].sum(axis=0) + kept, given, atol=1e-12)


@virtually
def test_a_mean_takes_no_memory_but_that_of_its_messages():
    count = 1000 * BLOCK
    arrays = [[np.ones(count), np.zeros(count // 2), np.empty(count)] for _ in range(2)]
    quantised = count * 2 // 8 + 4 * count // BLOCK
    virtual.run(2, lambda comm: mean_quantised(comm, *arrays[comm.rank], 2))
    tracemalloc.start()
    virtual.run(2, lambda comm: mean_quantised(comm, *arrays[comm.rank], 2))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2 * quantised < most < 2 * 4 * quantised  # of two ranks; virtual ones copy what they send


@pytest.mark.mpi
@each_bits
@pytest.mark.parametrize("count", [3, 5 * BLOCK + 7])
def test_real_ranks_have_the_bits_of_virtual_ones(comm, count, bits):
    real = means(comm, count, bits, np.float32)
    imagined = virtual.run(comm.size, lambda one: means(one, count, bits, np.float32))[comm.rank]
    for mine, other in zip(real[:3], imagined[:3], strict=True):
        assert mine.tobytes() == other.tobytes()


@virtually
@each_bits
def test_bytes_are_those_of_codes_and_scales(bits):
    steps, given = 20, lambda rank, step: draw(2 * BLOCK + 10, rank if step else 0, step, np.float32)
    found = mixed(Gossip("complete", period=5, bits=bits), 4, steps, given)
    whole, rest = 4 + BLOCK * bits // 8, 4 + -(-10 * bits // 8)
    wanted = [3 * each + (2 * whole + rest - each) for each in (whole, whole, rest, 0)]  # ranks 0 to 2 own a block each
    final = 2 * 3 * 4 * (2 * BLOCK + 10) // 4
    assert [meter.bytes for *_, meter in found] == [steps // 5 * each + final for each in wanted]


@virtually
@pytest.mark.parametrize("name", ["gossip:period=3", "gossip:period=3,outer=0.5", "gossip-adaptive:theta=0.4",
                                  "gossip-scheduled:share=0.3"])  # fmt: skip
def test_ranks_agree_and_are_near_to_those_that_send_all_bits(name):
    def given(rank, step):  # all begin alike
        return walks()(rank if step else 0, step)

    exact, near = (mixed(make_strategy(f"{name},graph=complete,{more}"), 5, 60, given) for more in ("", "bits=8"))
    assert len({final.tobytes() for _, final, *_ in near}) == 1
    assert 0 < np.linalg.norm(near[0][1] - exact[0][1]) < 0.05 * np.sqrt(SIZE)
    if "gossip:" in name:
        assert len({seen[59].tobytes() for seen, *_ in near}) == 1  # the last step is that of an average


@virtually
@each_bits
def test_what_rounding_has_lost_does_not_grow_with_the_number_of_averages(bits):
    """It is sent with the next average. Without that, ranks that always move in the same way drift away from all bits."""

    def given(rank, step):
        return draw(SIZE, rank if step else 0, 1, np.float64)

    lost = []
    for steps in (10, 200):
        exact, near = (mixed(Gossip("complete", bits=each), 3, steps, given)[0][1] for each in (0, bits))
        lost.append(np.linalg.norm(near - exact))
    assert 0 < lost[1] < 4 * lost[0]


@virtually
def test_one_rank_does_as_with_all_bits():
    one, other = (mixed(Gossip("complete", bits=bits), 1, 9, walks())[0][0].tobytes() for bits in (0, 2))
    assert one == other


@virtually
@pytest.mark.parametrize("name", ["gossip:graph=complete,period=3,bits=4",
                                  "gossip-adaptive:graph=complete,traffic=0.3,bits=8,outer=0.3"])  # fmt: skip
def test_they_learn_and_go_on_after_a_kill_as_if_it_had_not_been(tmp_path, name):
    settings = {"out": tmp_path, "checkpoint_every": 30}
    straight = on_virtual_ranks(3, make_strategy(name), **settings)
    for kept in sorted((tmp_path / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(kept)
    resumed = on_virtual_ranks(3, make_strategy(name), **settings, resume=True)
    assert len({weights(result).tobytes() for result in straight + resumed}) == 1
    assert resumed[0].summary["test_accuracy"] > 0.6


@virtually
@pytest.mark.parametrize("composed", [False, True])
def test_kernels_are_compiled_before_the_first_step(monkeypatch, composed):
    before, within, steps = set(), set(), []

    def listening(name, real):
        def call(*given):
            (within if steps else before).add((name, *map(typeof, given)))
            real(*given)

        return call

    class Marking(Gossip):
        def combine(self, comm, state, grad, replica, step):
            steps.append(step)
            return super().combine(comm, state, grad, replica, step)

    for name in ("_quantise", "_add"):
        monkeypatch.setattr(quantising, name, listening(name, getattr(quantising, name)))
    strategy = Marking("complete", bits=4)
    on_virtual_ranks(2, chain(strategy, LocalSGD(9)) if composed else strategy, max_steps=2)
    assert len(within) == 2 and within <= before


@virtually
def test_a_number_that_is_none_ends_training():
    def given(rank, step):
        return np.where((rank == 1) & (step == 3) & (np.arange(SIZE) == 7), np.nan, 0.1)

    assert all(np.isnan(final).all() for _, final, *_ in mixed(Gossip("complete", bits=4), 3, 6, given))
    with pytest.raises(ConvergenceError):
        on_virtual_ranks(2, Gossip("complete", bits=4), **{**JOB, "rate": 1e12})


@virtually
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gossip:graph=complete,bits=3", "bits: got 3, expected 8, 4, 2, or 0 for no compression"),
        ("gossip:bits=4", "bits: got 4 with graph=exponential, expected graph=complete or bits=0"),
        ("gossip:graph=complete,bits=4,direction=push", "bits: got 4 with direction=push, expected direction=symmetric"),
        ("gossip:graph=complete,bits=4,momentum=average", "bits: got 4 with momentum=average, expected momentum=own"),
        ("gossip-scheduled:graph=complete,bits=4,pace=own", "bits: got 4 with pace=own, expected pace=together"),
        ("gossip-adaptive:graph=complete,bits=4,tensors=1", "bits: got 4 with tensors=1, expected bits=0 or tensors=0"),
    ],
)
def test_what_makes_no_sense(name, message):
    with pytest.raises(UsageError, match=message):
        make_strategy(name)


@virtually
def test_ranks_that_begin_with_other_models_are_refused():
    with pytest.raises(MismatchError, match=r"gossip with bits=4: parameters to begin with .* rank 2 "):
        mixed(Gossip("complete", bits=4), 3, 2, lambda rank, step: np.full(SIZE, rank // 2 + step, np.float32))


@virtually
def test_weights_of_ones_own_need_all_bits():
    with pytest.raises(UsageError, match="bits: got 8 with graph=weights, expected graph=complete"):
        GossipAdaptive(np.full((3, 3), 1 / 3), bits=8)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["gossip:graph=complete,period=2,bits=2,outer=0.3",
                                  "gossip-adaptive:graph=complete,theta=0.05,bits=8"])  # fmt: skip
def test_on_real_ranks_as_on_virtual_ones(comm, name):
    few = {**JOB, "max_steps": 25}
    real = mpiddl.train("mlp", "digits", comm=comm, strategy=name, **few)
    assert distance(weights(real), weights(on_virtual_ranks(comm.size, make_strategy(name), **few)[0])) < 1e-9
