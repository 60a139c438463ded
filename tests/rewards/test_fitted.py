"""A reward fitted to votes: folds by prompt, the folder, and the reward that it loads as."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModel, AutoProcessor

from rewards import Samples, load
from rewards.catalogue.fitted import FEATURED, load_columns
from rewards.checks.differentiable import differentiable_score
from rewards.checks.gradient_test import gradient_test
from rewards.checks.self_test import Prompts, self_test
from rewards.fitted.folder import FeatureSource, FittedFolder, prompt_hash, weights_digest
from rewards.fitted.heads import (
    FOLDS,
    RIDGES,
    LinearHead,
    VotedPairs,
    choose_ridge,
    held_out_heads,
    held_out_margins,
    prompt_fold,
)
from rewards.fitted.scoring import HeldOutScores
from rewards.rights import Limits, NotGranted, limited
from rewards.types import per_of
from tests.support.advice import advice
from tests.support.reward_contract import check_contract, images, videos

CLIP = {"model": "flowrl/demo/shapes-clip"}


def pairs_of(prompts: int = 40, each: int = 4, d: int = 6, seed: int = 0, copied=False):
    """Votes by a linear taste; `copied`: random features and votes that are the same in every pair
    of a prompt, so that a prompt on both sides of a split gives its votes away."""
    rng = np.random.default_rng(seed)
    n, p = 2 * prompts * each, prompts * each
    features = rng.normal(size=(n, d))
    a, b = np.arange(0, n, 2), np.arange(1, n, 2)
    names = [f"prompt {i // each}" for i in range(p)]
    margin = (features[a] - features[b]) @ rng.normal(size=d)
    label = (margin + rng.logistic(size=p) > 0).astype(float)
    if copied:
        first = np.repeat(np.arange(prompts) * each, each)
        features[a], features[b] = features[a[first]], features[b[first]]
        label = rng.integers(0, 2, prompts)[np.repeat(np.arange(prompts), each)].astype(float)
    return VotedPairs(features, a, b, label, np.zeros(p), names)


def test_all_votes_of_a_prompt_are_in_one_fold_and_folds_are_fixed():
    pairs = pairs_of()
    by_prompt = {}
    for prompt, fold in zip(pairs.prompts, pairs.fold, strict=True):
        assert by_prompt.setdefault(prompt, fold) == fold
    assert pairs.folds == list(range(FOLDS))
    assert [prompt_fold(f"a {x} cat") for x in ("red", "green", "blue")] == [0, 0, 2]


@pytest.mark.slow
def test_no_held_out_prompt_leaks_into_its_head():
    """Votes of a prompt give each other away: only a split by prompts is at chance."""
    pairs = pairs_of(prompts=50, each=3, d=50, copied=True)
    right = (held_out_margins(pairs, held_out_heads(pairs)) > 0) == (pairs.label > 0.5)
    assert abs(right.mean() - 0.5) < 4 * 0.5 / 50**0.5
    rows = VotedPairs(*(vars(pairs)[k] for k in ("features", "a", "b", "label", "side")),
                      [f"row {i}" for i in range(len(pairs.a))])  # fmt: skip
    leaked = (held_out_margins(rows, held_out_heads(rows)) > 0) == (pairs.label > 0.5)
    assert leaked.mean() > 0.8, "the test can see a leak"


@pytest.mark.slow
def test_a_head_has_the_same_bits_whatever_its_held_out_prompts_say():
    pairs = pairs_of(prompts=20, each=2, d=3)
    rng, found = np.random.default_rng(1), held_out_heads(pairs)
    for fold in pairs.folds[:3]:
        own = pairs.fold == fold
        features = pairs.features.copy()
        for side in (pairs.a, pairs.b):
            features[side[own]] = 100 * rng.normal(size=(own.sum(), features.shape[1]))
        label = np.where(own, 1 - pairs.label, pairs.label)
        one = found[fold]
        two = held_out_heads(replace(pairs, features=features, label=label))[fold]
        assert (one.model.weight == two.model.weight).all() and one.model.ridge == two.model.ridge
        assert (one.centre == two.centre).all() and (one.scale == two.scale).all()


def test_the_ridge_is_weak_for_a_taste_and_strong_for_noise():
    taste, noise = pairs_of(seed=2), pairs_of(seed=2, d=40)
    noise = replace(
        noise, label=np.random.default_rng(0).integers(0, 2, len(noise.a)).astype(float)
    )
    assert choose_ridge(taste).ridge < 30 < choose_ridge(noise).ridge
    assert len(choose_ridge(taste).losses) == len(RIDGES)


def test_votes_of_one_prompt_have_a_fit_but_nothing_to_hold_out():
    pairs = pairs_of(prompts=1, each=5)
    assert choose_ridge(pairs) == (6.0, ())
    head = LinearHead.fit(pairs, choose_ridge(pairs).ridge)
    assert np.isfinite(head.scores(pairs.features)).all()
    heads = advice(
        "votes of a single prompt, or of too few, cannot be held out: vote on more prompts",
        lambda: held_out_heads(pairs),
        lambda: held_out_heads(pairs_of(prompts=8, each=2)),
    )
    assert len(heads) > 1


def test_no_vote_is_a_sentence():
    pairs = pairs_of()
    with pytest.raises(ValueError, match="all pairs were skipped"):
        LinearHead.fit(pairs.where(np.zeros(len(pairs.a), bool)), 1.0)


def test_scores_are_centred_on_the_voted_samples_and_features_without_spread_are_left_out():
    pairs = pairs_of()
    pairs.features[:, 3] = 7.0
    head = LinearHead.fit(pairs, 1.0)
    assert abs(head.scores(pairs.features).mean()) < 1e-12
    assert head.scale[3] == 1.0 and abs(head.model.weight[3]) < 1e-12


def test_deviations_are_of_the_difference_to_the_mean_of_the_group():
    pairs = pairs_of()
    head = LinearHead.fit(pairs, 1.0)
    x = head.scaled(pairs.features[:5])
    group = np.array([0, 0, 0, 1, 1])
    wanted = np.concatenate([x[:3] - x[:3].mean(0), x[3:] - x[3:].mean(0)])
    np.testing.assert_allclose(
        head.deviations(pairs.features[:5], group), head.model.deviation(wanted)
    )
    alone = head.deviations(pairs.features[:1], np.array([9]))
    np.testing.assert_allclose(alone, head.model.deviation(x[:1]))


@pytest.fixture(scope="module")
def taste(tmp_path_factory):
    """A folder with a head on the demo's CLIP, fitted to which of two images is redder."""
    columns = load_columns([FeatureSource("clip", CLIP)])
    prompts = [f"a {c} {s}" for c in ("red", "blue", "green") for s in ("circle", "square")] * 6
    media = torch.rand(2 * len(prompts), 3, 32, 32, generator=torch.Generator().manual_seed(0))
    media[:, 0] *= torch.linspace(0, 1, len(media))[torch.randperm(
        len(media), generator=torch.Generator().manual_seed(1))][:, None, None]  # fmt: skip
    samples = Samples(media, [p for p in prompts for _ in (0, 1)], torch.arange(len(media)) // 2)
    red = media[:, 0].flatten(1).mean(1).numpy()
    a, b = np.arange(0, len(media), 2), np.arange(1, len(media), 2)
    label = (red[a] > red[b]).astype(float)
    pairs = VotedPairs(columns.of(samples), a, b, label, np.zeros(len(a)), prompts)
    head = LinearHead.fit(pairs, choose_ridge(pairs).ridge)
    source = FeatureSource("clip", CLIP, weights_digest(columns.rewards[0]))
    folder = tmp_path_factory.mktemp("taste")
    seen = frozenset(prompt_hash(prompt) for prompt in prompts)
    FittedFolder([source], head, seen, {"votes": {"pairs": len(a)}}).write(folder, "# a card\n")
    return folder, samples, red, pairs


def test_a_folder_loads_as_a_reward_that_has_learned_the_taste(taste):
    folder, samples, red, _ = taste
    reward = load("fitted", path=str(folder))
    scores = check_contract(reward, images)
    assert len(scores.unique()) > 1
    found = reward(samples).numpy()
    assert np.corrcoef(found, red)[0, 1] > 0.8
    assert reward.has_seen("a red circle") and not reward.has_seen("a red cat")
    assert {p.name for p in folder.iterdir()} == {"fitted.yaml", "head.safetensors", "README.md"}


def test_a_videos_score_is_the_mean_of_its_frames(taste):
    reward = load("fitted", path=str(taste[0]))
    check_contract(reward, videos)
    samples = videos(["a red circle"] * 2)
    frames = Samples(samples.media[0], ["a red circle"] * len(samples.media[0]),
                     torch.zeros(len(samples.media[0]), dtype=torch.long))  # fmt: skip
    assert float(reward(samples)[0]) == pytest.approx(float(reward(frames).mean()), abs=1e-5)


def test_its_gradient_is_right_and_caution_has_none(taste):
    folder = str(taste[0])
    said = gradient_test("taste", load("fitted", path=folder), Prompts(["a red circle"]))
    assert "finite differences" in said
    with pytest.raises(ValueError, match="it offers no gradient"):
        differentiable_score("taste", load("fitted", path=folder, cautious=1.0))


def test_caution_takes_a_deviation_off_within_the_group(taste):
    folder, samples, _, _ = taste
    some = samples.take(range(8))
    plain, careful = (
        load("fitted", path=str(folder)),
        load("fitted", path=str(folder), cautious=2.0),
    )
    features = careful.columns.of(some)
    wanted = plain(some).numpy() - 2 * careful.fitted.head.deviations(features, some.group.numpy())
    np.testing.assert_allclose(careful(some).numpy(), wanted, rtol=1e-12)
    assert (per_of(plain), per_of(careful)) == ("sample", "group")
    for name, reward in (("plain", plain), ("careful", careful)):
        assert self_test(name, reward, Prompts(["a red circle"]))


def test_held_out_scores_use_the_head_that_has_not_seen_the_prompt(taste):
    _, samples, _, pairs = taste
    columns, heads = load_columns([FeatureSource("clip", CLIP)]), held_out_heads(pairs)
    found = HeldOutScores(columns, heads)(samples).numpy()
    margins = found[pairs.a] - found[pairs.b]
    np.testing.assert_allclose(margins, held_out_margins(pairs, heads), atol=1e-9)


def test_the_rewards_with_features_are_those_that_are_named():
    assert set(FEATURED) == {
        "clip", "hps", "pickscore", "siglip", "dinov2", "patches", "last_hidden",
    }  # fmt: skip
    columns = advice(
        "features: {} offers none: use {}",
        lambda: load_columns([FeatureSource("judge")]),
        lambda: load_columns([FeatureSource("clip", CLIP)]),
    )
    assert columns.graded
    with pytest.raises(ValueError, match="has no setting 'modle'; did you mean 'model'"):
        load_columns([FeatureSource("clip", {"modle": "x"})])


def test_features_of_other_weights_are_those_of_the_fit_or_fitted_again(tmp_path):
    (fitted,) = load_columns([FeatureSource("clip", CLIP)]).rewards
    other = {"model": str(tmp_path)}
    changed = AutoModel.from_pretrained(CLIP["model"])
    with torch.no_grad():
        changed.logit_scale.add_(1)
    changed.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(CLIP["model"], backend="pil").save_pretrained(tmp_path)
    digest = weights_digest(fitted)

    def again() -> None:
        (reward,) = load_columns([FeatureSource("clip", other)]).rewards
        load_columns([FeatureSource("clip", other, weights_digest(reward))])

    for followed in (lambda: load_columns([FeatureSource("clip", CLIP, digest)]), again):
        advice(
            "its weights have changed since the fit (digest {}, not {}): use the model of the fit, "
            "or fit again",
            lambda: load_columns([FeatureSource("clip", other, digest)]),
            followed,
        )


def damaged(folder, tmp_path, change):
    """A copy of a folder whose record is changed."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    record = yaml.safe_load((tmp_path / "fitted.yaml").read_text())
    change(record)
    (tmp_path / "fitted.yaml").write_text(yaml.safe_dump(record))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(format=2), "in format 1"),
        (lambda r: r.update(features=[]), "no features or no head"),
        (lambda r: r["features"][0].update(digest="0" * 64), "weights have changed since the fit"),
        (lambda r: r["features"][0].update(digest=""), "must have a name and a digest"),
        (lambda r: r["features"][0].update(name="fitted"), "'fitted' offers none"),
        (lambda r: r["features"][0].update(name="os.path"), "'os.path' offers none"),
        (lambda r: r["head"].update(digest="0"), "the folder was changed"),
        (lambda r: r["head"].update(ridge=-1), "ridge must be above 0"),
        (lambda r: r["head"].update(ridge=0), "ridge must be above 0"),
        (lambda r: r["head"].update(ridge=True), "ridge must be a finite number"),
        (lambda r: r["head"].update(ridge=10**30, left_side=10**400), "left_side must be a finite"),
        (lambda r: r.update(seen=[1]), "seen is not a list"),
    ],
)
def test_a_changed_folder_is_refused_with_the_place(taste, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load("fitted", path=damaged(taste[0], tmp_path, change))


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"!!python/object/apply:os.system [ls]"])
def test_a_damaged_record_is_refused(taste, tmp_path, content):
    path = damaged(taste[0], tmp_path, lambda r: None)
    (tmp_path / "fitted.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"fitted\.yaml: not"):
        load("fitted", path=path)


def test_no_folder_is_a_sentence_with_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"it has no fitted\.yaml; `flowrl fit-reward"):
        load("fitted", path=str(tmp_path))


@pytest.mark.parametrize("linked", ["fitted.yaml", "head.safetensors"])
def test_a_folder_from_elsewhere_reads_no_file_outside_of_its_run(taste, tmp_path, linked):
    """A file of it may be a link, which a folder's own path does not show."""
    run, own = tmp_path / "run", tmp_path / "run" / "taste"
    own.mkdir(parents=True)
    for file in taste[0].iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    with limited(Limits(run)):
        load("fitted", path=str(own))
        (own / linked).rename(tmp_path / linked)
        (own / linked).symlink_to(tmp_path / linked)
        with pytest.raises(NotGranted, match="needs the right to files"):
            load("fitted", path=str(own))
    load("fitted", path=str(own))
