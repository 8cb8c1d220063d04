"""The conformance kit: tests each capability of a transport as a promise, and catches lies.

    uccl-ep conformance --transport NAME [--option k=v]
    pytest -p uccl_ep_core.conformance.pytest_plugin --uccl-ep-transport NAME [--uccl-ep-option k=v]

It opens the transport in two or three real processes of this host and meets its data half through
the table of C functions alone, as a proxy does.
"""

from .command import main
from .report import Report, Result
from .runner import Session, run

__all__ = ["Report", "Result", "Session", "main", "run"]
