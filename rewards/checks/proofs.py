"""Verification of rewards with published models: by running the authors' code, or by reading it.

`RUN`: the authors' code scored tiny random weights, or random cases, and the reward agrees, as
`tests/rewards/test_authors.py` checks. The published weights themselves were not available.
"""

from typing import Literal, NamedTuple

Basis = Literal["authors' code run", "read", "from memory"]


class Proof(NamedTuple):
    """largest: largest difference from the authors' scores; about: what was run or read; gradient:
    whether the reward has a gradient with respect to the pixels."""

    basis: Basis
    about: str
    largest: float | None = None
    gradient: bool = False


PROOFS = {
    "aesthetic": Proof(
        "authors' code run", "the head and its normalisation", 1.5e-7, gradient=True
    ),
    "clip": Proof(
        "read", "the vectors come from transformers' and open_clip's own code", gradient=True
    ),
    "clap": Proof("read", "transformers' own code computes the vectors"),
    "clip_flant5": Proof("authors' code run", "the whole model, t2v_metrics 1.2", 9.4e-9),
    "compbench": Proof(
        "authors' code run", "phrases and product on random answers; theirs have four digits", 5e-5
    ),
    "consistency": Proof("read", "Vchitect/VBench, subject and background consistency"),
    "deqa": Proof("authors' code run", "DeQA's question on random answers; no model", 1.1e-6),
    "dpg_bench": Proof("authors' code run", "the scoring of random answers; not mPLUG", 0.0),
    "dreamsim": Proof("authors' code run", "the ensemble with its adapter", 1.2e-7),
    "editreward": Proof("authors' code run", "Qwen2.5-VL's and MiMo-VL's chat templates", 9.6e-7),
    "editscore": Proof("authors' code run", "both protocols on random answers; no model", 0.0),
    "flicker": Proof("authors' code run", "VBench's formula on random frames", 1.3e-8),
    "geneval": Proof("authors' code run", "the rules on 400 random scenes; not the detector", 0.0),
    "hps": Proof(
        "authors' code run", "the whole model and img_score.py at 866735e", 7.5e-8, gradient=True
    ),
    "hpsv3": Proof("authors' code run", "the whole model at 5931ac4", 3.6e-7),
    "imagereward": Proof("authors' code run", "the whole model", 5.1e-7, gradient=True),
    "motion": Proof("authors' code run", "VBench's rule on random flows; not RAFT", 3.6e-7),
    "mps": Proof("authors' code run", "the evaluation's function, without half precision", 1.2e-6),
    "ocr": Proof("authors' code run", "Flow-GRPO's rule on random lines; another engine", 0.0),
    "pickscore": Proof("authors' code run", "the function of their README", 1.8e-7, gradient=True),
    "safety": Proof("from memory", "labels from users' code, thresholds from diffusers"),
    "smoothness": Proof("read", "Vchitect/VBench; block matching in place of AMT-S"),
    "soft_tifa": Proof("authors' code run", "forms and means on random answers; no model", 7.1e-9),
    "synchrony": Proof("from memory", "spectral flux as Bello et al. and Dixon define it"),
    "unified_reward": Proof("authors' code run", "six clients' requests at ff6f520; no model", 0.0),
    "unigenbench": Proof("authors' code run", "the question in both languages at 49d0bce", 0.0),
    "videoalign": Proof("authors' code run", "heads of one and of three rows", 4.3e-5),
    "vqascore": Proof("authors' code run", "the question on random answers; no model", 1.6e-8),
}


def by_basis() -> dict[Basis, list[str]]:
    names: dict[Basis, list[str]] = {"authors' code run": [], "read": [], "from memory": []}
    for name, proof in PROOFS.items():
        names[proof.basis].append(name)
    return names
