"""Models that judge: what they are asked, and what their answers mean."""
