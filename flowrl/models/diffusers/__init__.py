"""Any diffusers pipeline as a policy: flowrl drives the pipeline's own call, and proves that."""
