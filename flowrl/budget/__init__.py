"""Where samples and gradients go: which prompts are drawn, how often, and what teaches."""
