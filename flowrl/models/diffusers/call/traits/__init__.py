"""What a pipeline is like: checked before it runs, and found by trial calls."""
