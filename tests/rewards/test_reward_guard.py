"""A reward cannot change the run, and its result is numbers or one sentence."""

import asyncio
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image

from rewards import Samples, load, score_all
from rewards.checks.self_test import self_test
from rewards.combine import blamed, judged, scored
from rewards.guard import SharedState, beside_sampling, guarded_call
from rewards.perception.media import to_tensor
from rewards.serving.batching import Job, scoring
from rewards.serving.wire import WireSamples, encode_samples


def images(n: int = 3, **kinds) -> Samples:
    media = torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    meta = [{"tags": ["a"], "row": i} for i in range(n)]
    return Samples(media.to(**kinds), ["p"] * n, torch.arange(n), meta)


def mean(samples: Samples) -> torch.Tensor:
    return torch.stack([item.float().mean() for item in samples.media])


def writes_in_place(s):
    s.media.clamp_(0.4, 0.5)


def writes_through_numpy(s):
    s.media.numpy()[:] = 0


def writes_through_data(s):
    s.media.data[0] = 0


def writes_one_pixel(s):
    s.media[-1, -1, -1, -1] += 1e-3


def swaps_two(s):
    s.media[[0, 1]] = s.media[[1, 0]].clone()


WRITES = (writes_in_place, writes_through_numpy, writes_through_data, writes_one_pixel, swaps_two)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_the_media_is_that_rewards_error(write):
    def reward(samples):
        write(samples)
        return mean(samples)

    with pytest.raises(ValueError, match="reward 'bad' wrote into the media") as caught:
        score_all({"good": mean, "bad": reward}, images())
    assert caught.value.__notes__ == ["in reward 'bad'"]
    with pytest.raises(ValueError, match="reward 'bad' wrote into the media"):
        self_test("bad", reward)


def test_a_write_is_found_in_lists_half_precision_and_views():
    def reward(samples):
        samples.media[1][0] = 0
        return mean(samples)

    listed = images()
    listed = Samples(list(listed.media), listed.prompts, listed.group, listed.meta)
    wide = images(6)
    view = Samples(wide.media[::2], ["p"] * 3, torch.arange(3))
    for samples in (listed, images(dtype=torch.bfloat16), view):
        assert len(scored("fine", mean, samples)) == 3
        with pytest.raises(ValueError, match="wrote into the media"):
            scored("bad", reward, samples)


def test_everything_but_the_media_is_a_copy():
    samples = images()
    listed = Samples(list(samples.media), samples.prompts, samples.group, samples.meta)

    def reward(s):
        s.meta[0]["tags"].append("b")
        s.meta[1]["row"] = None
        s.prompts[0] = "other"
        s.group.add_(7)
        s.media[0].requires_grad_()
        s.media.reverse()
        return [0.0] * 3

    score_all({"rude": reward}, listed)
    assert listed.meta == [{"tags": ["a"], "row": i} for i in range(3)]
    assert listed.prompts == ["p"] * 3 and listed.group.tolist() == [0, 1, 2]
    assert torch.equal(torch.stack(listed.media), samples.media)
    assert not samples.media.requires_grad


@pytest.fixture
def settings():
    before = SharedState.now()
    yield before
    before.restore()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            "dtype from torch.float32 to torch.float64",
        ),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads from"),
        (lambda: torch.set_float32_matmul_precision("medium"), "float32 products from highest to"),
        (lambda: torch.set_default_device("meta"), "default device from cpu to meta"),
        (lambda: torch.autocast("cpu").__enter__(), "cpu from False to True"),  # and never left
        (
            lambda: torch.autocast("cpu", enabled=False).__enter__(),
            "the number of open autocast contexts from 0 to 1",
        ),
    ],
)
def test_a_changed_setting_is_restored_and_is_that_rewards_error(settings, change, what):
    def reward(samples):
        change()
        return mean(samples)

    def fails(samples):
        change()
        raise OSError("no such file")

    with pytest.raises(ValueError, match=f"reward 'bad' changed .*{what}"):
        score_all({"good": mean, "bad": reward}, images())
    assert SharedState.now() == settings
    with pytest.raises(OSError, match="no such file"):
        score_all({"bad": fails}, images())
    assert SharedState.now() == settings


def test_beside_sampling_the_default_dtype_is_compared_at_the_join(settings):
    def reward(samples):
        torch.set_default_dtype(torch.float64)
        return mean(samples)

    with ThreadPoolExecutor(1, initializer=beside_sampling) as pool:
        pool.submit(score_all, {"good": mean, "bad": reward}, images()).result()
    assert torch.get_default_dtype() is torch.float64, "sampling may have set it: no verdict yet"
    with pytest.raises(ValueError, match="one of the rewards 'good', 'bad' changed the default"):
        settings.check(["good", "bad"])
    assert SharedState.now() == settings
    settings.check(["good", "bad"])


