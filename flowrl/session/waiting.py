"""Whether rewards wait for servers, or can run concurrently."""

from collections.abc import Mapping

from rewards import Reward
from rewards.checks.self_test import Made
from rewards.types import Concurrent, Waits


def may_overlap(reward: Reward) -> bool:
    """Whether a reward, and every member of a composite one, may be called in several threads."""
    if not isinstance(reward, Concurrent) or not reward.concurrent:
        return False
    return not isinstance(reward, Made) or all(map(may_overlap, reward.parts.values()))


def asks_server(reward: Reward) -> bool:
    """Whether a reward, or every member of a composite one, waits for a server."""
    if isinstance(reward, Made):
        return bool(reward.parts) and all(asks_server(part) for part in reward.parts.values())
    return isinstance(reward, Waits) and reward.waits


def scores_in_turn(rewards: Mapping[str, Reward], plans: int) -> bool:
    """Whether one plan's rewards gain nothing from concurrency: no reward waits for a server, and
    no two can overlap."""
    asked = any(map(asks_server, rewards.values()))
    several = len(rewards) > 1 and any(map(may_overlap, rewards.values()))
    return plans == 1 and not asked and not several
