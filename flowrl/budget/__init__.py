"""The sampling budget: which prompts are drawn, how often, and which samples are trained on."""
