"""A file of finished runs: damaged lines, lines on their way, several programs at once."""

from __future__ import annotations

import pytest

from mpiddl.study.journal import Journal

pytestmark = pytest.mark.no_mpi


@pytest.mark.parametrize("line", [b"", b"nonsense", b"\xff", b"null", b"[1]", b'{"settings": 1}',
                                  b'{"settings": 1, "outcome": 2}', b'{"settings": 1, "outcome": {"second": 1}}',
                                  b"[" * 100_000])  # fmt: skip
def test_a_damaged_line_is_passed_over(tmp_path, line):
    file, said = tmp_path / "runs.jsonl", []
    Journal(file, said.append, ["seconds"]).add({"run": 1}, {"seconds": 1})
    file.write_bytes(file.read_bytes() + line + b"\n")
    Journal(file, said.append, ["seconds"]).add({"run": 2}, {"seconds": 2})
    said.clear()
    assert len(Journal(file, said.append, ["seconds"])) == 2
    assert said == [f"{file}, line 2: damaged, passed over"] * bool(line)


def test_the_end_of_a_line_that_was_cut_is_made_up_for(tmp_path):
    file, said = tmp_path / "runs.jsonl", []
    for run in (1, 2):
        Journal(file, said.append).add({"run": run}, {"seconds": run})
    file.write_bytes(file.read_bytes()[:-20])  # somebody was killed in the middle of a line
    Journal(file, said.append).add({"run": 3}, {"seconds": 3})
    found = Journal(file, said.append)
    assert [found.find({"run": run}) for run in (1, 2, 3)] == [{"seconds": 1}, None, {"seconds": 3}]
    assert any("line 2: damaged" in text for text in said)


def test_what_another_program_adds_is_read(tmp_path):
    ours, theirs = (Journal(tmp_path / "runs.jsonl", print) for _ in range(2))
    theirs.add({"a": 1}, {"b": 2})
    with open(theirs.path, "ab") as file:
        file.write(b'{"settings": {"c"')  # on its way
        file.flush()
        assert ours.find({"a": 1}) is None
        ours.refresh()
        assert ours.find({"a": 1}) == {"b": 2}
        file.write(b': 3}, "outcome": {}}\n')
    ours.refresh()
    assert ours.find({"c": 3}) == {}
