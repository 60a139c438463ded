"""Files of other libraries as leaves: command lines and scripts, and Python's syntax trees."""
