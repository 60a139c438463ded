"""Parts of algorithms in a run's file, by name or from a user's file."""
