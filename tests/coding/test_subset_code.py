"""The published code: every receiver recovers every bit, from packets in any order, and no broken packet is believed."""

from __future__ import annotations

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddl.coding.clip_quantisation import quantise
from mpiddl.coding.subset_code import SubsetCode, as_words
from mpiddl.coding.subset_decoder import SubsetDecoder
from mpiddl.errors import DecodeError, ShapeError, UsageError

pytestmark = pytest.mark.no_mpi

CASES = [(n, r) for n in range(1, 7) for r in range(1, n + 1)]


def random_words(code, words, seed=0):
    blocks = np.random.default_rng(seed).integers(0, 2**32, (len(code.placement.owners), words), np.uint32)
    return dict(enumerate(blocks))


def own_blocks(code, blocks, worker):
    return {block: blocks[block] for block in code.placement.blocks[worker]}


def packets(code, blocks):
    """What all workers send; each encodes from its own blocks alone."""
    made = []
    for worker in range(code.workers):
        own = own_blocks(code, blocks, worker)
        for subset in code.subsets(worker):
            made.append(np.full(code.packet_words(own[next(iter(own))].size), 0xDEADBEEF, np.uint32))
            code.encode(worker, subset, own, made[-1])
    return made


def check_recovery(code, blocks, sent):
    for worker in range(code.workers):
        decoder = SubsetDecoder(code, worker, own_blocks(code, blocks, worker))
        wanted = decoder.missing
        assert wanted == comb(code.workers - 1, code.redundancy) * code.redundancy
        assert sum(decoder.add(packet) for packet in sent) == wanted and decoder.complete
        for block, words in blocks.items():
            assert (decoder.block(block) == words).all() and decoder.block(block).size == words.size


@pytest.mark.parametrize("xor", [False, True])
@pytest.mark.parametrize(("workers", "redundancy"), CASES)
def test_every_receiver_recovers_every_block(workers, redundancy, xor):
    code = SubsetCode(workers, redundancy, xor)
    for words in (0, 1, redundancy - 1, redundancy, 11):
        blocks = random_words(code, words)
        sent = packets(code, blocks)
        assert len(sent) == comb(workers, redundancy + 1) * (redundancy + 1)
        assert (redundancy == workers) == (not sent)
        check_recovery(code, blocks, sent)


def test_the_packet_of_the_paper():
    code, blocks = SubsetCode(4, 2), dict(enumerate(np.arange(24, dtype=np.uint32).reshape(6, 4)))
    assert code.placement.owners == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    packet = np.empty(code.packet_words(4), np.uint32)
    code.encode(2, (1, 2, 3), own_blocks(code, blocks, 2), packet)
    # For worker 1 the first half of block 5, for worker 3 the second half of block 3.
    assert packet.tolist() == [5, 0, 3, 1, 20 + 14, 21 + 15]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_floats_are_recovered_bit_by_bit(dtype, size):
    code = SubsetCode(5, 3, xor=True)
    floats = np.random.default_rng(1).standard_normal((10, size)).astype(dtype)
    floats[0, 0], floats[1, 0], floats[2, 0], floats[3, 0] = np.nan, -np.inf, -0.0, np.finfo(dtype).smallest_subnormal
    blocks = {block: as_words(values) for block, values in enumerate(floats)}
    sent = packets(code, blocks)
    check_recovery(code, blocks, sent)
    decoder = SubsetDecoder(code, 4, own_blocks(code, blocks, 4))
    assert [decoder.add(packet) for packet in sent].count(True) == 12
    assert decoder.block(0).view(dtype).tobytes() == floats[0].tobytes()


def test_quantised_gradients_are_recovered():
    code = SubsetCode(4, 2)
    whole = np.empty((6, 9), np.int32)
    for row, values in zip(whole, np.random.default_rng(2).uniform(-11, 11, (6, 9)), strict=True):
        quantise(values, row)
    blocks = {block: as_words(row) for block, row in enumerate(whole)}
    check_recovery(code, blocks, packets(code, blocks))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(3, 1), (4, 2), (5, 2), (5, 3)]), st.integers(0, 9), st.integers(0, 2**32))
def test_any_order_and_copies(case, words, seed):
    chance, code = np.random.default_rng(seed), SubsetCode(*case)
    blocks = random_words(code, words, seed)
    worker = int(chance.integers(code.workers))
    decoder = SubsetDecoder(code, worker, own_blocks(code, blocks, worker))
    arriving = [packet for packet in packets(code, blocks) for _ in range(2)]
    before = [packet.copy() for packet in arriving]
    for number in chance.permutation(len(arriving)):
        left = decoder.missing
        assert decoder.complete == (left == 0)
        assert decoder.add(arriving[number]) == (decoder.missing == left - 1)
        assert not decoder.add(arriving[number])
    assert decoder.complete and all((old == new).all() for old, new in zip(before, arriving, strict=True))
    assert all((decoder.block(block) == row).all() for block, row in blocks.items())


def test_a_block_is_there_only_when_all_its_pieces_are():
    code = SubsetCode(4, 2)
    blocks = random_words(code, 6)
    decoder = SubsetDecoder(code, 3, own_blocks(code, blocks, 3))
    packet = np.empty(code.packet_words(6), np.uint32)
    code.encode(0, (0, 1, 3), blocks, packet)
    assert decoder.add(packet)
    with pytest.raises(UsageError, match=r"block: got 0, whose pieces \[1\] are missing"):
        decoder.block(0)
    code.encode(1, (0, 1, 3), blocks, packet)
    assert decoder.add(packet) and (decoder.block(0) == blocks[0]).all() and not decoder.complete