def test_grad_mode_is_restored_and_global_generators_are_free():
    def reward(samples):
        torch.set_grad_enabled(False)
        return mean(samples) + torch.rand(3) + float(np.random.rand())

    def fails(samples):
        torch.set_grad_enabled(False)
        raise OSError

    assert torch.is_grad_enabled()
    scored("draws", reward, images())
    assert torch.is_grad_enabled()
    with pytest.raises(OSError):
        scored("fails", fails, images())
    assert torch.is_grad_enabled()


class Leaves(BaseException):
    pass


@pytest.mark.parametrize("end", [SystemExit(0), SystemExit("bye"), GeneratorExit(), Leaves(1)])
def test_leaving_the_process_is_an_error_of_the_reward(end):
    def reward(samples):
        raise end

    with pytest.raises(RuntimeError, match="reward 'exit' tried to end the process") as caught:
        score_all({"exit": reward}, images())
    assert caught.value.__notes__ == ["in reward 'exit'"]
    with pytest.raises(RuntimeError, match="reward 'mine' tried to end"):
        self_test("mine", lambda s: sys.exit(0))


def test_leaving_without_a_word_is_an_error_but_for_a_forked_process():
    def leaves(samples: Samples) -> list[float]:
        os._exit(0)

    with pytest.raises(RuntimeError, match=r"reward 'leaves' tried to end the process by SystemEx"):
        score_all({"leaves": leaves}, images())

    def forks(samples: Samples) -> list[float]:
        child = os.fork()
        if child == 0:
            os._exit(7)
        return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * 3

    assert score_all({"forks": forks}, images()).values.tolist() == [[7.0]] * 3


def test_ctrl_c_is_the_users():
    def reward(samples):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scored("slow", reward, images())


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (torch.ones(4), r"shape \[4\]"),
        (torch.ones(3, 1), r"shape \[3, 1\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        (torch.ones(3, dtype=torch.complex64), "complex numbers"),
        (np.ones(3) * 1j, "a list with a complex"),
        (np.array(["1", "2", "3"]), "a list with a str, '1'"),
        ("123", "one str"),
        (["1", "2", "3"], "a list with a str, '1'"),
        ([1.0, 2j, 3.0], "a list with a complex"),
        ([1.0, [2.0], 3.0], "a list with a list"),
        ({"score": [1, 2, 3]}, "one dict"),
        (([1.0, 2.0, 3.0], {}), "a list with a list"),
        (0.5, "one float"),
        (np.float32(0.5), "one float32"),
        ([1.0, 2.0], r"shape \[2\]"),
        ([1.0, float("inf"), 0.0], "an infinite score"),
        ([1.0, 10**400, 0.0], "an infinite score"),
        (torch.tensor([1.0, -torch.inf, 0.0]), "an infinite score"),
        ({1.0, 2.0, 3.0}, "a set, which has no order"),
        ({1.0: 0, 2.0: 0, 3.0: 0}.keys(), "a dict_keys, which has no order"),
        (np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), "a masked array"),
        ([1.0, np.ma.masked, 3.0], "a list with a masked number"),
        (torch.eye(3)[0].to_sparse(), "a sparse tensor"),
    ],
)
def test_a_result_that_is_no_score_names_the_reward_and_what_was_wanted(result, what):
    message = rf"^reward 'odd' returned {what}.*; expected 3 finite numbers, one per sample"
    with pytest.raises(ValueError, match=message):
        score_all({"odd": lambda s: result}, images())


def test_results_in_every_usual_form_are_scores():
    for result in (
        torch.tensor([1, 0, 1]),
        torch.tensor([True, False, True]),
        np.array([1, 0, 1], np.float32),
        [np.float32(1), np.bool_(0), torch.tensor(1)],
        (x for x in (1, 0, 1)),
        np.array([1, 0, 1], object),
    ):
        assert scored("odd", lambda s, result=result: result, images()).tolist() == [1, 0, 1]


