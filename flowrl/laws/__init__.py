"""Laws of parts: what the rest relies on, checked by trial calls, for parts of flowrl and of users.

    check_kernel      a kernel's mean and std, and whether its mean is a x + b v if it says `affine`
    check_planner     the plans of a planner, also for later iterations
    check_transform   a transform's credit, and that it fills no masked entry
    check_loss        a loss's entries, and that it is `homogeneous` if it says so
    check_scoring     a reward's scores in other batches, if it says what they are `per`
    check_laws        all parts of an algorithm that are not flowrl's own

A part says what it is by an attribute. What needs a property refuses a part that does not say that
it has it; a part that says nothing runs wherever nothing needs the property. Each check raises
UserError, in a sentence that begins with the part's name, and takes a few milliseconds. `flowrl
plan` and `flowrl train` check a user's parts before the model's weights are read.
"""

from flowrl.laws.algorithms import check_laws
from flowrl.laws.kernels import check_kernel
from flowrl.laws.losses import check_loss
from flowrl.laws.planners import check_planner
from flowrl.laws.scoring import check_scoring
from flowrl.laws.transforms import check_transform

__all__ = [
    "check_kernel",
    "check_laws",
    "check_loss",
    "check_planner",
    "check_scoring",
    "check_transform",
]
