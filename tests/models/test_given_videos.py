"""Videos that a model is given: files in a prompt's columns and in `model.call`."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.errors import UserError
from flowrl.models.diffusers.call.inputs import columns
from flowrl.models.diffusers.call.inputs.columns import GivenForm
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.saving import save_pipeline
from flowrl.models.diffusers.sizes.by_size import rows_by_size
from flowrl.models.diffusers.whole.whole_proof import prove_whole
from flowrl.models.image_check import ImageRows
from flowrl.run.watch.start_check import check_start
from flowrl.settings.read import run_from
from rewards.perception import video_files
from tests.support import runs
from tests.support.advice import advice
from tests.support.driving import PROMPTS
from tests.support.media_forms import video
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

torch.set_num_threads(1)
SIDE = 16
VIDEO_TO_VIDEO = "WanVideoToVideoPipeline"
FORMS = ("apng", "webp", "gif", "mp4", "mkv")


def stills(count: int, seed: int = 0) -> list[Image.Image]:
    """Frames of one grey each, which every form of file keeps nearly as they are."""
    shades = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))
    return [Image.new("RGB", (SIDE, SIDE), (int(shade),) * 3) for shade in shades]


def written(path: Path, frames: list[Image.Image]) -> Path:
    """A video of these frames, in the form that the path's suffix names."""
    form = path.suffix[1:]
    if form in ("mp4", "mkv"):
        pytest.importorskip("av")
        path.write_bytes(video([np.asarray(frame) for frame in frames], suffix=form))
    else:
        kind, how = {"apng": "png"}.get(form, form), {"lossless": True} if form == "webp" else {}
        frames[0].save(path, kind, save_all=True, append_images=frames[1:], duration=40, **how)
    return path


def built(name: str, **call: Any) -> PipelinePolicy:
    made = tiny(getattr(diffusers, name), SPECIALS | VIDEO_SPECIALS, SIZES)
    return PipelinePolicy(made.pipe, call={**made.call, **call})


