"""Steps of optimisers that get a closure, which computes the loss and its gradient."""

from __future__ import annotations

from typing import Any

import torch


def called_first(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Call the closure of ``optimiser.step(closure)`` now, so that a strategy gets its gradient before the step.

    The arguments are those of ``step``, with the optimiser as the first. Returned are those that ``step`` gets instead, with a
    closure that only returns the loss. Most optimisers of `torch.optim` call a closure once, before they update. L-BFGS and
    optimisers from elsewhere may call it several times, so their arguments are not changed.
    """
    optimiser, positional = args[0], len(args) > 1
    closure = args[1] if positional else options.get("closure")
    once = type(optimiser).step.__module__.startswith("torch.optim.") and not isinstance(optimiser, torch.optim.LBFGS)
    if closure is None or not once:
        return args, options
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    return ((args[0], known, *args[2:]), options) if positional else (args, {**options, "closure": known})
