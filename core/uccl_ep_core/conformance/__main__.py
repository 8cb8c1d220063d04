"""``python -m uccl_ep_core.conformance``, for a place without the ``uccl-ep`` command."""

import sys

from . import main

sys.exit(main())
