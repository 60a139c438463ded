"""What an iteration learns from: samples, scores, credit."""
