"""What rewards see: pictures and frames in tensors, embeddings, detections, strings."""
