"""What all tests share: one torch thread, so that parallel test processes do not fight for cores, and no deadline per example."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fedspd", deadline=None)
settings.load_profile("fedspd")
