"""``mpiddl compare``: what it says to a file or to flags that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddl.cli import main
from mpiddl.compare.grid import make_grid
from mpiddl.errors import UsageError

pytestmark = pytest.mark.no_mpi

ASKED = {"strategies": ["two-step", "local-sgd", {"strategy": "asgd", "rate": 0.02}], "workers": [2, 4], "seeds": 2,
         "target": 0.9}  # fmt: skip


@pytest.mark.parametrize(("asked", "train", "said"), [
    ({"strategies": []}, {}, "strategies: got none"),
    ({"strategies": "asgd"}, {}, "strategies: got 'asgd'"),
    ({"strategies": ["asdg"]}, {}, "did you mean 'asgd'"),
    ({"strategies": [3]}, {}, "strategies: got 3"),
    ({"strategies": ["local-sgd:perod=8"]}, {}, "got 'perod=8'"),
    ({"strategies": ["local-sgd", "local-sgd:period=8"]}, {}, "which are the same"),
    ({"strategies": ["asgd", {"strategy": "dana", "label": "asgd"}]}, {}, "two strategies with the label 'asgd'"),
    ({"strategies": [{"strategy": "asgd", "rat": 1}]}, {}, "did you mean 'rate'"),
    ({"strategies": [{"strategy": "asgd", "rate": "high"}]}, {}, "rate: got 'high'"),
    ({"strategies": [{"strategy": "asgd", "label": ""}]}, {}, "label: got ''"),
    ({"strategies": [{"rate": 1.0}]}, {}, "expected a name or a table"),
    ({"workers": []}, {}, "workers: got []"),
    ({"workers": [4, 4]}, {}, "expected each value only once"),
    ({"workers": 0}, {}, "workers: got 0"),
    ({"workers": [True]}, {}, "workers: got [True]"),
    ({"workers": 10**9}, {}, "workers: got 1000000000, expected at most"),
    ({"seeds": "many"}, {}, "seeds: got 'many'"),
    ({"seeds": 10**9}, {}, "seeds: got 1000000000"),
    ({"seeds": 1000, "workers": list(range(1, 200))}, {}, "grid: got"),
    ({"target": 94}, {}, "target: got 94"),
    ({"target": float("nan")}, {}, "target: got nan"),
    ({"target": 0.9}, {"validation": 0.0}, "validation: got 0 in [train]"),
    ({"samples": 10, "bytes": 10}, {}, "budget: got samples and bytes"),
    ({"seconds": -1}, {}, "seconds: got -1"),
    ({"baseline": "ring"}, {}, "baseline: got 'ring', expected one of two-step, local-sgd"),
    ({"rates": 0.1}, {}, "rates: got 0.1, expected a list"),
    ({"rates": [0.1, -1]}, {}, "rates: got -1"),
    ({"rates": [0.1, 0.0]}, {}, "rates: got [0.1, 0.0], expected numbers above 0"),
    ({"rates": [0.1, 0.1]}, {}, "rates: got [0.1, 0.1]"),
    ({"rates": [float("nan")]}, {}, "rates: got nan"),
    ({"rates": [0.1], "seeds": [0, 1]}, {}, "seeds: got 0, expected other seeds"),
    ({"strategies": [{"strategy": "asgd", "rate": 0.1, "rates": [0.1]}]}, {}, "got rate and rates for asgd"),
    ({"strategies": [{"strategy": "asgd", "workers": [1, 2]}]}, {}, "workers: got [1, 2], expected one whole number"),
    ({"tune_workers": 0}, {}, "tune_workers: got 0"),
    ({"batch_per_worker": 1.5}, {}, "batch_per_worker: got 1.5"),
    ({"batch_per_worker": 8}, {"batch": 8}, "batch_per_worker: got a value in [compare] and batch in [train]"),
    ({"tune_workers": [2, 3]}, {}, "tune_workers: got [2, 3], expected one whole number"),
    ({"tune_workers": 100_000}, {}, "workers: got 100000, expected at most"),
    ({"batch_per_worker": [2, 4]}, {}, "batch_per_worker: got [2, 4], expected one whole number"),
    ({"strategies": ["ring", {"strategy": "alone", "workers": 5000}]}, {}, "workers: got 5000, expected at most"),
    ({"sede": 3}, {}, "unknown key of [compare] 'sede'; did you mean 'seeds'"),
    ({}, {"sede": 3}, "unknown setting 'sede'; did you mean 'seed'"),
    ({}, {"seed": 3}, "seed: got a value in [train], expected seeds"),
    ({}, {"strategy": "asgd"}, "strategy: got a value in [train], expected strategies"),
    ({}, {"rate": "high"}, "rate: got 'high'"),
])  # fmt: skip
def test_nonsense_is_refused(asked, train, said):
    with pytest.raises(UsageError) as refused:
        make_grid(train, {**ASKED, **asked})
    assert said in str(refused.value)


@pytest.mark.parametrize(("text", "flags", "said"), [
    (None, (), "No such file"),
    ("[compare", (), "not TOML"),
    ("", (), "got no [compare] table"),
    ("compare = 3", (), "compare: got 3, expected a table"),
    ("[compair]", (), "unknown table 'compair'; did you mean 'compare'"),
    ("[train]\nepochs = 1", (), "got no [compare] table"),
    ("\ufeff\x00", (), "not TOML"),
    ("a = " + "[" * 100_000, (), "not TOML"),
    ('[compare]\nstrategies = ["alone"]', ("--simulate",), "alone on 4 workers: strategy: got 'alone' on 4 ranks"),
    ('[train]\noptimiser = "sgd"\n[compare]\nstrategies = ["ddc-asgd"]', ("--simulate", "4"), "4 workers: optimiser: got sgd"),
    ('[train]\nbatch = 9999\n[compare]\nstrategies = ["ring"]', ("--simulate",), "batch: got 9999, expected at most"),
    ('[train]\ndata = "nosuch"\n[compare]\nstrategies = ["ring"]', ("--simulate",), "got 'nosuch', expected"),
    ('[train]\nslow = "9:2"\n[compare]\nstrategies = ["ring"]', ("--simulate",), "slow: got rank 9"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "x"), "simulate: got 'x'"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "--testbed", "2"), "--simulate and --testbed"),
    ('[compare]\nstrategies = ["ring"]', ("--testbed", "two"), "testbed: got 'two', expected HOSTS:RATE"),
    ('[compare]\nstrategies = ["ring"]', ("--testbed", "2:fast"), "rate: got 'fast'"),
    ('[compare]\nstrategies = ["ring"]', ("--testbed", "0:1gbit"), "hosts: got 0"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "--part", "3/2"), "part: got '3/2'"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "--jobs", "-1"), "jobs: got -1"),
    ('[compare]\nstrategies = ["ring"]', ("--jobs", "2"), "jobs: got 2"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "--show"), "which contains no runs to show"),
    ('[compare]\nstrategies = ["ring"]', ("--simulate", "--out", "/proc/nowhere"), "out: got /proc/nowhere"),
    ('[compare]\nstrategies = ["ring"]', ("--launch", "'"), "launch: got"),
    ('[compare]\nstrategies = ["ring"]', ("--launch", "nosuch --mpi=pmix"), "launch: got 'nosuch --mpi=pmix'"),
])  # fmt: skip
def test_nonsense_is_told_before_anything_runs(capsys, tmp_path, monkeypatch, text, flags, said):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("job.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "job.toml", *flags])
    trouble = capsys.readouterr().err
    assert ended.value.code == 2 and trouble.count(said) == 1 == trouble.count("mpiddl: error"), trouble
    assert not Path("runs").exists()
