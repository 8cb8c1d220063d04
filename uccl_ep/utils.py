"""The names that DeepEP keeps in its `utils`, and its index type."""

import torch

from .events import EventHandle, EventOverlap

topk_idx_t = torch.int64
"""The index type that DeepEP was built with; here int32 works as well."""

__all__ = ["EventHandle", "EventOverlap", "topk_idx_t"]
