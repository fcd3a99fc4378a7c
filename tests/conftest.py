"""One thread: the models here are too small to share a product between cores."""

import torch

torch.set_num_threads(1)
