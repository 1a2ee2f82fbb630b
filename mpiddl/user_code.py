"""A user's own model, strategy or optimiser by name: ``module:Name`` or ``module:Name:key=value,key=value``.

The module is imported as Python does it, with the working directory searched first: ``python -m`` has it there, a console
script has not. A class or a function is called with the parameters; any other object is taken as it is.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpiddl.errors import MpiddlError, UsageError

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(:.*)?", re.DOTALL)
WORDS = {"true": True, "false": False}


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form ``module:Name`` or ``module:Name:parameters``.

    Examples
    --------
    >>> is_reference("nets:Line:width=3"), is_reference("gossip:period=4"), is_reference("mlp")
    (True, False, False)
    """
    return REFERENCE.fullmatch(text) is not None


def make(argument: str, text: str, members: Sequence[str] = (), **offered: Any) -> Any:
    """The object that ``text`` names.

    Parameters
    ----------
    argument : str
        What it is for ("model"), for messages.
    text : str
        ``module:Name`` or ``module:Name:key=value,key=value``. Values are Python literals; what is none is a string.
    members : sequence of str
        What the object must have.
    **offered
        Further parameters, passed where the class or function names them and ``text`` does not.

    Raises
    ------
    UsageError
        The module cannot be imported, does not define such a name, the call fails, or the object lacks a member.
    """
    module, name, tail = [*text.split(":", 2), ""][:3]
    found = _attribute(argument, text, module, name)
    given = _parameters(argument, text, tail)
    if isinstance(found, type) or inspect.isroutine(found):
        _check_origin(argument, text, module, found)
        found = _call(argument, text, found, given, offered)
    elif given:
        raise UsageError(f"{argument}: got parameters in {text!r}, expected no parameters: {module}:{name} is not a class")
    check_members(argument, found, members)
    return found


def source_checksum(text: str) -> int:
    """Checksum of the file of the module that ``text`` names: another file may give other results."""
    module, name = text.split(":")[:2]
    _attribute("your own code", text, module, name)
    file = getattr(sys.modules[module], "__file__", None)  # built into Python, or a folder without __init__.py: none
    return zlib.crc32(Path(file).read_bytes()) if file else 0


def check_members(argument: str, value: Any, members: Sequence[str]) -> None:
    """Raise a `UsageError` for a class in the place of an object, or an object that lacks one of the ``members``."""
    if isinstance(value, type):
        raise UsageError(f"{argument}: got the class {value.__name__}, expected an object of this class: {value.__name__}(...)")
    missing = [name for name in members if not hasattr(value, name)]
    if missing:
        raise UsageError(f"{argument}: got {type(value).__name__} without the attributes {', '.join(missing)}, "
                         f"expected a name or an object with the attributes {', '.join(members)}")


def _attribute(argument: str, text: str, module: str, name: str) -> Any:
    try:
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything; a program without a main guard ends here
        missing = isinstance(error, OSError) or f"{module}.".startswith(f"{getattr(error, 'name', None)}.")
        remedy = f"expected a module in {os.curdir if isinstance(error, OSError) else here} or an installed module"
        remedy = remedy if missing else "expected a module that Python can import without an error"
        if text.split(":")[0].endswith(".py"):
            remedy = f"expected the module's name without .py: {text.replace('.py:', ':', 1)}"
        raise UsageError(f"{argument}: got {text!r}, whose module cannot be imported ({_said(error)}); {remedy}") from None
    if not hasattr(found, name):
        own = [key for key, value in vars(found).items() if callable(value) and getattr(value, "__module__", "") == module]
        raise UsageError(f"{argument}: got {text!r}, expected a name that {module} defines: {', '.join(own) or 'none'}")
    return getattr(found, name)


def _check_origin(argument: str, text: str, module: str, found: Any) -> None:
    """Raise a `UsageError` for a class or function that ``module`` only imports: any module has functions such as os.system."""
    origin = getattr(found, "__module__", None) or "builtins"
    if not f"{origin}.".startswith(f"{module}."):
        raise UsageError(f"{argument}: got {text!r}, which {module} imports from {origin}, expected the module that defines "
                         f"it: {origin}:{found.__name__}")


def _parameters(argument: str, text: str, tail: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{argument}: got {item!r} in {text!r}, expected key=value")
        values[key] = literal(value)
    return values


def literal(text: str) -> Any:
    """The value of a Python literal, or of ``true`` or ``false``; what is none is a string.

    Examples
    --------
    >>> literal("3"), literal("true"), literal("ring")
    (3, True, 'ring')
    """
    try:
        return WORDS[text] if text in WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def check_call(argument: str, text: str, make_it: Callable[..., Any], values: dict[str, Any]) -> None:
    """Raise a `UsageError` unless ``make_it(**values)`` has all parameters that it needs, and no other."""
    try:
        signature = inspect.signature(make_it).replace(return_annotation=inspect.Signature.empty)
    except (TypeError, ValueError):  # compiled code may tell none
        return
    try:
        signature.bind(**values)
    except TypeError as error:
        raise UsageError(f"{argument}: {text}: {error}; expected key=value for parameters of {signature}") from None


def _call(argument: str, text: str, make_it: Callable[..., Any], given: dict[str, Any], offered: dict[str, Any]) -> Any:
    try:
        known = inspect.signature(make_it).parameters
    except (TypeError, ValueError):
        known = MappingProxyType({})
    values = {**{key: value for key, value in offered.items() if key in known}, **given}
    check_call(argument, text, make_it, values)
    try:
        return make_it(**values)
    except MpiddlError as error:
        raise UsageError(f"{argument}: {text}: {error}") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"{argument}: {text} could not be created ({_said(error)})") from None


def _said(error: BaseException) -> str:
    """The error in one line, and where in the user's code it comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f", {os.path.basename(frames[-1].filename)} line {frames[-1].lineno}" if frames[1:] else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
