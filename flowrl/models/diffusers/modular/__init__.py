"""Modular pipelines of diffusers, given the face of its classic ones. All contact with that
experimental interface is in this room."""
