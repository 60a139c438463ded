"""Arguments that `samplers.Plan` had: each is refused with how it is written now."""

from functools import wraps
from typing import Any, TypeVar

P = TypeVar("P", bound=type)

_ROUTES = "samplers.routes"
_NOW = {
    "looks": f"samplers.Looking(planner, ...), or route=LookedRoute(...) of {_ROUTES}.looks",
    "thin": f"samplers.Thinned(planner, ...), or route=ThinnedRoute(...) of {_ROUTES}.thinning",
    "steer": f"samplers.Particled(...), or route=SteeredRoute(...) of {_ROUTES}.steering",
    "guide": f"samplers.Guided(planner, guide), or route=GuidedRoute(...) of {_ROUTES}.guiding",
    "keep": f"a planner of {_ROUTES}.tails, or route=KeepingRoute(...) of {_ROUTES}.keeping",
    "bridge": f"a planner of {_ROUTES}.tails, or route=KeepingRoute(...) of {_ROUTES}.keeping",
}


def with_moved(plan: P) -> P:
    """The class, which refuses an argument that moved with one sentence. TypeError."""
    original = plan.__init__

    @wraps(original)
    def init(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name in _NOW:
                raise TypeError(f"samplers.Plan takes a route in place of {name}: use {_NOW[name]}")
        original(self, *values, **named)

    plan.__init__ = init
    return plan
