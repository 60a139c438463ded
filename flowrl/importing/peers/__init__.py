"""The other libraries, one module each: their names, their defaults, and what these are here."""
