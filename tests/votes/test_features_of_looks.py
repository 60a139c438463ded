"""What the features of a fit see: how an image looks, and not only what is in it."""

import random

import numpy as np
import torch

from flowrl.demo.taste import covered
from flowrl.demo.world import arrange, prompts_of, render, wanted_shapes
from flowrl.votes.fit import DEFAULT_FEATURES
from rewards import Samples
from rewards.catalogue.fitted import load_columns
from rewards.fitted.folder import FeatureSource
from rewards.fitted.heads import LinearHead, VotedPairs

PER_PROMPT, PROMPTS = 6, 45
OUTPUT = 128  # columns of clip: an image's vector, and its product with the prompt's
CLIP = {"model": "flowrl/demo/shapes-clip"}


def drawn_scenes():
    """Drawings of the demo's world, several of each prompt."""
    rng = random.Random(0)
    prompts = [p for p in rng.sample(prompts_of("train"), PROMPTS) for _ in range(PER_PROMPT)]
    media = render([arrange(wanted_shapes(prompt), rng) for prompt in prompts])
    return Samples(media, prompts, torch.arange(len(prompts)) // PER_PROMPT)


def held_out_correlation(scenes, x, values):
    """Correlation, within prompts that were not voted on, of a taste and a fit to 120 votes."""
    rng, voted = np.random.default_rng(0), 2 * PROMPTS // 3
    first = np.repeat(np.arange(voted), 5) * PER_PROMPT
    a, b = first + rng.integers(0, PER_PROMPT, (2, len(first)))
    a, b = a[a != b], b[a != b]
    label = (np.sign(values[a] - values[b]) + 1) / 2
    prompts = [scenes.prompts[row] for row in a]
    head = LinearHead.fit(VotedPairs(x, a, b, label, np.zeros(len(a)), prompts), 10.0)
    of = [v[voted * PER_PROMPT :].reshape(-1, PER_PROMPT) for v in (head.scores(x), values)]
    return np.corrcoef(*((v - v.mean(1, keepdims=True)).ravel() for v in of))[0, 1]


def test_the_default_features_see_sizes_within_a_prompt_and_the_output_of_clip_hardly():
    scenes = drawn_scenes()
    values = np.array([covered(image) for image in scenes.media])
    assert DEFAULT_FEATURES[0] == "clip"
    whole = load_columns([FeatureSource(name, CLIP) for name in DEFAULT_FEATURES]).of(scenes)
    output = held_out_correlation(scenes, whole[:, :OUTPUT], values)
    found = held_out_correlation(scenes, whole, values)
    assert output < 0.6 and found > 0.75, (output, found)
