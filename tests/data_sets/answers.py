"""Data sets of answers: rows in the form of each, with content of our own.

Every row has completions that are right and completions that are wrong. `source` is where the form
was read. Not found, and so not here: multiple choice (their answers are letters, which
`exact_answer` compares), the proofs of OlympiadBench, which have no answer, and the columns of
Big-Math-RL-Verified, SYNTHETIC-1 and Countdown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUESTION = "How long is the rope?"
QWEN = "QwenLM/Qwen2.5-Math, evaluation/data/{0}/test.jsonl, and its parser.py"


@dataclass(frozen=True)
class AnswerForm:
    """Rows, each with right and wrong completions; `read`: settings of the data set beside
    `source`, `reward` as a run file has it, `suffix` of the file."""

    rows: tuple[tuple[Mapping[str, Any], tuple[str, ...], tuple[str, ...]], ...]
    source: str
    read: Mapping[str, Any] = field(default_factory=dict)
    reward: Any = "math_answer"
    suffix: str = "jsonl"


def boxed(*answers: str) -> tuple[str, ...]:
    return tuple(rf"So it is $\boxed{{{answer}}}$." for answer in answers)


def gsm(answer: str) -> dict[str, Any]:
    return {
        "question": QUESTION,
        "answer": f"It has 3 parts of 4 = <<3*4=12>>12.\nThat is ${answer}.\n#### {answer}",
    }


def math500(answer: str) -> dict[str, Any]:
    return {
        "problem": QUESTION,
        "solution": rf"It is $\boxed{{{answer}}}.$",
        "answer": answer,
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    }


def hendrycks(solution: str) -> dict[str, Any]:
    return {"problem": QUESTION, "level": "Level 3", "type": "Algebra", "solution": solution}


def minerva(end: str) -> dict[str, Any]:
    solution = f"With \\[\nl=v t\n\\] we have\n\\[\nl={end}"
    return {"problem": QUESTION, "solution": solution, "type": "Ropes (Spring 2006)", "idx": 0}


def olympiad(*answers: str, kind: str = "Numerical", unit: str | None = None) -> dict[str, Any]:
    return {
        "id": 1,
        "subfield": "Algebra",
        "context": None,
        "question": QUESTION,
        "solution": ["It follows."],
        "final_answer": list(answers),
        "is_multiple_answer": len(answers) > 1 or "," in answers[0],
        "unit": unit,
        "answer_type": kind,
        "error": None,
    }


def college(answer: str) -> dict[str, Any]:
    return {
        "data_source": "college_math.Ropes",
        "question_number": "exercise.1.2.3",
        "question": QUESTION,
        "answer": answer,
        "license": "none",
        "data_topic": "college_math.algebra",
    }


def verl(source: str, answer: str, ability: str = "math") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"content": QUESTION, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": 1, "split": "train"},
    }


def open_r1(answer: str) -> dict[str, Any]:
    return {
        "problem": QUESTION,
        "solution": "It is long.",
        "answer": answer,
        "problem_type": "Algebra",
        "question_type": "math-word-problem",
        "source": "olympiads",
        "uuid": "u",
        "is_reasoning_complete": [True],
        "generations": ["<think>so</think> it is"],
        "correctness_math_verify": [True],
        "correctness_llama": None,
        "finish_reasons": None,
        "correctness_count": 1,
        "messages": [
            {"content": QUESTION, "role": "user"},
            {"content": "<think>so</think> it is", "role": "assistant"},
        ],
    }


def skywork(answer: str) -> dict[str, Any]:
    """The answer is the JSON text of a list of one."""
    difficulty = {"DeepSeek-R1-Distill-Qwen-1.5B": 3, "DeepSeek-R1-Distill-Qwen-7B": 2,
                  "DeepSeek-R1-Distill-Qwen-32B": 1}  # fmt: skip
    row = verl("train-math-numinamath1.5_olympiads", json.dumps([answer]))
    return row | {"extra_info": {"index": 1, "model_difficulty": difficulty}}


def open_reasoner(answer: str) -> dict[str, Any]:
    return {
        "0": {"from": "human", "value": QUESTION, "ground_truth": None},
        "1": {"from": "assistant", "value": None, "ground_truth": {"value": answer}},
    }


def intellect(answer: str) -> dict[str, Any]:
    told = json.dumps({"ground_truth": answer})
    return {"prompt": QUESTION, "task_type": "verifiable_math", "verification_info": told}


def numina(answer: str) -> dict[str, Any]:
    solution = rf"It is not 5, so it is $\boxed{{{answer}}}$."
    turns = [{"content": QUESTION, "role": "user"}, {"content": solution, "role": "assistant"}]
    return {"source": "olympiads", "problem": QUESTION, "solution": solution, "messages": turns}


def xlam(*calls: Mapping[str, Any]) -> dict[str, Any]:
    tools = [
        {
            "name": "measure",
            "description": "Measures.",
            "parameters": {"of": {"description": "what", "type": "str"}},
        }
    ]
    return {"id": 0, "query": QUESTION, "answers": json.dumps(calls), "tools": json.dumps(tools)}


ROPE = {"name": "measure", "arguments": {"of": "rope", "unit": "m"}}
LINE = {"name": "measure", "arguments": {"of": "line"}}
NESTED = {"name": "math_answer", "column": "reward_model.ground_truth"}

FORMS: dict[str, AnswerForm] = {
    "GSM8K": AnswerForm(
        (
            (gsm("12"), (*boxed("12", "12.0"), "It is 12.", "#### 12"), (*boxed("13"), "#### 21")),
            (gsm("1,250"), (*boxed("1250", "1,250", r"\$1,250"), "#### 1,250"), boxed("1", "250")),
            (gsm("-3"), (*boxed("-3"), "It is -3."), (*boxed("3"), "7-3 is 4")),
        ),
        "openai/gsm8k, by every loader of it: the answer stands behind ####",
        {"column": "question"},
    ),
    "MATH-500": AnswerForm(
        (
            (math500(r"\frac{3}{4}"), boxed(r"\dfrac34", "0.75", "3/4"), boxed(r"\frac{4}{3}")),
            (math500(r"\$18.90"), boxed("18.90", "18.9", r"\$18.90"), boxed("18", "1890")),
            (math500(r"\text{Evelyn}"), boxed("Evelyn", r"\text{Evelyn}"), boxed("Eve")),
            (math500(r"(3,\frac{\pi}{2})"), boxed(r"\left( 3, \frac{\pi}{2} \right)"),
             boxed(r"(\frac{\pi}{2},3)", "3")),
            (math500(r"x \in [-2,7]"), boxed(r"[-2,7]", r"x \in [-2,7]"), boxed("(-2,7)")),
            (math500(r"70\sqrt{2}"), boxed(r"70 \sqrt 2", r"140/\sqrt{2}"), boxed("70")),
            (math500(r"11\sqrt2"), boxed(r"11\sqrt{2}"), boxed("11")),
            (math500(r"90^\circ"), boxed("90", r"90^{\circ}"), boxed("9")),
            (math500(r"\begin{pmatrix} 1 & 2 \\ 0 & 3 \end{pmatrix}"),
             boxed(r"\begin{pmatrix}1&2\\0&3\end{pmatrix}"),
             boxed(r"\begin{pmatrix}1&2\\3&0\end{pmatrix}")),
            (math500("6 - 5i"), boxed("6-5i", "-5i + 6"), boxed("6+5i")),
            (math500(r"2516_8"), boxed("2516_8", "2516_{8}"), boxed("2516_9", "2517_8")),
            (math500(r"10,\!080"), boxed("10080", "10,080"), boxed("10", "80")),
            (math500(r"5\%"), boxed(r"5\%", "5"), boxed("6")),
            (math500(r"1,-2"), boxed("1, -2", "-2, 1"), boxed("1", "-2")),
            (math500("3x^2-1"), boxed("-1 + 3x^2"), boxed("3x^2+1")),
            (math500(r"12:00"), boxed("12:00"), boxed("12", "11:00")),
            (math500(r"\text{(B)}"), boxed(r"\text{(B)}", "(B)", "B"), boxed("A", "(C)")),
            (math500(r"4.5\text{ cm}"), boxed("4.5", r"4.5\text{ cm}"), boxed("45")),
        ),
        "HuggingFaceH4/MATH-500, test.jsonl, as lighteval's math_500 and others read it",
        {"column": "problem"},
    ),
    "MATH": AnswerForm(
        (
            (hendrycks(r"Since \boxed{5} is too small, it is $\boxed{\frac{3}{4}}$."),
             boxed(r"\dfrac34", "0.75"), boxed("5", "4/3")),
            (hendrycks(r"Hence $\boxed{x = \left\{1, 2\right\}}$."),
             boxed(r"\{2, 1\}"), boxed(r"\{1\}")),
            (hendrycks(r"That is \fbox{12}."), boxed("12"), boxed("21")),
        ),
        "hendrycks/math, MATH/train/*/*.json; math_equivalence.py and dataset/MATH.py of that "
        "repository: the last \\boxed or \\fbox is the answer",
        {"column": "problem"},
        {"name": "math_answer", "column": "solution"},
    ),
    "math12k": AnswerForm(
        (({"problem": QUESTION, "answer": r"\frac{3}{4}"}, boxed("3/4"), boxed("4/3")),),
        "hiyouga/math12k, as the examples of hiyouga/EasyR1 read it",
        {"column": "problem"},
        suffix="parquet",
    ),
    "DeepMath-103K, of TRL": AnswerForm(
        (
            ({"prompt": [{"content": QUESTION, "role": "user"}], "solution": r"\dfrac{1}{2}"},
             boxed("0.5"), boxed("2")),
            ({"prompt": [{"content": QUESTION, "role": "user"}], "solution": "Yes"},
             boxed(r"\text{Yes}", "Yes"), boxed("No")),
        ),
        "trl-lib/DeepMath-103K, as TRL's pages of GRPO train on it: prompt and solution",
        reward={"name": "math_answer", "column": "solution"},
        suffix="parquet",
    ),
    "Minerva": AnswerForm(
        (
            (minerva(r"\boxed{2.5} \mathrm{~m}" + "\n\\]"), boxed("2.5", "5/2"), boxed("25")),
            (minerva(r"\boxed{4.5e33} \mathrm{ergs}" + "\n\\]"),
             boxed("4.5e33", r"4.5 \times 10^{33}"), boxed("4.5", r"4.5 \times 10^{32}")),
            (minerva(r"\boxed{1e11}.\]"), boxed("1e11", r"10^{11}"), boxed("11", "1")),
            (minerva(r"\boxed{-1./3}$."), boxed("-1/3", r"-\frac{1}{3}"), boxed("1/3")),
            (minerva(r"\boxed{\frac{1}{s}-\frac{1}{s} e^{-s T}}" + "\n\\]"),
             boxed(r"\frac{1-e^{-sT}}{s}"), boxed(r"\frac{1+e^{-sT}}{s}")),
            (minerva(r"\boxed{I(0)}$."), boxed("I(0)"), boxed("I(1)")),
            (minerva(r"\boxed{(2 - 3 e^{-2 t}) u(t)} \]"), boxed("(2-3e^{-2t})u(t)"),
             boxed("(2+3e^{-2t})u(t)")),
            (minerva(r"\boxed{0.10} \mathrm{~m} / \mathrm{s} \]"), boxed("0.1"), boxed("10")),
        ),
        QWEN.format("minerva_math"),
        {"column": "problem"},
        {"name": "math_answer", "column": "solution"},
    ),
    "OlympiadBench": AnswerForm(
        (
            (olympiad("7"), boxed("7"), boxed("8")),
            (olympiad(r"$\frac{9}{32}$"), boxed(r"\frac{9}{32}", "0.28125"), boxed("9", "32")),
            (olympiad("5,15"), boxed("5,15", "15, 5"), boxed("5", "15", "5,16")),
            (olympiad(r"$90^{\circ}$,$60^{\circ}$"), boxed(r"90^\circ, 60^\circ", "60, 90"),
             boxed(r"60^\circ", "90")),
            (olympiad("$(1,1), (3,2)$", kind="Tuple"), boxed("(1,1), (3,2)"),
             boxed("(3,2)", "(1,1),(2,3)")),
            (olympiad(r"$[\frac{1}{2}, 8]$", kind="Interval"), boxed(r"[0.5, 8]"),
             boxed(r"(0.5, 8)", "8")),
            (olympiad(r"$m n-\lfloor m / 2\rfloor$", kind="Expression"),
             boxed(r"mn - \lfloor m/2 \rfloor"), boxed("mn")),
            (olympiad("45", unit="minute"), boxed("45"), boxed("46")),
            (olympiad(r"$2^{1009}$"), boxed("2^{1009}"), boxed("2^{1008}", "2")),
            (olympiad("3", "$4$"), boxed("3, 4", "4,3"), boxed("3", "4")),
        ),
        QWEN.format("olympiadbench"),
        {"column": "question"},
        {"name": "math_answer", "column": "final_answer"},
    ),
    "college_math": AnswerForm(
        (
            (college("$10-4 n$"), boxed("10-4n", "-4n+10"), boxed("10+4n")),
            (college("$(45,2),(-10,-9)$"), boxed("(45,2), (-10,-9)"), boxed("(45,2)")),
            (college(r"$\frac{10 i-9}{6}$"), boxed(r"-\frac32 + \frac53 i"), boxed(r"\frac{9}{6}")),
            (college("$x=\\frac{1}{2}$"), boxed("x=0.5", r"\frac12"), boxed("2")),
            (college(r"$-\frac{1}{2}, \frac{2}{3}$"), boxed(r"\frac23, -\frac12"),
             boxed(r"\frac23")),
            (college("This is no basis."), boxed("This is no basis", r"\text{This is no basis.}"),
             boxed("This is a basis")),
            (college(r"Solution is: $\left[\begin{array}{c}2 \\ 1\end{array}\right]$"),
             boxed(r"\begin{bmatrix}2\\1\end{bmatrix}", r"\begin{array}{c}2 \\ 1\end{array}"),
             boxed(r"\begin{bmatrix}1\\2\end{bmatrix}")),
            (college(r"$p(1)=1 / 4, p(0)=3 / 4$, and $p(z)=0$ otherwise"),
             boxed(r"p(1)=1 / 4, p(0)=3 / 4, \text{ and } p(z)=0 \text{ otherwise}"),
             boxed("p(z)=0", "0")),
            (college(r"$.72 \mathrm{~m}$"), boxed("0.72", r".72 \mathrm{~m}"), boxed("72")),
            (college(r"$\{x \mid x<0\}$"), boxed(r"\{x \mid x<0\}", r"\{ x | x < 0 \}"),
             boxed(r"(0,\infty)")),
            (college("$1 / 12$"), boxed(r"\frac{1}{12}"), boxed("12")),
            (college(r"$\frac{\sin ^{3} t}{3}+C$"), boxed(r"\frac{1}{3}\sin^3 t + C"),
             boxed(r"\frac{\cos^3 t}{3}+C")),
            (college("18,38"), boxed("18, 38"), boxed("18", "1838")),
        ),
        QWEN.format("college_math"),
        {"column": "question"},
    ),
    "DAPO-Math-17k": AnswerForm(
        (
            (verl("math_dapo", "34", "MATH"), (*boxed("34"), "Answer: $34$", "Answer: 34"),
             (*boxed("43"), "Answer: 3")),
            (verl("math_dapo", "-7", "MATH"), (*boxed("-7"), "Answer: -7"), boxed("7")),
        ),
        "BytedTsinghua-SIA/DAPO-Math-17k, as verl's recipe/dapo reads it: parquet with chats, "
        "whole numbers, and Answer: in the last line",
        reward=NESTED,
        suffix="parquet",
    ),
    "Eurus-2, math": AnswerForm(
        (
            (verl("numina_cn_k12", r"\frac{1}{6}"), boxed("1/6"), boxed("6")),
            (verl("numina_olympiads", "(2, 3)"), boxed("(2,3)"), boxed("(3,2)")),
            (verl("numina_synthetic_math", "-2 < a < 1"), boxed("-2<a<1"), boxed("a<1")),
        ),
        "PRIME-RL/Eurus-2-RL-Data, as verl's prime reward reads it",
        {"where": {"ability": "math"}},
        NESTED,
        "parquet",
    ),
    "verl's own GSM8K": AnswerForm(
        ((verl("openai/gsm8k", "72"), (*boxed("72"), "#### 72"), boxed("27")),),
        "verl's examples/data_preprocess/gsm8k.py",
        reward=NESTED,
        suffix="parquet",
    ),
    "OpenR1-Math-220k": AnswerForm(
        (
            (open_r1("180"), boxed("180"), boxed("18")),
            (open_r1(r"v_{1}=4"), boxed("4", "v_1 = 4"), boxed("5")),
            (open_r1("B"), boxed("B", r"\text{B}"), boxed("C")),
        ),
        "open-r1/OpenR1-Math-220k, as tests/prompts/test_layouts.py trains on it",
        {"column": "messages", "drop_reply": True},
        suffix="parquet",
    ),
    "AIME-2024": AnswerForm(
        ((verl("math_dapo", "033", "MATH"), boxed("33", "033"), boxed("330", "3")),),
        "BytedTsinghua-SIA/AIME-2024: the form of DAPO-Math; answers have up to three digits",
        reward=NESTED,
        suffix="parquet",
    ),
    "Skywork-OR1, math": AnswerForm(
        (
            (skywork(r"\frac{1}{2}"), boxed("1/2", "0.5"), boxed("2")),
            (skywork("-7"), boxed("-7"), boxed("7")),
            (skywork("(1,2)"), boxed("(1,2)"), boxed("(2,1)", "1")),
        ),
        "the card of Skywork/Skywork-OR1-RL-Data at 1cdedc52, and process_skywork.py of "
        "nvidia-china-sae/mair-hub: the first of the list in ground_truth is the answer",
        reward=NESTED,
        suffix="parquet",
    ),
    "Open-Reasoner-Zero": AnswerForm(
        (
            (open_reasoner("18"), boxed("18"), boxed("81")),
            (open_reasoner(r"\frac{3}{4}"), boxed("0.75"), boxed("4/3")),
        ),
        "orz_math_57k_collected.json, whose turns are the columns 0 and 1 once `datasets` has read "
        "them, as several loaders of it use them",
        {"column": "0.value"},
        {"name": "math_answer", "column": "1.ground_truth.value"},
        "parquet",
    ),
    "Polaris-53K": AnswerForm(
        (({"problem": QUESTION, "answer": r"\frac{1}{2}", "difficulty": "3/8"},
          boxed("1/2"), boxed("2")),),
        "the card of POLARIS-Project/Polaris-Dataset-53K: problem, answer, difficulty; its loaders "
        "parse a difficulty of 3/8",
        {"column": "problem"},
    ),
    "DeepScaleR": AnswerForm(
        (
            ({"problem": QUESTION, "answer": r"-\frac{2}{3}", "solution": "It follows."},
             boxed(r"-\frac23"), boxed(r"\frac23")),
            ({"problem": QUESTION, "answer": "26", "solution": ""}, boxed("26"), boxed("62")),
        ),
        "agentica-org/DeepScaleR-Preview-Dataset, from memory: problem, answer, solution",
        {"column": "problem"},
    ),
    "INTELLECT-2, math": AnswerForm(
        (
            (intellect("12"), boxed("12"), boxed("21")),
            (intellect(r"\frac{1}{2}"), boxed("0.5"), boxed("2")),
        ),
        "PrimeIntellect/INTELLECT-2-only-math, in a loader of the library verifiers: "
        "verification_info is the JSON text of an object with ground_truth",
        reward={"name": "math_answer", "column": "verification_info.ground_truth"},
        suffix="parquet",
    ),
    "NuminaMath": AnswerForm(
        ((numina(r"\frac{2}{5}"), boxed("0.4"), boxed("5", "2.5")),),
        "AI-MO/NuminaMath-CoT, from memory: source, problem, solution, messages",
        {"column": "problem"},
        {"name": "math_answer", "column": "solution"},
        "parquet",
    ),
    "AIME 2024, of one column": AnswerForm(
        (({"ID": "2024-I-1", "Problem": QUESTION, "Solution": "So.", "Answer": 33},
          boxed("33", "033"), boxed("330")),),
        "Maxwell-Jia/AIME_2024, columns as a list of evaluation sets names them; Answer is a "
        "number (from memory)",
        {"column": "Problem"},
        {"name": "math_answer", "column": "Answer"},
        "parquet",
    ),
    "AMC, of AIMO": AnswerForm(
        (
            ({"id": 0, "problem": QUESTION, "answer": 142.0, "url": ""}, boxed("142", "142.0"),
             boxed("14")),
            ({"id": 1, "problem": QUESTION, "answer": -3.0, "url": ""}, boxed("-3"), boxed("3")),
        ),
        "AI-MO/aimo-validation-amc, columns as the same list names them; answer is a float (from "
        "memory)",
        {"column": "problem"},
        suffix="parquet",
    ),
    "xLAM": AnswerForm(
        (
            (xlam(ROPE), (json.dumps([ROPE], indent=1),), (json.dumps([LINE]), "measure(rope)")),
            (xlam(ROPE, LINE), (json.dumps([LINE, ROPE]),), (json.dumps([ROPE]),)),
        ),
        "Salesforce/xlam-function-calling-60k, as its loaders read it: answers and tools are JSON",
        {"column": "query"},
        {"name": f"{Path(__file__).with_name('calls.py')}:same_calls"},
    ),
    "geometry3k": AnswerForm(
        (
            ({"images": [], "problem": f"<image>{QUESTION}", "answer": "48"}, boxed("48"),
             boxed("84")),
            ({"images": [], "problem": f"<image>{QUESTION}", "answer": r"6 \sqrt { 2 }"},
             boxed(r"6\sqrt{2}"), boxed("6")),
        ),
        "hiyouga/geometry3k, as verl's examples/data_preprocess/geo3k.py reads it",
        {"column": "problem", "keep": ["problem", "answer"]},
    ),
}  # fmt: skip
