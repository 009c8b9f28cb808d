"""Common to all tests: one torch thread, so that processes and tests do not fight for cores.

Nodes that the tests start compute on the CPU, wherever the suite runs.
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

torch.set_num_threads(1)
