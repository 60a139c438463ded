"""Adapters: peft, and the file formats of other tools."""
