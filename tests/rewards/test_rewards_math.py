"""Mathematical answers: what counts as the same, what is no answer, and what takes too long."""

import threading
import unicodedata

import pytest
import torch

from rewards import Samples, load
from rewards.answers import boxes
from rewards.catalogue import math_answer
from rewards.checks.self_test import Prompts, self_test
from rewards.serving import workers
from tests.support.reward_contract import check_contract, texts

pytest.importorskip("math_verify")


def of(media, answers, column="answer") -> Samples:
    n = len(media)
    meta = [{column: answer} for answer in answers]
    return Samples(list(media), ["p"] * n, torch.zeros(n, dtype=torch.long), meta)


@pytest.fixture(scope="module")
def reward():
    made = load("math_answer", processes=1)
    yield made
    made.workers.close()


MIXED_NUMBERS_AND_UNITS = [  # right answer, answer in a box, whether it is right
    *(("3 1/2", answer, True) for answer in ("7/2", "3.5", r"3\frac{1}{2}", "3 1/2")),
    *(("3 1/2", answer, False) for answer in ("2", "31/2", r"\frac{31}{2}", "1/2", "3")),
    ("-3 1/2", "-3.5", True),
    ("-3 1/2", "-2.5", False),
    ("1 3/4 cups", "1.75", True),
    ("2, 3 1/2", "3.5, 2", True),
    *(("1,000,000", answer, True) for answer in (r"1\text{ million}", "1 million", "10**6")),
    ("12 million", "12", False),
    ("12", r"12\text{ million}", False),
    ("2500", "2.5 thousand", True),
    ("5 dollars", r"\$5", True),
    ("5 dollars", "5", True),
    ("5 cents", r"\$5", False),
    ("5 cm", r"5\text{ cm}", True),
    ("5 cm", "5 m", False),
    ("5 cm", r"5\ \mathrm{m}", False),
    ("5 cm", "5", True),
    ("5 feet", r"5\text{ ft}", True),
    ("5 minutes", "5 hours", False),
    ("7 apples", "7 pears", True),  # words that are no units
    (r"(-\infty,3)", "x<3", True),
    (r"(-\infty,3]", "x<3", False),
    ("[1,2)", r"1\le x<2", True),
    ("x>2", r"(2,\infty)", True),
    ("x>2", r"[2,\infty)", False),
    (r"\emptyset", r"\varnothing", True),
    (r"\emptyset", "0", False),
]
LAST_NUMBERS = [  # text without a box, the number that it ends with, one that it does not
    ("The answer is 3 1/2.", "3.5", "1/2"),
    ("It is 4.5e3", "4500", "3"),
    ("It is 2 \u00d7 10^5.", "200000", "5"),
    ("It is 2*10**5", "200000", "5"),
    ("It is 10^6", "1000000", "6"),
    ("It is \u22127.", "-7", "7"),
    ("It is 12 million.", "12000000", "12"),
    ("In 2024 1/3 of 9 is 3", "3", "1/3"),
    ("From 1-5", "5", "-5"),
    ("It is 5%", "0.05", "0.5"),
    ("2 + 40 = 42\n#### 42\nas step 3 shows", "42", "3"),
    ("#### 3\nno:\n#### $1,042\nin 7 days", "1042", "7"),
    ("#### Step 3\nIt is 42.", "42", "3"),
    ("#### 1. Plan\nIt is 42.", "42", "1"),
]


@pytest.mark.parametrize(("gold", "answer", "right"), MIXED_NUMBERS_AND_UNITS)
def test_mixed_numbers_scales_units_and_solution_sets(reward, gold, answer, right):
    assert reward(of([rf"So it is $\boxed{{{answer}}}$."], [gold])).tolist() == [float(right)]


@pytest.mark.parametrize(("text", "right", "wrong"), LAST_NUMBERS)
def test_a_number_is_read_whole_where_there_is_no_box(reward, text, right, wrong):
    assert reward(of([text] * 2, [right, wrong])).tolist() == [1.0, 0.0]


