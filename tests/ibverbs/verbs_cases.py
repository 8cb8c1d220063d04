"""Cases that rank processes run; see test_dispatch_combine.py."""

from __future__ import annotations

import json

from ranks import Context


def describe(ctx: Context) -> str:
    """What the library says it uses."""
    return json.dumps(ctx.buffer().describe(), default=str)
