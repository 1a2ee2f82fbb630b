"""A function that is called when a program has imported a module: what the program does not use is not imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Put into ``sys.meta_path``: calls ``functions[name]`` with the module of that name, once, when it has been
    imported."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]):
        self._functions = dict(functions)
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self._functions:
            return None
        call = self._functions.pop(fullname)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            self._functions[fullname] = call
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = execute
            execute(module)
            call(module)

        loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        """Take it out again."""
        sys.meta_path.remove(self)
