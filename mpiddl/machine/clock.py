"""One monotonic clock."""

from __future__ import annotations

import time

now = time.perf_counter
