"""Cases of a test that only `make test-more` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(*case: Any) -> Any:
    """A case, as ``pytest.param(*case)``."""
    return pytest.param(*case, marks=pytest.mark.more)


def only(kept: Iterable[str], names: Iterable[str]) -> list[Any]:
    """``names``, of which `make test` runs those that are ``kept``."""
    return [name if name in kept else more(name) for name in names]