def test_a_server_calls_its_reward_under_the_same_guard():
    def reward(samples):
        samples.media.zero_()
        return [0.0] * 3

    async def serve(reward) -> list:
        async def gone() -> bool:
            return False

        return scoring("served", reward)(
            [
                Job(
                    WireSamples.model_validate(encode_samples(images())),
                    0,
                    [],
                    [],
                    gone,
                    asyncio.Future(),
                )
            ]
        )

    with pytest.raises(ValueError, match="reward 'served' wrote into the media"):
        asyncio.run(serve(reward))
    (answer,) = asyncio.run(serve(lambda s: [1.0, None, float("nan")]))
    assert answer.values.isnan().tolist() == [False, True, True]
    assert answer.applies.tolist() == [True, False, True]


@pytest.mark.parametrize("write", WRITES)
def test_a_judge_that_writes_into_the_media_is_named(write):
    def judge(samples, a, b):
        write(samples)
        return torch.ones(len(a))

    pairs = torch.tensor([0, 0]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="judge 'bad' wrote into the media") as caught:
        judged("bad", judge, images(), *pairs)
    assert caught.value.__notes__ == ["in judge 'bad'"]


def test_a_judge_changes_nothing_and_its_result_is_one_number_per_pair(settings):
    samples, a, b = images(), torch.tensor([0, 0]), torch.tensor([1, 2])

    def rude(s, first, second):
        s.meta[0]["tags"].append("b")
        first.add_(1)
        torch.set_grad_enabled(False)
        return [None, 0.5]

    def slow(*_):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return torch.ones(2)

    found = judged("rude", rude, samples, a, b)
    assert found.dtype == torch.float64 and found[0].isnan() and found[1] == 0.5
    assert samples.meta[0]["tags"] == ["a"] and a.tolist() == [0, 0] and torch.is_grad_enabled()
    with pytest.raises(ValueError, match="judge 'slow' changed the number of threads"):
        judged("slow", slow, samples, a, b)
    assert SharedState.now() == settings
    with pytest.raises(ValueError, match=r"judge 'odd' returned shape .3.; expected 2 .* per pair"):
        judged("odd", lambda *_: torch.ones(3), samples, a, b)


def test_off_the_main_thread_an_interrupt_is_an_error_of_the_reward():
    def reward(samples):
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(scored, "odd", reward, images()).exception()
    assert isinstance(ended, RuntimeError) and "reward 'odd' tried to end" in str(ended)


def test_an_error_without_a_text_is_still_its_rewards():
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def reward(samples):
        raise OddError

    with pytest.raises(OddError) as error:
        score_all({"odd": reward}, images())
    found = blamed(error.value)
    assert found is not None and "the reward odd raised OddError, which has no text (" in found


@pytest.mark.parametrize("silent", range(1, 9))
def test_a_call_without_scores_is_no_warning_of_torch(silent):
    calls = 0

    def reward(samples):
        nonlocal calls
        calls += 1
        return mean(samples) * (float("nan") if calls == silent else 1)

    with warnings.catch_warnings(), suppress(ValueError):
        warnings.simplefilter("error")
        self_test("silent", reward)


def test_noise_that_is_large_within_a_group_fails_the_self_test():
    noise = torch.Generator().manual_seed(0)

    def noisy(size):
        def reward(samples):
            exact = load("brightness")(samples)
            return exact + size * torch.randn(len(exact), generator=noise)

        return reward

    with pytest.raises(ValueError, match=r"the same samples score .* within a group"):
        self_test("noisy", noisy(1e-3))
    assert "one by one the same" in self_test("fine", noisy(1e-6))
    with pytest.raises(ValueError, match="set its attribute one_call = True if that is"):
        self_test("noisy", noisy(0.01))


def test_a_guarded_call_returns_what_the_reward_returns():
    result = object()
    assert guarded_call("plain", lambda s: result, images()) is result


@pytest.mark.parametrize("write", WRITES)
def test_a_generator_that_writes_into_the_media_is_named(write):
    def reward(samples):
        for row in range(len(samples.prompts)):
            write(samples)
            yield float(row)

    with pytest.raises(ValueError, match="reward 'bad' wrote into the media"):
        score_all({"bad": reward}, images())
    values = score_all({"fine": lambda s: (float(row) for row in range(len(s.prompts)))}, images())
    assert values.values[:, 0].tolist() == list(map(float, range(len(values.values))))


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (4, 1)])
def test_images_of_one_pixel_are_scored_and_watched(size):
    listed = Samples([to_tensor(Image.new("RGB", size))] * 2, ["p"] * 2, torch.zeros(2).long())
    assert scored("fine", lambda s: [0.5] * len(s.prompts), listed).tolist() == [0.5, 0.5]

    def reward(samples):
        samples.media[1][0] = 1
        return [0.0, 0.0]

    with pytest.raises(ValueError, match="wrote into the media"):
        scored("bad", reward, listed)
