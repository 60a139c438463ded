"""The environment in which a command of ours starts Python again.

`python -m` and `python -c` put the working folder first on the import path, and so does every
launcher that starts `-m flowrl`. A `torch.py` or a folder `flowrl` that lies there, in a run's
folder from elsewhere for example, would be imported in place of what is installed.
"""

import os

from flowrl.paths import PROJECT

SAFE_PATH = "PYTHONSAFEPATH"  # Python's own variable, which processes of processes inherit
_INSTALLED = ("site-packages", "dist-packages")  # folders that are on the path by themselves


def python_environment(ours: bool = True) -> dict[str, str]:
    """The variables of this process, for a Python that imports nothing of the working folder.

    ours  whether it is this environment's Python, which then finds this flowrl even if its source
          tree is not installed
    """
    variables = {**os.environ, SAFE_PATH: "1"}
    if ours and PROJECT.name not in _INSTALLED:
        paths = [str(PROJECT), os.environ.get("PYTHONPATH")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables
