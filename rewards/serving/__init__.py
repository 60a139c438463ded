"""Rewards over HTTP: the wire format, the server and its clients."""
