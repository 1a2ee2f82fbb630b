"""A function that is called when a program has imported a module: what the program does not use is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls ``functions[name]`` with the module of that name: now if it is loaded, else once, when it has been imported."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]):
        self._functions = dict(functions)
        self._searching: set[str] = set()
        for name in [name for name in functions if name in sys.modules]:
            self._functions.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self._functions or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._searching.remove(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            call = self._functions.pop(fullname, None)  # not before: a program may only ask whether the module is there
            if call is not None and self in sys.meta_path:
                call(module)

        loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        """Call nothing any more."""
        sys.meta_path.remove(self)
