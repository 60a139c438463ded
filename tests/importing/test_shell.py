"""Words of shell scripts, with bash itself as the judge."""

import shutil
import subprocess
from pathlib import Path

import pytest

from flowrl.errors import UserError
from flowrl.importing.readers.shell import OPEN, read_shell
from flowrl.importing.sources import read_source

# `run` writes its words, each followed by NUL, and the command's end.
_RUN = "run() { printf '%s\\0' \"$@\" '\n' >> words; }\n"

# Texts whose words follow from the text alone.
DECIDED = {
    "two tests that hold together": "A=x\nif [ $A = x ] && [ $A = y ]; then run 1; else run 2; fi",
    "two tests in one": 'A=x\nif [[ "$A" == "x" && "$A" == "y" ]]; then B=1; else B=2; fi\nrun $B',
    "one of two tests": "A=x\nif [[ $A == y || $A == x ]]; then B=1; else B=2; fi\nrun $B",
    "older signs": "A=x\nif [ $A = x -a $A = y -o 1 = 1 ]; then B=1; else B=2; fi\nrun $B",
    "a negated test": 'A=x\nif ! [ "$A" = "x" ]; then B=1; else B=2; fi\nrun $B',
    "a negation inside": 'A=x\nif [ ! "$A" = "x" ]; then B=1; else B=2; fi\nrun $B',
    "a pattern": "A=xyz\nif [[ $A == x* ]]; then B=1; else B=2; fi\nrun $B",
    "a pattern in quotes": 'A=xyz\nif [[ $A == "x*" ]]; then B=1; else B=2; fi\nrun $B',
    "no pattern in one bracket": "A=xyz\nif [ $A = 'x*' ]; then B=1; else B=2; fi\nrun $B",
    "numbers": "N=8\nif [ $N -gt 4 ]; then B=1; else B=2; fi\nrun $B",
    "arithmetic as a test": "N=8\nif (( N > 4 )); then B=1; else B=2; fi\nrun $B",
    "an empty text": 'A=\nif [ -z "$A" ]; then run 1; else run 2; fi\nif [ $A ]; then run 3; fi',
    "the word test": "A=x\nif test $A = x; then B=1; else B=2; fi\nrun $B",
    "true and false": "U=true\nif $U; then run 1; else run 2; fi\nif false; then run 3; fi",
    "elif": "A=q\nif [ $A = x ]; then run 1; elif [ $A = q ]; then run 2; else run 3; fi",
    "an if in an if": "A=q\nif [ $A = x ]; then\n if [ $A = q ]; then run 1; fi\nelse run 4; fi",
    "and": "A=x\n[ $A = x ] && B=1\n[ $A = y ] && B=2\nrun $B",
    "or": "A=x\n[ $A = x ] || B=2\nrun ${B:-7}\n[ $A = y ] || run or",
    "a chain over lines": "A=x\n[ $A = y ] &&\n  run 1\n[ $A = x ] &&\n  run 2",
    "a guarded group": "A=x\n[ $A = y ] && { B=1; run 1; }\n[ $A = x ] && { run ${B:-none}; }",
    "a guarded if": "false && if true; then run 1; fi\nrun 2",
    "a case": "M=big\ncase $M in\n  small) B=1;;\n  big|huge) B=2;;\n  *) B=3;;\nesac\nrun $B",
    "a case with commands": "M=x\ncase $M in (a) run 1 ;; *) run 2 ;; esac\nrun 3",
    "a function": 'go() {\n  run --x "$1" --y $2 $# "$@"\n}\ngo 3 "4 5"',
    "a function that nobody calls": "other() {\n  run no\n}\nrun yes",
    "the word function": "function go { run $1; }\ngo 9",
    "functions inside each other": "a() { b $1 2; }\nb() { run $1 $2; }\na 1",
    "a local variable": "X=1\ngo() { local X=2; Y=3; run $X; }\ngo\nrun $X $Y",
    "a return": "go() { run 1; return; run 2; }\ngo\nrun 3",
    "an end": "run 1\nexit 0\nrun 2",
    "a subshell": "(X=5; run $X)\nrun ${X:-none}",
    "a variable of one command": "A=1\nA=2 run x\nB=$A\nrun $B",
    "set and shift": "set -- a b c\nshift\nrun $1 $# ${2:-z} ${9:-y}",
    "eval": 'C="run --x 1"\neval $C\n$C',
    "unset": "A=1\nunset A\nrun ${A:-2}",
    "an array's entries": 'A=(a b)\nA+=(c)\nA[0]=z\ni=2\nrun "${A[@]}" ${A[$i]} ${A[i-1]} ${#A[@]}',
    "words of an array": 'A=(a "b c")\nrun "${A[*]}" "${A[@]}" ${A[@]} pre"${A[@]}"post',
    "an array without words": 'A=()\nrun "${A[@]}" x ${A[@]} y"${A[@]}"',
    "an array of a text": 'S="a b c"\nA=($S)\nrun ${A[1]}',
    "words of a text": 'S="1 2"\nrun --a=$S x "$S"$S',
    "quotes in a text": "S='--a \"x y\" --b'\nrun $S",
    "an empty word": 'X=\nrun "" $X "$X" $X"" --y',
    "a default with a space": 'run ${X:-"a b"} "${Y:-c d}" ${Z:-e f} "${W:-\'g\'}"',
    "an empty value": 'X=\nrun "${X-d}" "${X:-d}" "${X+e}" "${X:+f}"',
    "a default that is kept": ": ${L:=3}\nrun $L ${M:=4} $M",
    "an alternative": "A=1\nrun ${A:+--flag} ${B:+--other} x",
    "a length": "M=abc\nrun ${#M}",
    "a line that goes on in a word": "run --long_op\\\ntion \"a\\\nb\" 'c\\\nd' \\\n  --x",
    "a comment ends with its line": "run 1 \\\n  --x 1 \\\n  # --y 2 \\\n  --z 3",
    "other quotes": "run $'a b' $\"c d\" \"it's\" 'a\"b' a\\ b \\$X \"\\$X\" \"a\\nb\"",
    "redirections": "run 1 2>&1 &> /dev/null --y 2\nrun 3 2>/dev/null < /dev/null --z >&2\nrun 4",
    "a here-document with more words": "cat <<EOF > /dev/null && run 1\nrun no 'x\nEOF\nrun 2",
    "a here-string": 'cat <<< "run no" > /dev/null\nrun 1',
    "signs in quotes": "run 'a;b' \"c|d\" e\\;f \"h?a=1&b=2\" '(x)' a#b",
    "several on a line": "A=1;B=2;run $A $B;run 3&&run 4",
    "options of the script": (
        "X=5\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --x) X=$2; shift 2;;\n    *) shift;;\n"
        'esac\ndone\nfor a in "$@"; do X=6; done\nfor a; do X=7; done\n'
        'while getopts "x:" o; do X=$OPTARG; done\nwhile (( "$#" )); do X=8; shift; done\n'
        'while [ -n "$1" ]; do X=9; shift; done\nrun $X "$@"'
    ),
    "a loop that never begins": "while false; do X=1; done\nuntil true; do X=2; done; run ${X:-3}",
    "declared": "declare -a A=(x y)\nexport B=2 C=3\nreadonly D=4\nrun ${A[@]} $B $C $D",
    "numbers computed": "N=8\nrun $((N * 2)) $((N / 3)) $((N % 3)) $((-7 / 2))",
}  # fmt: skip

# Texts whose words a shell computes in a way that is not read, or from what the text does not say:
# each must say so, in the word or by standing apart.
NOT_DECIDED = {
    "a loop over words": "for s in 1 2; do run $s; done",
    "a variable of a loop": 'A=\nfor s in 1 2; do A="$A --r $s"; done\nrun $A',
    "a loop over numbers": "i=0\nwhile [ $i -lt 2 ]; do i=$((i+1)); done\nrun $i",
    "a counted loop": "for ((i=0; i<2; i++)); do run $i; done",
    "a regular expression": "A=xyz\nif [[ $A =~ ^x ]]; then B=1; else B=2; fi\nrun $B",
    "a file": "if [ -f /none ]; then B=1; else B=2; fi\nrun $B",
    "a guarded command": "[ -f /none ] || run 1",
    "a program asked": "command -v no_such >/dev/null && B=1 || B=2\nrun $B",
    "a default of what a condition sets": "[ -f /none ] && B=1\nrun ${B:-2}",
    "an unset that a condition guards": "B=1\n[ -f /none ] || unset B\nrun ${B:-2}",
    "a case of a file's name": "case $(ls /none) in a) run 1;; *) run 2;; esac",
    "braces": "run --x {1,2,3} a{b,c} {1..3}",
    "counted": "N=8\nlet M=N*2\n((N++))\nrun $N $M",
    "read": 'IFS=, read -r A B <<< "1,2"\nrun $A $B',
    "printf": 'printf -v X "%02d" 3\nrun $X',
    "another separator": "IFS=,\nS=a,b\nrun $S",
    "parts of a text": "A=abcdef\nrun ${A:1:2} ${A#a} ${A^^} ${A/b/x}",
    "a table": "declare -A M\nM[a]=1\nrun ${M[a]}",
    "a name of a name": "A=B\nB=3\nrun ${!A}",
    "a power": "run $((2 ** 3)) $((1 > 0 ? 1 : 2)) $((0x10))",
    "an output": "run $(echo a b) `echo c`",
    "escapes": "run $'a\\tb'",
}


