"""Arguments of commands, and options that override a run's settings."""
