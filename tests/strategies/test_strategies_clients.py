"""The strategy interface against its hardest clients, on virtual ranks and on real ones, through the one loop."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from clients.bucketed import Bucketed
from clients.gossip import Gossip
from clients.served import Served
from harness.short_runs import JOB, distance, on_virtual_ranks, weights

import mpiddl
from mpiddl.errors import UsageError
from mpiddl.strategies import AllReduce, Alone, Auto, Delayed, Hierarchical, LocalSGD, Replica, Ring, Step, Strategy, chain
from mpiddl.transport import virtual

pytestmark = pytest.mark.no_mpi

ALL = [AllReduce(), LocalSGD(3), Bucketed(), Delayed(2), Hierarchical(4, 2), Served(), Gossip(), chain(LocalSGD(4), Delayed(1))]


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_any_strategy_runs_on_virtual_ranks_and_repeats_its_bits(strategy, size):
    first, again = on_virtual_ranks(size, strategy), on_virtual_ranks(size, strategy)
    assert len({weights(result).tobytes() for result in first + again}) == 1
    assert first[0].summary["test_accuracy"] > 0.6


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_any_strategy_runs_on_real_ranks(comm, strategy):
    result = mpiddl.train("mlp", "digits", comm=comm, strategy=strategy, **JOB)
    assert len(set(comm.allgather(weights(result).tobytes()))) == 1
    assert result.summary["test_accuracy"] > 0.6


@pytest.mark.mpi(min_size=2)
def test_messages_between_two_ranks_give_the_same_bits_on_real_and_virtual_ranks(comm):
    real = mpiddl.train("mlp", "digits", comm=comm, strategy=Gossip(), **JOB)
    assert weights(real).tobytes() == weights(on_virtual_ranks(comm.size, Gossip())[0]).tobytes()


def test_parts_reduced_during_the_backward_pass_are_the_whole_reduced_after_it():
    whole, parts = (weights(on_virtual_ranks(4, strategy)[0]) for strategy in (AllReduce(), Bucketed()))
    assert whole.tobytes() == parts.tobytes()


def test_parts_start_in_backward_order_before_the_gradient_is_complete():
    seen = []

    class Listening(Strategy):
        def start(self, comm, state, grad, part, step):
            seen.append((part.start, part.stop))
            return state

    mpiddl.train("mlp", "digits", strategy=Listening(), hidden=(32, 16), max_steps=1, **JOB)
    assert len(seen) >= 3 and seen == sorted(seen, reverse=True)
    assert sum(stop - start for start, stop in seen) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10


def test_members_of_a_chain_mix_in_their_order():
    class Doubling(Strategy):
        def mix(self, comm, state, replica, step):
            replica.params *= 2
            return state

    class Adding(Strategy):
        def mix(self, comm, state, replica, step):
            replica.params += 1
            return state

    replica, strategy = Replica(np.full(3, 5.0), {}), chain(Doubling(), Adding())
    strategy.mix(None, strategy.init(None, replica), replica, Step(0, 1, 1, 0.1))
    assert replica.params.tolist() == [11.0] * 3


def test_no_delay_is_synchronous():
    synchronous, delayed = (weights(on_virtual_ranks(3, strategy)[0]) for strategy in (AllReduce(), Delayed(0)))
    assert synchronous.tobytes() == delayed.tobytes()


def test_a_delay_applies_each_gradient_that_many_steps_later():
    late = on_virtual_ranks(2, Delayed(3), max_steps=3)[0]
    untouched = on_virtual_ranks(2, AllReduce(), epochs=0)[0]
    assert weights(late).tobytes() == weights(untouched).tobytes()


@pytest.mark.parametrize("strategy", [Delayed(3), LocalSGD(4), Gossip()], ids=repr)
def test_state_in_flight_survives_a_checkpoint(tmp_path, strategy, cut=6):
    straight = on_virtual_ranks(3, strategy, max_steps=30, out=tmp_path / "a", checkpoint_every=cut)[0]
    for kept in sorted((tmp_path / "a" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(kept)  # as if the job had been killed right after its first checkpoint
    resumed = on_virtual_ranks(3, strategy, max_steps=30, out=tmp_path / "a", checkpoint_every=cut, resume=True)[0]
    assert resumed.history[0]["step"] > cut
    assert weights(resumed).tobytes() == weights(straight).tobytes()


@pytest.mark.parametrize("strategy", [Delayed(3), LocalSGD(4), Gossip()], ids=repr)
def test_a_run_cut_short_goes_on_as_if_it_had_not_been(tmp_path, strategy):
    straight = on_virtual_ranks(3, strategy)[0]
    for steps in (5, 37, 0):
        resumed = on_virtual_ranks(3, strategy, out=tmp_path, max_steps=steps, resume=True)[0]
    assert weights(resumed).tobytes() == weights(straight).tobytes()


def test_a_served_run_is_kept_and_can_be_prolonged(tmp_path):
    first = on_virtual_ranks(3, Served(), out=tmp_path, epochs=1)[0]
    longer = on_virtual_ranks(3, Served(), out=tmp_path, epochs=2, resume=True)[0]
    assert (first.summary["steps"], longer.summary["steps"]) == (22, 44)  # of both workers


def test_workers_of_a_serving_rank_finish_at_different_steps():
    counts = {}

    class Counting(Served):
        def finish(self, comm, state, replica):
            super().finish(comm, state, replica)
            counts[comm.rank] = state["pushes"]

    result = on_virtual_ranks(4, Counting(budget=(0, 5, 12, 31)), epochs=4)
    assert counts[0] == [0, 5, 12, 31]
    assert result[0].summary["steps"] == 48 // 3


def test_one_worker_of_a_serving_rank_is_sequential():
    served = on_virtual_ranks(2, Served(), optimiser="sgd")[0]
    alone = mpiddl.train("mlp", "digits", strategy="alone", **{**JOB, "optimiser": "sgd"})
    assert weights(served).tobytes() == weights(alone).tobytes()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_pairwise_mixing_preserves_the_mean(size):
    def program(comm):
        params = np.random.default_rng(comm.rank).standard_normal(50)
        before = params.copy()
        for index in range(20):
            Gossip().mix(comm, {}, Replica(params, {}), Step(index, 1, size, 0.1))
        return before, params

    before, after = zip(*virtual.run(size, program), strict=True)
    assert distance(np.mean(after, axis=0), np.mean(before, axis=0)) < 1e-13
    assert np.std(after, axis=0).max() < np.std(before, axis=0).max()


def test_a_chain_of_one_is_its_member():
    alone, chained = (weights(on_virtual_ranks(2, s)[0]) for s in (AllReduce(), chain(AllReduce(), Strategy())))
    assert alone.tobytes() == chained.tobytes()


@pytest.mark.parametrize("pair", [(AllReduce(), Ring()), (LocalSGD(4, after=2), Delayed(1)), (Hierarchical(), Auto())], ids=str)
def test_gradients_are_summed_once(pair):
    with pytest.raises(UsageError, match=re.escape(f"chain: got {pair[0]!r} and {pair[1]!r}, which each sum the gradients")):
        chain(*pair)


def test_gradients_are_summed_once_also_by_a_users_strategy():
    class Summing(Strategy):
        sums_gradients = True

    with pytest.raises(UsageError, match="which each sum the gradients"):
        chain(Summing(), AllReduce())
    assert not Alone().sums and not chain(Alone(), LocalSGD()).sums


def test_a_chain_guesses_if_its_last_member_does():
    assert chain(LocalSGD(4), Delayed(1)).guesses and not chain(Delayed(1, ahead=0), LocalSGD(4)).guesses
