"""What is particular to tokens: their ratios, losses, credit and recipes."""
