"""Comparisons of rewards of published models: with their authors' code, or with what was read.

`RUN`: the authors' code scored tiny random weights, or judged drawn cases, and the reward agrees;
`tests/rewards/test_authors.py` keeps that. The published weights themselves were not in reach.
"""

from typing import Literal, NamedTuple

Basis = Literal["authors' code run", "read", "from memory"]


class Proof(NamedTuple):
    """largest: largest difference from the authors' scores; about: what was run, or read."""

    basis: Basis
    about: str
    largest: float | None = None


PROOFS = {
    "aesthetic": Proof("authors' code run", "the head and its normalisation", 1.5e-7),
    "clip": Proof("read", "transformers' and open_clip's own code computes the vectors"),
    "clip_flant5": Proof("read", "linzhiqiu/CLIP-FlanT5 and t2v_metrics at 1bec390"),
    "compbench": Proof("read", "Karine-Huang/T2I-CompBench, BLIPvqa_eval"),
    "consistency": Proof("read", "Vchitect/VBench, subject and background consistency"),
    "deqa": Proof("read", "zhiyuanyou/DeQA-Score and Q-Align, evaluate/scorer.py"),
    "dpg_bench": Proof("read", "TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py"),
    "dreamsim": Proof("authors' code run", "the ensemble with its adapter", 1.2e-7),
    "editreward": Proof("authors' code run", "Qwen2.5-VL's and MiMo-VL's chat templates", 9.6e-7),
    "editscore": Proof("authors' code run", "both protocols on drawn answers; no model", 0.0),
    "flicker": Proof("read", "Vchitect/VBench, temporal flickering"),
    "geneval": Proof("authors' code run", "the rules, 400 drawn scenes; not the detector", 0.0),
    "hps": Proof("read", "tgxs002/HPSv2, img_score.py"),
    "hpsv3": Proof("authors' code run", "the whole model at 5931ac4", 3.6e-7),
    "imagereward": Proof("authors' code run", "the whole model", 5.1e-7),
    "motion": Proof("read", "Vchitect/VBench, dynamic degree; block matching stands in for RAFT"),
    "mps": Proof("authors' code run", "the evaluation's function, without half precision", 1.2e-6),
    "ocr": Proof("read", "yifan123/flow_grpo, ocr.py; the engine is another"),
    "pickscore": Proof("authors' code run", "the function of their README", 1.8e-7),
    "safety": Proof("from memory", "labels from users' code, thresholds from diffusers"),
    "smoothness": Proof("read", "Vchitect/VBench; block matching stands in for AMT-S"),
    "soft_tifa": Proof("read", "facebookresearch/GenEval2, evaluation.py"),
    "unified_reward": Proof("read", "CodeGoat24/UnifiedReward, its inference scripts"),
    "unigenbench": Proof("authors' code run", "the question in both languages at 49d0bce", 0.0),
    "videoalign": Proof("authors' code run", "heads of one and of three rows", 4.3e-5),
    "vqascore": Proof("read", "linzhiqiu/t2v_metrics 3, qwen2vl_model.py"),
}


def by_basis() -> dict[Basis, list[str]]:
    found: dict[Basis, list[str]] = {"authors' code run": [], "read": [], "from memory": []}
    for name, proof in PROOFS.items():
        found[proof.basis].append(name)
    return found
