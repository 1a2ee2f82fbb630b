"""What the doctor of every rank has found."""

from __future__ import annotations

import json

from mpiddl.doctor.check_result import Finding

# What `mpiddl doctor` does, with JSON instead of a table.
EXAMINE = """
import dataclasses, json, os, sys
from mpiddl.doctor import checks as doctor
from mpiddl.machine import launch
findings = doctor.run()
if not launch.promise(os.environ).rank:
    print(json.dumps([dataclasses.asdict(finding) for finding in findings]), flush=True)
sys.exit(any(finding.ok is False for finding in findings))
"""


def read(finished):
    """The findings that the one speaking process printed, by name."""
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("[{")]
    return {each["name"]: Finding(**each) for each in json.loads(line)}
