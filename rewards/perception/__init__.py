"""Perception: embeddings, detection, and images, videos and texts as rewards need them."""