def by_bash(text: str, folder: Path) -> list[list[str]]:
    subprocess.run(
        [str(shutil.which("bash")), "-c", _RUN + text],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    written = (folder / "words").read_text()
    return [c.split("\0")[:-1] for c in written.split("\n\0")[:-1]]


def by_flowrl(commands: list[list[str]]) -> list[list[str]]:
    return [words[1:] for words in commands if words[:1] == ["run"]]


@pytest.mark.parametrize("case", DECIDED)
def test_words_are_those_that_bash_makes(case: str, tmp_path: Path) -> None:
    script = read_shell(DECIDED[case], "x")
    wanted = by_bash(DECIDED[case], tmp_path)
    assert wanted
    assert sorted(by_flowrl(script.commands)) == sorted(wanted)
    assert not by_flowrl(script.conditional)


@pytest.mark.parametrize("case", NOT_DECIDED)
def test_what_is_not_read_is_open_and_never_another_word(case: str, tmp_path: Path) -> None:
    script = read_shell(NOT_DECIDED[case], "x")
    wanted = by_bash(NOT_DECIDED[case], tmp_path)
    assert wanted
    sure, apart = by_flowrl(script.commands), by_flowrl(script.conditional)
    assert apart or all(any(word.startswith(OPEN) for word in words) for words in sure)
    of_bash = {word for words in wanted for word in words}
    assert {w for words in sure for w in words if OPEN not in w} <= of_bash
    # a substitution that is open is one word, so that no part of it is taken for a setting
    assert all(" " not in word for words in sure for word in words if OPEN in word)


@pytest.mark.parametrize(("first", "second"), [(4, 8), (8, 4)])
def test_the_command_that_a_script_runs_is_imported(first: int, second: int, tmp_path) -> None:
    """Not the first one of its text."""
    command = (
        "trl grpo --model_name_or_path a/b --dataset_name c/d --reward_funcs accuracy_reward "
        "--num_generations "
    )
    script = (
        f'MODE=small\nif [ "$MODE" = big ] && [ -n "$MODE" ]; then\n  {command}{first}\n'
        f"else\n  {command}{second}\nfi\n"
    )
    (tmp_path / "run.sh").write_text(script)
    assert read_source(str(tmp_path / "run.sh"), None).leaves["num_generations"] == second
    (tmp_path / "run.sh").write_text(script.replace("MODE=small\n", ""))
    source = read_source(str(tmp_path / "run.sh"), None)
    assert source.leaves["num_generations"] == first
    assert any("as if a condition held" in note for note in source.notes)


def test_functions_that_call_each_other_end() -> None:
    with pytest.raises(UserError, match=r"f\.sh: its functions call each other too deep"):
        read_shell("a() { b; }\nb() { a; }\na", "f.sh")
    grows = "".join(f"f{n}() {{ f{n + 1}; f{n + 1}; f{n + 1}; f{n + 1}; }}\n" for n in range(18))
    with pytest.raises(UserError, match=r"f\.sh: its variables hold more than"):
        read_shell(grows + "f18() { run x; }\nf0", "f.sh")
