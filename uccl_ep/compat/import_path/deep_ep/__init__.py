"""uccl_ep under the name `deep_ep`. What uccl_ep does not provide is left out, since callers probe for names."""

import uccl_ep
from uccl_ep import Buffer, Config, topk_idx_t

from . import utils
from .utils import EventHandle, EventOverlap

_V2_NAMES = ("ElasticBuffer", "EPHandle")
_V2 = all(hasattr(uccl_ep, name) for name in _V2_NAMES)
if _V2:
    globals().update({name: getattr(uccl_ep, name) for name in _V2_NAMES})

# The version whose interface this is, then ours.
__version__ = f"{'2.1.0' if _V2 else '1.2.1'}+uccl.ep.{uccl_ep.__version__.replace('+', '.')}"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils", *(_V2_NAMES if _V2 else ())]
