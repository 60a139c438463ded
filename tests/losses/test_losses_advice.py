"""What messages about policies and their averages advise is done, and is accepted."""

from flowrl.losses.averages import Average, Decay, check_policies
from tests.support.advice import advice


def test_a_policy_that_is_read_is_an_average() -> None:
    slow = Average("slow", Decay())
    advice(
        "{} needs the policy {}, but there are only {}: add an Average of that name{}",
        lambda: check_policies((), "slow", ()),
        lambda: check_policies((slow.name,), "slow", ()),
    )
    advice(
        "{} needs the policy {}, but there are only {}: add an Average of that name{}",
        lambda: check_policies((), "current", ("slow",)),
        lambda: check_policies((slow.name,), "current", ("slow",)),
    )


def test_a_decay_stays_in_its_range() -> None:
    decay = advice(
        "an average's decay starts at {} and grows by {} to {}: start and most must be in [0, 1], "
        "the slope at least 0",
        lambda: [Decay(start=-0.1), Decay(most=1.5), Decay(slope=-0.5)],
        lambda: Decay(start=0.0, most=1.0, slope=0.0),
    )
    assert decay(3) == 0.0
