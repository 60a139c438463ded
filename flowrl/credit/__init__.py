"""What a sample is worth: scores become advantages, for pictures and texts alike."""
