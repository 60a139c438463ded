"""The part of `external` that begins in the other sandbox. It is sent as text, so it imports
nothing of ours."""

import sys
import types


def load_away(settings, sources, content):
    """Make modules of the sources, and carry out the role of the settings."""
    for name, text in sources.items():
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(text, f"{name}.py", "exec"), vars(module))
    work = sys.modules["away"].work
    for name in sources:  # a completion may have modules of these names
        del sys.modules[name]
    work(settings, content)
