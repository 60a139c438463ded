"""The command line. Mistakes are one sentence and exit code 2; interruptions save first."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from flowrl.errors import Stopped, UserError

USAGE = """usage: flowrl COMMAND ...

  train CONFIG [--train.lr 1e-4 ...]   align a model; every setting of the file is an option
  train --resume RUN                   go on with an interrupted run, to the same bits
  sample RUN "a red circle" ...        paint with a run's weights
  evaluate RUN [--prompts FILE ...]    score a run's weights, or its base, on prompts
  plan CONFIG                          what an iteration does and costs, without loading weights
  recipes [NAME]                       the algorithms, and the settings of one
  serve-reward NAME [--port 8100 ...]  put a reward behind HTTP, for {name: remote, url: ...}
  score FOLDER --rewards A,B           score a folder of pictures: a table and a contact sheet
  evaluate-rewards DATA --rewards A,B  hold rewards against what people preferred: a page
  suites [NAME]                        prompt sets with their own metrics
  schema                               JSON schema of a run's file, for editors

`flowrl COMMAND --help` tells more."""


# Threads that wait spin for so long at most. By default they spin on, and where another program
# wants a core a step takes thirty times as long; this costs nothing on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            code = ended(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read us has enough: `flowrl suites | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor complain at exit
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def ended(given: list[str]) -> int:
    """Do what was asked; gives the exit code. docs/interruptions.md has the table."""
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if given else 2
    try:
        return command(given[0])(given[1:])
    except UserError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 3 if isinstance(error, Stopped) else 2
    except KeyboardInterrupt:
        print("\nflowrl: stopped at once; the last checkpoint is whole", file=sys.stderr)
        return 128 + signal.SIGINT


def command(name: str) -> Callable[[list[str]], int]:
    from flowrl.cli import commands  # after the first word is known, since torch takes seconds

    if name not in commands.COMMANDS:
        near = get_close_matches(name, commands.COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(commands.COMMANDS)}"
        raise UserError(f"{name!r} is no command; {hint}")
    return commands.COMMANDS[name]
