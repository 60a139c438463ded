import torch
from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
torch.set_num_threads(1)  # several test processes on few cores: one thread each is fastest
