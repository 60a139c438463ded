"""Models from a user's own file: `model: {own: mine.py:MyFlow}`."""
