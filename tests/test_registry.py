"""Names with parameters: how texts become values, and what is said of those that make no sense."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import mpiddl.models
import mpiddl.optim
import mpiddl.strategies
from mpiddl.errors import UsageError
from mpiddl.registry import MODELS, OPTIMISERS, STRATEGIES, Entry, Registry

pytestmark = pytest.mark.no_mpi


@dataclass
class Thing:
    """Something with parameters of several kinds; ``width`` has to be given."""

    width: int
    depth: int = 2
    share: float = 0.5
    fast: bool = False
    kind: str = "plain"
    seed: int | None = None


THINGS = Registry("thing", {"thing": Entry(f"{__name__}:Thing", "A thing."), "gone": Entry(f"{__name__}:Gone", "Nothing.")})


@pytest.mark.parametrize(("spec", "made"), [
    ("thing:width=3", Thing(3)),
    ("thing:width=3,depth=4,share=1,fast=true,kind=7", Thing(3, 4, 1.0, True, "7")),
    ("thing:width=3,seed=5", Thing(3, seed=5)),
    ("thing:width=3,seed=None", Thing(3)),
    (f"{__name__}:Thing:width=3,depth=4", Thing(3, 4)),
])  # fmt: skip
def test_parameters_have_the_types_of_their_defaults(spec, made):
    assert THINGS.make(spec) == made and type(THINGS.make(spec).share) is float


def test_what_is_offered_is_taken_where_it_is_named():
    assert THINGS.make("thing", width=8, colour="red") == Thing(8)
    with pytest.raises(UsageError, match="thing thing: got 'width=9', expected parameters among depth=2"):
        THINGS.make("thing:width=9", width=8)


@pytest.mark.parametrize(("spec", "said"), [
    ("thing", "thing: thing: missing a required argument: 'width'; expected key=value for parameters of .width: "),
    ("thing:depth=3", "missing a required argument: 'width'"),
    ("thing:width=3,depth=x", "thing thing: depth: got 'x', expected a value of type int"),
    ("thing:width=3,fast=yes", "fast: got 'yes', expected a value of type bool"),
    ("thing:widht=3", "thing thing: got 'widht=3', expected parameters among"),
    ("thing:width", "got 'width', expected parameters among"),
    ("thign", "thing: got 'thign', expected one of thing, gone, or MODULE:CLASS; did you mean 'thing'"),
])  # fmt: skip
def test_nonsense_is_refused(spec, said):
    with pytest.raises(UsageError, match=said):
        THINGS.make(spec)


def test_an_entry_with_a_wrong_place_is_named():
    with pytest.raises(AttributeError, match="Gone") as error:
        THINGS.make("gone")
    assert any("the thing 'gone' in mpiddl/registry.py" in note for note in error.value.__notes__)


@pytest.mark.parametrize(("package", "registry"), [
    (mpiddl.strategies, STRATEGIES), (mpiddl.models, MODELS), (mpiddl.optim, OPTIMISERS)])  # fmt: skip
def test_what_stands_in_a_registry_is_there_to_be_imported(package, registry):
    for name, entry in registry.items():
        assert getattr(package, entry.place.partition(":")[2]) is registry.find(name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
