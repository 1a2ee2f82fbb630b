"""Names of strategies, models, optimisers and solvers: a static table each, so that nothing is imported before it is used.

An entry is one line: a name, the place of the class or function, and a sentence for users. The command line, its help,
`mpiddl compare`, checkpoints and the tables of the pages read these tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from mpiddl import user_code
from mpiddl.errors import UsageError


class Entry(NamedTuple):
    """``place``: ``module:Name`` of the class or function. ``about``: what it does, in plain words."""

    place: str
    about: str


class Registry(Mapping[str, Entry]):
    """The entries of one kind by name; ``what``: what it is called in messages, such as "strategy"."""

    def __init__(self, what: str, entries: Mapping[str, Entry]):
        self.what, self._entries = what, dict(entries)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> Any:
        """The class or function of an entry; its module is imported now."""
        module, _, attribute = self[name].place.partition(":")
        return getattr(import_module(module), attribute)

    def name_of(self, kind: type) -> str:
        """The name under which a class stands here, or "". Imports nothing."""
        place = f"{kind.__module__}:{kind.__qualname__}"
        return next((name for name, entry in self.items() if entry.place == place), "")

    def check(self, spec: str) -> str:
        """The name in ``NAME`` or ``NAME:key=value,...``; a `UsageError` unless it stands here."""
        name = spec.partition(":")[0]
        if name not in self:
            close = difflib.get_close_matches(name, self, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{self.what}: got {name!r}, expected one of {', '.join(self)}, or MODULE:CLASS{hint}")
        return name

    def make(self, spec: str, **offered: Any) -> Any:
        """The object that ``spec`` names.

        Parameters
        ----------
        spec : str
            ``NAME`` or ``NAME:key=value,...`` of this table, or ``module:Class`` or ``module:Class:key=value,...``.
        **offered
            Further parameters, passed where the class or function names them and ``spec`` does not.

        Raises
        ------
        UsageError
            An unknown name or key, a value of the wrong type, or a class that cannot be found or created.
        """
        if spec.partition(":")[0] not in self and user_code.is_reference(spec):
            return user_code.make(self.what, spec, **offered)
        name = self.check(spec)
        found = self.find(name)
        known = inspect.signature(found).parameters
        fitting = {key: value for key, value in offered.items() if key in known}
        return found(**{**fitting, **self._parameters(name, found, spec.partition(":")[2], offered)})

    def _parameters(self, name: str, found: Any, text: str, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``key=value,key=value`` with the types of the defaults."""
        known = inspect.signature(found).parameters.values()
        settable = {each.name: each.default for each in known if each.name not in offered}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            key, equals, value = item.partition("=")
            if key not in settable or not equals:
                shown = ", ".join(f"{key}={default}" for key, default in settable.items())
                wanted = f"parameters among {shown}" if shown else "no parameters"
                raise UsageError(f"{self.what} {name}: got {item!r}, expected {wanted}")
            kind: Any = type(settable[key])
            try:
                values[key] = kind(value)
            except ValueError:
                raise UsageError(f"{self.what} {name}: {key}: got {value!r}, expected a value of type "
                                 f"{kind.__name__}") from None
        return values

    def spelled(self, thing: Any) -> str:
        """A dataclass of this table as a user would write it: its name, and the parameters that are not the defaults; or ""."""
        name = self.name_of(type(thing))
        values = ((each.name, each.default, getattr(thing, each.name)) for each in dataclasses.fields(thing)) if name else ()
        given = ",".join(f"{key}={value}" for key, default, value in values if value != default)
        return f"{name}:{given}" if given else name
