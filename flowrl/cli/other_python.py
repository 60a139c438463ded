"""The Python of another environment, for commands that try another flowrl (`--program`)."""

import shutil

from flowrl.errors import UserError
from flowrl.settings.command_line.arguments import expanded


def interpreter(program: str) -> str:
    """The file of an interpreter, or of the one in an environment's folder. UserError if it cannot
    be run."""
    path = expanded(program)
    inside = path / "bin" / "python"
    path_found = shutil.which(str(inside if inside.exists() else path))
    if path_found is None:
        raise UserError(
            f"--program: {program[:200]} is no interpreter, nor a folder with bin/python"
        )
    return path_found
