"""What a plan's route does, for tests."""

from samplers import Looks, Plan
from samplers.routes.looks import LookedRoute


def looks_of(plan: Plan) -> Looks:
    """The intermediate rewards of a plan that has them."""
    (looked,) = (layer for layer in plan.route.layers if isinstance(layer, LookedRoute))
    return looked.looks
