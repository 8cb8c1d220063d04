"""One rank of the kit: ``python -m uccl_ep_core.conformance.worker FD``. Started by `group.Group` only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from uccl_ep_core.errors import EPError

from .checks import CHECKS
from .context import Context, NotStarted, Stopped
from .driver import PromiseBroken, Untested
from .target import transport_class

PR_SET_PDEATHSIG = 1


def _in_words(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"


def _run(connection: Connection, request: dict[str, Any]) -> tuple[str, str]:
    check = CHECKS[request["check"]]
    context = Context(
        connection,
        request["rank"],
        request["size"],
        request["seed"],
        check.name,
        transport_class(request["transport"]),
        request["options"],
        request["settings"],
    )
    try:
        outcome = "kept"
        try:
            words = check.run(context) or ""
        except Untested as untested:
            outcome, words = untested.outcome, str(untested)
        # Nobody closes before all are through: what a rank has posted may still be under way.
        context.barrier("end")
        return outcome, words
    except Stopped:
        return "stopped", ""
    except PromiseBroken as broken:
        return "broken", str(broken)
    except NotStarted as failed:
        # The library's own errors are written for whoever has to set it right, others for whoever wrote the transport.
        ours = isinstance(failed.error, EPError)
        return "not started", str(failed.error) if ours else _in_words(failed.error)
    except Exception as error:  # whatever a stranger's code raises is a result, not the end of the kit
        return "broken", _in_words(error)
    finally:
        context.close()


def main() -> None:
    """Serve requests until the parent goes away."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            request = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            outcome, message = _run(connection, request)
        except Exception as error:
            outcome, message = "broken", f"close raised {type(error).__name__}: {error}"
        connection.send(("done", outcome, message))


if __name__ == "__main__":
    main()
