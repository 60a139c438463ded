"""Material that an iteration learns from: samples, scores, credit."""
