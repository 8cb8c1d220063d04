"""Write the C source of the Python module around interface.h: ``build_interface.py HEADER OUTPUT``."""

from __future__ import annotations

import pathlib
import sys

import cffi


def declarations(header: str) -> str:
    """The part of the header between its markers, which is plain C without preprocessor lines."""
    return header.partition("/* cffi begins */")[2].partition("/* cffi ends */")[0]


def main(header: str, output: str) -> None:
    builder = cffi.FFI()
    builder.cdef(declarations(pathlib.Path(header).read_text()))
    builder.set_source("uccl_ep_libfabric._fabric", '#include "interface.h"')
    builder.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:3])
