"""Names of policies: averages, the behaviour, and the roles that a loss reads."""

import pytest

from flowrl.errors import UserError
from flowrl.losses.averages import check_policies


@pytest.mark.parametrize("behaviour", ["current", "slow"])
def test_policies_that_exist_are_accepted(behaviour):
    check_policies(["slow"], behaviour, {"old", "ref", "slow"})


@pytest.mark.parametrize(
    ("averages", "behaviour", "roles", "says"),
    [
        (["slow", "slow"], "current", (), "an average called 'slow' already exists"),
        (["ref"], "current", (), "an average called 'ref' already exists"),
        (["slow"], "slwo", (), "behaviour needs the policy 'slwo'.*did you mean 'slow'"),
        (["slow"], "current", ("old", "fast"), "the loss needs the policy 'fast'"),
        ([], "current", ("slow",), "the loss needs the policy 'slow'.*add an Average"),
    ],
)
def test_a_policy_that_does_not_exist_is_named(averages, behaviour, roles, says):
    with pytest.raises(UserError, match=says):
        check_policies(averages, behaviour, roles)