def test_packets_of_other_sets_and_own_packets_change_nothing():
    code = SubsetCode(5, 2)
    blocks = random_words(code, 3)
    decoder = SubsetDecoder(code, 4, own_blocks(code, blocks, 4))
    packet = np.empty(code.packet_words(3), np.uint32)
    for sender, subset in ((0, (0, 1, 2)), (4, (0, 3, 4))):
        code.encode(sender, subset, blocks, packet)
        assert not decoder.add(packet) and decoder.missing == 12


@pytest.mark.parametrize("workers", [4, 6])
def test_only_headers_of_real_packets_are_believed(workers):
    code = SubsetCode(workers, 2)
    real = {code.parts(worker, subset) for worker in range(workers) for subset in code.subsets(worker)}
    assert len(real) == 3 * comb(workers, 3)
    count = len(code.placement.owners)
    some = [(block, place) for block in [*range(count), count, 2**32 - 1] for place in (0, 1, 2)]
    for one in some:
        for two in some:
            if (one, two) in real:
                code.check_parts((one, two))
            else:
                with pytest.raises(DecodeError, match="packet: got blocks and places"):
                    code.check_parts((one, two))


def test_a_broken_header_changes_nothing():
    code = SubsetCode(4, 2)
    blocks = random_words(code, 5)
    decoder = SubsetDecoder(code, 0, own_blocks(code, blocks, 0))
    real = {tuple(packet[:4].tolist()) for packet in packets(code, blocks)}
    for packet in packets(code, blocks):
        for word, bit in product(range(4), range(32)):
            broken = packet.copy()
            broken[word] ^= np.uint32(1 << bit)
            if tuple(broken[:4].tolist()) not in real:
                with pytest.raises(DecodeError, match="packet: got blocks and places"):
                    decoder.add(broken)
    assert decoder.missing == 6


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 3), st.lists(st.integers(0, 12) | st.integers(0, 2**32 - 1), max_size=12))
def test_random_packets_give_an_error_or_a_piece(worker, numbers):
    code = SubsetCode(4, 2)
    decoder = SubsetDecoder(code, worker, own_blocks(code, random_words(code, 8), worker))
    left = decoder.missing
    try:
        new = decoder.add(np.array(numbers, np.uint32))
    except DecodeError:
        new = False
    assert decoder.missing == left - new


@pytest.mark.parametrize("change", [lambda packet: packet[:-1], lambda packet: np.append(packet, packet[:1]),
                                    lambda packet: packet.astype(np.int64), lambda packet: packet[None]])  # fmt: skip
def test_packets_of_a_wrong_size(change):
    code = SubsetCode(4, 2)
    blocks = random_words(code, 5)
    decoder = SubsetDecoder(code, 0, own_blocks(code, blocks, 0))
    with pytest.raises(DecodeError, match=r"packet: got u?int\d\d of shape \(.*\), expected uint32 of shape \(7,\)"):
        decoder.add(change(packets(code, blocks)[-1]))
    assert decoder.missing == 6


def test_subsets_are_made_one_at_a_time():
    found = iter(SubsetCode(14, 7).subsets(3))
    first = next(found)
    assert first == (0, 1, 2, 3, 4, 5, 6, 7) and not isinstance(found, list)
    rest = [first, *found]
    assert len(rest) == comb(13, 7) == len(set(rest)) and all(3 in subset and len(subset) == 8 for subset in rest)


def test_packets_of_a_worker_and_its_sets():
    code = SubsetCode(5, 3)
    for worker in range(5):
        assert list(code.subsets(worker)) == [subset for subset in combinations(range(5), 4) if worker in subset]


@pytest.mark.parametrize("redundancy", [0, 5, -1])
def test_a_redundancy_that_makes_no_sense(redundancy):
    with pytest.raises(UsageError, match=f"redundancy: got {redundancy} with 4 workers, expected"):
        SubsetCode(4, redundancy)


def test_arguments_that_do_not_fit():
    code = SubsetCode(3, 2)
    blocks, out = random_words(code, 4), np.empty(6, np.uint32)
    with pytest.raises(UsageError, match=r"blocks: got \[0\], expected also \[1\]"):
        code.encode(0, (0, 1, 2), {0: blocks[0]}, out)
    with pytest.raises(ShapeError, match=r"blocks\[1\]: got uint32 of shape \(3,\), expected uint32 of shape \(4,\)"):
        SubsetDecoder(code, 0, {0: blocks[0], 1: blocks[1][:3]})
    with pytest.raises(ShapeError, match=r"blocks\[0\]: got float32"):
        code.encode(0, (0, 1, 2), {0: blocks[0].view(np.float32), 1: blocks[1]}, out)
    with pytest.raises(ShapeError, match=r"out: got uint32 of shape \(5,\), expected uint32 of shape \(6,\)"):
        code.encode(0, (0, 1, 2), blocks, out[:5])
    for wrong in (np.zeros(4, np.int16), np.zeros((2, 2), np.int32), np.zeros(8)[::2]):
        with pytest.raises(ShapeError, match="array: got"):
            as_words(wrong)
