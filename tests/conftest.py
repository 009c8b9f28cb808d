"""Common to all tests: one torch thread, so that processes and tests do not fight for cores."""

import torch

torch.set_num_threads(1)
