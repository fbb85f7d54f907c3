"""Shared by all tests."""

import torch

torch.set_num_threads(1)  # the matrices are tiny: threads that wait for each other take longer than the work