RIGHT = [
    (r"so it is $\boxed{\frac{1}{2}}$", "0.5"),
    ("The answer is 7.", 7),
    ("it is 1,000", "1000"),
    (r"$x = \frac{1}{2}$", r"\frac12"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"\boxed{[1, 2)}", r"[1,2)"),
    ("so 72", "He sold 48 + 24.\n#### 72"),
    (r"first \boxed{3}, no: \boxed{4}, 5 apples. \boxed{4}", "4"),
    (r"\boxed{6} \boxed{7}", "7"),
    (r"<think>\boxed{5}</think> \boxed{7}", "7"),
    (r"\boxed{6}. Wait, that is wrong. \boxed{7}", "7"),
    (r"\boxed{6} and \boxed{", "6"),
    (r"$6$ and then \[ x = 7 \] since 8 > 7", "7"),
    ("it costs $5, and $7 in all", "7"),
    ("6, no: 7", "7"),
    (r"\boxed{\frac{\sqrt{2}}{\sqrt{\frac{16}{2}}}}", r"\frac{1}{2}"),
    (r"\boxed 7", "7"),
    (r"\fbox{7}", "7"),
    (r"\boxed{18.90}", r"\$18.90"),
    (r"\boxed{\$18.9}", r"\$18.90"),
    ("it costs $18.90", r"\$18.90"),
    (r"\boxed{32348}", r"\$32,\!348"),
    (r"\boxed{32{,}348}", "32348"),
    (r"\boxed{\frac13}", r"0.\overline{3}"),
    (r"\boxed{0.1\overline{6}}", r"\frac{1}{6}"),
    (r"\boxed{12:00}", "12:00"),
    (r"\boxed{evelyn}", r"\text{Evelyn}"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{90}", r"90^\circ"),
    (r"\boxed{7}", r"Since 3 + 4 = 7, it is $\boxed{7}$."),
    (r"\boxed{7}", r"so $x = 7$"),
    (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{0.000333}", r"\frac{1}{3000}"),
    (r"\boxed{25}", r"25\%"),
    (r"\boxed{1 - e^{-1}}", r"1 - \frac{1}{\mathrm{e}}"),
    (r"\boxed{E: a blue whale}", "E"),
    (r"\boxed{\text{(B) 12 cm}}", r"\text{(B)}"),
    ("<think>17</think> <answer>42</answer>", "<answer> 42 </answer>"),
    ("<answer>blue</answer>", "<answer>Blue</answer>"),
    ("<answer>$x+1$</answer>", "1+x"),
    ("<answer>so 72 clips</answer>", "72"),
    (r"\boxed{007}. The last digits of 2,143,007 are 007. So, \boxed{007}.", "7"),
    (r"\boxed{x=1 \text{ or } x=-4}", r"x=-4 \text{ or } x=1"),
    (r"\boxed{\{1,2,5,6\}}", r"\{1,5\} \cup \{2,6\}"),
    ("#### 96\n" + "and a second look agrees with it. " * 12, "96"),
    (r"\boxed{20\%}", "0.2"),
    (r"\boxed{2.5}", r"2\frac{1}{2}"),
    ("it is $2,500", "2500"),
]
WRONG = [
    (r"\boxed{\frac{1}{3}}", "0.5"),
    ("I do not know", "7"),
    ("", "7"),
    (r"\boxed{", "7"),
    ("6 or 8", "7"),
    (r"\boxed{7} \boxed{6}", "7"),
    (r"\boxed{7}. No: \boxed{6}.", "7"),
    (r"<think>\boxed{7}</think> \boxed{6}", "7"),
    ("$7$, so $6$", "7"),
    ("7, so 6", "7"),
    (r"\boxed{12:01}", "12:00"),
    (r"\boxed{Edward}", r"\text{Evelyn}"),
    (r"\boxed{18.9} 3 \boxed{1890}", r"\$18.90"),
    (r"\boxed{0.3}", r"0.\overline{3}"),
    (r"\boxed{(1, 2)}", "[1,2)"),
    (r"\boxed{6 \text{ or } 7}", "7"),
    (r"\boxed{x=-4}", r"x=-4 \text{ or } x=1"),
    (r"\boxed{9\sqrt(2)}", "9"),
    (r"\boxed{(5,3)}", "(3,5)"),
    *(
        (rf"\boxed{{{given}}}", wanted)
        for given, wanted in (
            (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),  # far below what decimals show
            (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
            ("0.0000004", "0.0000003"),
            (r"6.626 \times 10^{-33}", r"6.626 \times 10^{-34}"),
            ("e^{-60}", "e^{-50}"),
            (r"(0, 10^{-21})", r"(0, 10^{-20})"),
            (r"\{10^{-21}\}", r"\{10^{-20}\}"),
            ("x=10^{-21}", "x=10^{-20}"),
            (
                r"\begin{pmatrix} 10^{-21} & 1 \end{pmatrix}",
                r"\begin{pmatrix} 10^{-20} & 1 \end{pmatrix}",
            ),
            (r"\frac{1}{3 \cdot 2^{200}}", r"\frac{2^{199} + 1}{3 \cdot 2^{200}}"),
        )
    ),
    (r"\boxed{C: E is wrong}", "E"),
    (r"\boxed{E, F}", "E"),
    ("<think>42</think> <answer>17</answer>", "42"),
    ("<answer>red</answer>", "<answer>Blue</answer>"),
    ("🎈 $\\undefined{{$", "7"),
]


def test_answers_are_the_same_in_any_form_and_no_others_are(reward):
    pairs = RIGHT + WRONG
    got = reward(of(*zip(*pairs, strict=True)))
    assert got.tolist() == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


PRINTED_FORMS = [
    ("90°", r"90^\circ"), ("√2", r"\sqrt{2}"), ("3√(x+1)", r"3\sqrt{x+1}"), ("x²", "x^2"),
    ("10⁻³", r"\frac{1}{1000}"), ("1011₂", "1011_2"),
    ("2½", r"2\frac{1}{2}"), ("\u22125", "-5"),
    ("\uff11\uff12", "12"), ("2\u00d73", r"2 \times 3"), ("π/2", r"\frac{\pi}{2}"),
    ("±2", r"\pm 2"),
    ("(\u2212∞, 1]", r"(-\infty, 1]"), ("x≤2", r"x \le 2"), ("6÷4", r"\frac{3}{2}"),
]  # fmt: skip


def test_printed_mathematics_is_its_tex(reward):
    texts, golds = zip(*((rf"\boxed{{{shown}}}", tex) for shown, tex in PRINTED_FORMS), strict=True)
    assert reward(of(texts, golds)).tolist() == [1.0] * len(PRINTED_FORMS)
    assert reward(of([rf"\boxed{{{gold}}}" for gold in golds], [s for s, _ in PRINTED_FORMS])).all()


def test_every_printed_sign_has_its_tex():
    for sign, tex in boxes.PRINTED.items():
        assert boxes.same_text(f"a {sign} b", f"a {tex} b") and sign not in boxes.simplified(sign)


def test_signs_of_full_width_are_the_plain_ones_and_no_others():
    """The 94 of the block that are plain ones widened, as Unicode's own table has them."""
    block = [chr(code) for code in range(0xFF01, 0xFFF0)]
    wide = {sign: unicodedata.normalize("NFKC", sign) for sign in block}
    plain = {sign for sign, narrow in wide.items() if 0x21 <= ord(narrow[0]) < 0x7F}
    assert len(plain) == 94
    for sign in block:
        assert boxes._as_tex(sign) == (wide[sign] if sign in plain else sign), hex(ord(sign))


# in the forms of MATH-500, AIME, Minerva, OlympiadBench and college_math, with other content
OWN = [
    *(r"\$18.90", r"\$36", r"\$32,\!348", "12:00", r"0.\overline{3}", r"0.0\overline{45}", "1,000"),
    *(
        r"\text{(C)}",
        r"90^\circ",
        r"90^{\circ}",
        r"\left( 3, \frac{\pi}{2} \right)",
        "p - q",
        "204",
    ),
    *(r"\text{Evelyn}", "6 - 5i", r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", "x^3+3x-6", "even"),
    *(r"(-\infty,-5] \cup [5,\infty)", r"5.4 \text{ cents}", r"1\frac{1}{2}", "2516_8", r"16\%"),
    *(r"11,\! 111", r"\text{June 20}", r"a=1 \text{ or } a=-2", "3, 5, 7", "1:2", "x=5", "B, C"),
    *(r"4:30 \text{ p.m.}", "[-2,7]", r"\dfrac 59", r"\frac43", r"10 \text{ cm}^2", "y = 2x + 3"),
    *(r"\infty", r"1.5\times10^{-3}", r"\log_2 3", "yes", "$2$", r"$\frac{1}{2}$", r"\pm 2", "025"),
    *("1.2e-3", r"\frac{m g}{k}", r"$x^{2}+y^{2}=1$", r"\arcsin{10/13}", "A", r"\mathrm{True}"),
]


def test_right_answers_equal_themselves(reward):
    rows = [{"answer": gold} for gold in OWN]
    assert [one.answer for one in reward.winnable([""] * len(OWN), rows)] == ["yes"] * len(OWN)
    texts = [gold if gold[0] == "$" else rf"\boxed{{{gold}}}" for gold in OWN]
    assert reward(of(texts, OWN)).tolist() == [1.0] * len(OWN)


@pytest.mark.slow
def test_only_a_box_counts_where_boxes_are_asked_for():
    reward = load("math_answer", find="boxed", processes=1)
    texts = [r"\boxed{7}", "The answer is 7.", "$7$", r"7 \boxed{8}"]
    empty = [r"\boxed{} so $7$", r"$7$ \boxed{8", r"$7$ \boxed"]  # boxes that hold nothing
    got = reward(of(texts + empty, ["7"] * 7))
    assert got.tolist() == [1, 0, 0, 0, 0, 0, 0]
    reward.workers.close()


def test_a_right_answer_that_nothing_matches_is_told_before_a_run_and_unscored_in_it(reward):
    with pytest.warns(UserWarning, match=r"row 2 \(prompt 'p'\): .*'\?\?\?' contains no answer"):
        assert reward(of(["7", "???"], ["7", "???"])).isnan().tolist() == [False, True]
    assert reward.report() == {"late": 0.0, "unreadable": 1.0}
    many = [{"answer": "1"}] * 400 + [{"answer": r"\boxed{ }"}]
    reward.check_prompts(["p"] * 401, many)  # a single row ends no run
    assert [one.answer for one in reward.winnable(["p"] * 401, many)] == ["yes"] * 400 + ["no"]
    with pytest.raises(ValueError, match="no prompt has a column 'answer'"):
        self_test("math_answer", reward, Prompts(("a",), [{"truth": 1}], "text"))
    with pytest.raises(ValueError, match="no prompt has a column 'answer'"):
        reward(Samples(["7"], ["p"], torch.zeros(1, dtype=torch.long)))
    assert reward(of(["7", "7"], ["7", None])).isnan().tolist() == [False, True]
    got = reward.winnable(["p"] * 3, [{"answer": "7"}, {"answer": None}, {"answer": "$$"}])
    assert [one.answer for one in got] == ["yes", "unknown", "no"]


@pytest.mark.slow
def test_what_takes_for_ever_scores_nothing_and_the_next_is_scored():
    reward = load("math_answer", processes=1, seconds=2.0)
    tower = r"\boxed{9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 7}"
    got = reward(of(["7", tower, "7"], ["7"] * 3))
    assert got.tolist() == [1, 0, 1]
    assert reward.report() == {"late": 1.0, "unreadable": 0.0}
    assert reward.report()["late"] == 0
    reward.workers.close()


def test_right_answers_have_more_time_than_completions(monkeypatch):
    asked = []

    def ask(workers, questions, seconds=None):
        asked.extend(("text" in question, seconds) for question in questions)
        return [None if question["gold"] == "8" else True for question in questions]

    monkeypatch.setattr(workers.Workers, "ask", ask)
    reward = load("math_answer", seconds=0.5)
    assert reward(of(["6 + 1 = 8"], ["7"])).tolist() == [1]
    assert asked == [(False, math_answer.READING), (True, None)]
    with pytest.warns(UserWarning, match=r"row 2 .*'8' could not be read within 60 s"):
        assert reward(of(["7", "8"], ["7", "8"])).isnan().tolist() == [False, True]
    told = reward.winnable(["p"] * 2, [{"answer": "7"}, {"answer": "8"}])
    assert told[0].answer == "yes" and "'8' could not be read within 60 s" in told[1].why


def test_any_thread_may_ask(reward):
    found = []
    ask = threading.Thread(target=lambda: found.append(reward(of(["7", "8"], ["7", "7"]))))
    ask.start()
    ask.join()
    assert found[0].tolist() == [1, 0]


def test_it_keeps_the_contract_and_passes_its_self_test(reward):
    scores = check_contract(reward, texts)
    assert set(scores.tolist()) == {0.0, 1.0}
    prompts = Prompts(("3 + 4",), [{"answer": "7"}], "text")
    assert self_test("math_answer", reward, prompts).endswith("the same")


@pytest.mark.parametrize("settings", [{"seconds": 0.0}, {"processes": 0}, {"find": "last"}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match="math_answer"):
        load("math_answer", **settings)
