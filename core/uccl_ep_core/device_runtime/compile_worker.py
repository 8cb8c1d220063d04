"""The child process of `compiler.run_compiler`; run by path, so that nothing of the package is imported.

Reads a request as JSON from standard input, prints the compiler's log, and writes the machine code
to the file the request names. Exit status 1: the compiler refused the source.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any


def _text_array(texts: list[str]) -> Any:
    return (ctypes.c_char_p * max(len(texts), 1))(*[text.encode() for text in texts])


def _open(libraries: list[str]) -> ctypes.CDLL:
    # Helpers of the compiler are opened first and globally: it looks for them by name alone, and
    # would not find them beside itself.
    for helper in libraries[:-1]:
        ctypes.CDLL(helper, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(libraries[-1])


class Program:
    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        self._library = library
        self._prefix = prefix
        self._handle = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> int:
        function = getattr(self._library, self._prefix + name)
        function.restype = ctypes.c_int
        return int(function(*arguments))

    def must(self, name: str, *arguments: Any) -> None:
        code = self.call(name, *arguments)
        if code != 0:
            words = getattr(self._library, self._prefix + "GetErrorString")
            words.restype = ctypes.c_char_p
            raise SystemExit(f"{self._prefix}{name} failed: {words(code).decode()} (code {code})")

    def create(self, source: str, name: str, headers: dict[str, str]) -> None:
        self.must(
            "CreateProgram",
            ctypes.byref(self._handle),
            ctypes.c_char_p(source.encode()),
            ctypes.c_char_p(name.encode()),
            ctypes.c_int(len(headers)),
            _text_array(list(headers.values())),
            _text_array(list(headers.keys())),
        )

    def compile(self, options: list[str]) -> int:
        return self.call("CompileProgram", self._handle, ctypes.c_int(len(options)), _text_array(options))

    def get(self, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.must(f"Get{what}Size", self._handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        self.must(f"Get{what}", self._handle, buffer)
        return buffer.raw[: size.value]


def main() -> int:
    request = json.load(sys.stdin)
    program = Program(_open(request["libraries"]), request["prefix"])
    program.create(request["source"], request["name"], request["headers"])
    code = program.compile(request["options"])
    print(program.get("ProgramLog").rstrip(b"\0").decode(errors="replace"))
    if code != 0:
        return 1
    with open(request["output"], "wb") as file:
        file.write(program.get(request["code"]))
    sys.stdout.flush()
    # Leave without running the library's own clean-up, which is where some releases fail.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
