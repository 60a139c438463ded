"""Frozen weights that wait on the CPU while they are unused: experts, encoders, decoders."""
