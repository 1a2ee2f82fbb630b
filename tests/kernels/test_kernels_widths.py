"""The bits of a result are the same on processors with wide and with narrow vectors, as long as both have FMA."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from harness.kernel_calls import digest_dense as dense
from harness.kernel_calls import digest_elementwise as elementwise
from llvmlite import binding

pytestmark = pytest.mark.no_mpi

NARROW = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx,+fma"}
"""Registers of 128 bits, sixteen of them, on any x86 that has FMA."""

CODE = """
from harness import kernel_calls
from mpiddl.kernels import WIDTH
print(WIDTH, kernel_calls.digest_dense("float32"), kernel_calls.digest_elementwise("float32"))
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not binding.get_host_cpu_features().get("fma"), reason="for an x86 that has FMA"
)
def test_bits_do_not_depend_on_the_width_of_vectors(command):
    width, *found = command(sys.executable, "-c", CODE, env=NARROW, cwd=Path(__file__).parents[1]).stdout.split()
    assert width == "16"
    assert found == [dense("float32"), elementwise("float32")]
