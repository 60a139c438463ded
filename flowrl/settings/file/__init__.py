"""A run's file as read: strict YAML, the file that it inherits, paths, older names."""
