"""Credit: advantages of samples, steps and tokens, from the scores of whole samples."""
