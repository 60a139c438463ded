"""Contributed recipes: a file each, with the parts that only it has. Nothing imports them but
`flowrl.contributed`, by name."""
