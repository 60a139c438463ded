"""The command line."""

from flowrl.cli.app import main

__all__ = ["main"]
