"""The whole run, and its sections other than the model."""
