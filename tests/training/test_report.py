"""What a person sees: a bar on a terminal, also through a launcher's pipe; plain lines elsewhere; one table; plots."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest
from harness import jobs

from mpiddl.training import report
from mpiddl.training.metrics import Split
from mpiddl.training.run_folder import Folder

pytestmark = pytest.mark.no_mpi

LINE = {"step": 5, "epoch": 0.5, "loss": 1.25, "accuracy": 0.5, "rate": 0.1, "elapsed": 1.0, "bytes": 10}
VALIDATION = {"step": 10, "epoch": 1.0, "validation_loss": 0.7, "validation_accuracy": 0.75, "elapsed": 2.0, "bytes": 20}
SUMMARY = {"test_accuracy": 0.875, "test_loss": 0.5, "test_rows": 100, "steps": 10, "seconds": 2.0, "ended": "", "ranks": 2,
           "strategy_name": "AllReduce()", "mpi": "MPI X"}


def seen_on_a_terminal(words, env, columns=90):
    """Run a command with its output on a terminal of our own; return what that terminal was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = b""
    with jobs.started(words, env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the last one who had it open has gone
                break
        process.wait()
    os.close(ours)
    return seen.decode()


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.more
def test_a_bar_on_a_terminal(ranks):
    env = jobs.environment(sys.executable) | {"TERM": "xterm"}
    words = ["mpiddl", "train", "--epochs", "3"]
    words = [sys.executable, "-m", *words] if ranks is None else jobs.mpi_command(ranks, words, env)
    seen = seen_on_a_terminal(words, env)
    assert "━" in seen and "63/63" in seen and "validation" in seen


FINDING = ("from mpiddl.doctor import check_result; "
           "check_result.show([check_result.Finding('memory', True, 'enough')])")


@pytest.mark.parametrize("ranks", [None, 2])
def test_colours_on_a_terminal_only(ranks, tmp_path):
    """Open MPI gives its ranks a terminal of its own, wherever their output goes."""
    env = jobs.environment(sys.executable) | {"TERM": "xterm"}
    words = [sys.executable, "-c", FINDING]
    words = words if ranks is None else jobs.mpi_command(ranks, words, env)
    with open(tmp_path / "output", "wb") as file, jobs.started(words, env, stdout=file, stderr=file) as process:
        process.wait()
    written = (tmp_path / "output").read_text()
    assert written.count("enough") == (ranks or 1) and "\x1b" not in written
    if ranks is None:
        assert "\x1b[32m" in seen_on_a_terminal(words, env)


def test_plain_lines_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(report.terminal, "columns", lambda: None)
    shown = report.progress(rank=0, steps=20, first=0, quiet=False)
    shown.show(LINE)
    shown.show(VALIDATION)
    shown.close()
    assert capsys.readouterr().err == "step 5/20  epoch 0.5  loss 1.2500  accuracy 0.5000  validation 0.7500\n"


@pytest.mark.parametrize(("rank", "quiet"), [(1, False), (0, True)])
def test_nothing_elsewhere(capsys, rank, quiet):
    shown = report.progress(rank, 20, 0, quiet)
    shown.show(LINE)
    shown.say("x")
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_the_table_names_the_slowest_rank(capsys):
    report.show_summary(SUMMARY, [Split(1.0, 0.5, 0.5, 1_000_000, 3), Split(3.0, 0.5, 0.0, 2_000_000, 3)])
    out = capsys.readouterr().out
    assert out.startswith("\ntest accuracy 87.50%, test loss 0.5000 over 100 rows, 10 steps, 2.0 s\n")
    assert "slowest, rank 1" in out and "1.50" in out and "3.000" in out


@pytest.mark.parametrize(("change", "text"), [({"ended": "5 s are over"}, "ended early: 5 s are over"),
                                              ({"test_accuracy": None, "test_loss": None, "test_rows": 0}, "no test rows")])
def test_the_headline_tells_what_is_special(change, text):
    assert text in report.headline({**SUMMARY, **change})


def windows(*steps, values=None):
    return [{"step": step, "loss": loss} for step, loss in zip(steps, values or [1.0] * len(steps), strict=True)]


@pytest.mark.parametrize(("steps", "drawn"), [
    ((50, 57, 107, 114, 164, 171), [50, 107, 171]), ((20, 21, 40, 42, 60, 63), [20, 40, 63]), ((21, 42, 63), [21, 42, 63]),
    ((500, 550, 557, 607), [500, 550, 607]), ((7,), [7]), ((), [])])  # fmt: skip
def test_lines_are_drawn_that_cover_about_equally_many_steps(steps, drawn):
    """Short windows join their neighbour; so does what is left at the end."""
    assert [line["step"] for line in report.even_windows(windows(*steps), "loss")] == drawn


def test_what_is_joined_is_weighted_by_steps():
    lines = windows(50, 57, 107, 114, values=[1.0, 8.0, 1.0, 8.0])
    assert [line["loss"] for line in report.even_windows(lines, "loss")] == [1.0, pytest.approx((7 * 8 + 50 + 7 * 8) / 64)]
    assert [line["loss"] for line in lines] == [1.0, 8.0, 1.0, 8.0]  # those of metrics.jsonl stay as they are


@pytest.mark.plots
def test_the_curve_of_the_training_loss_is_no_saw(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed: no plots")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **settings: drawn.append(self))
    ends = [end for epoch in range(9) for end in (57 * epoch + 50, 57 * epoch + 57)]
    lines = [{**LINE, "step": end, "loss": 1 + (end % 57 == 0), "accuracy": None} for end in ends]
    report.plot_curves(tmp_path / "curves.png", lines)
    loss = drawn[0].axes[0].lines[0].get_ydata()
    assert max(loss[1:]) - min(loss[1:]) < 0.15  # of windows as they are: 1


@pytest.mark.plots
def test_plots_without_accuracy(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plots")
    folder = Folder(tmp_path)
    assert report.plot_curves(folder.curves, [{**LINE, "accuracy": None}, {**VALIDATION, "validation_accuracy": None}])
    assert folder.curves.stat().st_size > 10_000
