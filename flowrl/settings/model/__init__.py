"""The section `model`, and its sections."""