def largest(a: list[Image.Image], b: list[Image.Image]) -> int:
    pairs = zip(a, b, strict=True)
    return max(int(np.abs(np.asarray(x, int) - np.asarray(y, int)).max()) for x, y in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_its_frames(form: str, tmp_path: Path) -> None:
    """By path and by bytes; the same file returns the same list, until it changes; a number of
    frames that the call or the row sets takes evenly spaced ones."""
    frames = stills(9)
    file = written(tmp_path / f"video.{form}", frames)
    rows: list[dict[str, Any]] = [
        {"video": str(file)},
        {"video": {"bytes": file.read_bytes(), "path": None}},
        {"video": str(file), "num_frames": 3},
    ]
    names = ["prompt", "video", "num_frames"]
    by_path, by_bytes, by_row = (
        extra["video"] for extra in columns.extras(rows, names, GivenForm(frames=5))
    )
    assert largest(by_path, frames[::2]) <= 3 and largest(by_bytes, frames[::2]) <= 3
    assert largest(by_row, frames[::4]) <= 3
    (whole,) = columns.extras(rows[:1], names, GivenForm())
    assert largest(whole["video"], frames) <= 3
    (again,) = columns.extras(rows[:1], names, GivenForm())
    assert again["video"] is whole["video"]
    written(file, stills(9, seed=1))
    (changed,) = columns.extras(rows[:1], names, GivenForm())
    assert changed["video"] is not whole["video"]


def test_a_still_image_and_a_list_stay_what_they_are(tmp_path: Path) -> None:
    frames = stills(2)
    names = [str(tmp_path / f"{number}.png") for number in range(2)]
    for frame, name in zip(frames, names, strict=True):
        frame.save(name)
    one, two = columns.extras([{"video": names[0]}, {"video": names}], ["video"], GivenForm())
    assert isinstance(one["video"], Image.Image) and largest(two["video"], frames) == 0


@pytest.mark.slow
def test_whole_samples_from_files_are_the_pipelines_own(tmp_path: Path) -> None:
    """Videos of several lengths have loops of their own; those of one length are those of a list of
    the same frames."""
    made = built(VIDEO_TO_VIDEO)
    frames = {count: stills(count) for count in (5, 9)}
    files = {n: written(tmp_path / f"{n}.apng", frames[n]) for n in frames}
    meta = [{"video": str(files[count])} for count in (5, 9, 5)]
    groups = rows_by_size(made, ["a", "b", "c"], meta)
    assert [group.rows for group in groups] == [[0, 2], [1]]
    for group, count in zip(groups, (5, 9), strict=True):
        policy, rows = group.policy, group.take(meta)[:1] * 2
        proof = policy.prove(PROMPTS, steps=3, guidance=4.5, meta=rows)
        whole = prove_whole(policy, PROMPTS, policy.loop.extras(rows, PROMPTS), proof)
        assert whole.failure() is None and whole.own is not None and whole.own.media == 0
        x = torch.randn(1, *policy.shape(3), generator=torch.Generator().manual_seed(0))
        level, velocities = torch.tensor([policy.schedule(3).sigmas[1]]), []
        for cell in (str(files[count]), frames[count]):
            batch = policy.encode(PROMPTS[:1], [{"video": cell}])
            with torch.no_grad():
                velocity = policy.bind(batch, steps=3, guidance=4.5)
                velocities.append(velocity(x, level, torch.tensor([0])))
        assert torch.equal(*velocities)


def test_a_call_names_a_file_of_which_it_takes_its_number_of_frames(tmp_path: Path) -> None:
    file = written(tmp_path / "control.apng", stills(9))
    made = built("WanVACEPipeline", video=str(file))
    assert len(made.loop.traits.shared["video"]) == made.loop.call["num_frames"] == 5


BROKEN = {
    "missing.mp4": (None, "no such file"),
    "empty.mp4": (b"", "an empty file|not a readable"),
    "text.mp4": (b"no video at all", "is not|not a PNG, JPEG or WebP image"),
    "cut.mp4": (b"\0\0\0\x20ftypisom" + bytes(64), "not a readable video"),
    "cut.gif": (b"GIF89a" + bytes(4), "not a readable|not a PNG, JPEG or WebP image"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("where", ["column", "call"])
def test_a_video_that_cannot_be_read_is_named_before_weights_load(
    name: str, where: str, tmp_path: Path
) -> None:
    content, message = BROKEN[name]
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    made = tiny(getattr(diffusers, VIDEO_TO_VIDEO), SPECIALS | VIDEO_SPECIALS, SIZES)
    save_pipeline(made.pipe, tmp_path / "pipeline")
    tree = runs.tree(tmp_path / "pipeline", tmp_path, {"name": "nft", "steps": 3, "group": 4})
    call = dict(made.call)
    if where == "call":
        call["video"] = str(file)
    else:
        table = tmp_path / "prompts.jsonl"
        table.write_text(f'{{"prompt": "a dance", "video": "{file}"}}\n')
    tree["model"] |= {"call": call, "guidance": {"sample": 1.0, "train": 1.0}}
    tree["evaluate"] |= {"guidance": 1.0}
    place = "prompts.jsonl.*video" if where == "column" else "model.call, video"
    with pytest.raises(UserError, match=f"{place}.*{name}.*({message})"):
        check_start(run_from(tree, "run"))
    answer = ImageRows(("video",)).winnable([""], [{"video": str(file)}])
    assert answer[0].answer == "no"


def test_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_files, "MOST_VIDEO_PIXELS", 4 * SIDE * SIDE)
    for form in ("apng", "mp4"):
        file = written(tmp_path / f"video.{form}", stills(5))
        shorter = written(tmp_path / f"shorter.{form}", stills(4))
        small = [still.resize((SIDE // 2, SIDE // 2)) for still in stills(5)]
        smaller = written(tmp_path / f"smaller.{form}", small)
        for followed, frames in (
            (lambda shorter=shorter: video_files.open_video_file(shorter), 4),
            (lambda smaller=smaller: video_files.open_video_file(smaller), 5),
            (lambda file=file: video_files.open_video_file(file, most=4), 4),
        ):
            opened = advice(
                "its frames of {} x {} have more than {} pixels together: cut it shorter, make it "
                "smaller, or set num_frames",
                lambda file=file: video_files.open_video_file(file),
                followed,
            )
            assert len(opened) == frames
