"""A GPU backend made of a vendor's driver, found at run time, and kernels compiled for its devices.

A vendor's plugin gives a `Driver` (its calls, one method each) and a compiler; `RuntimeBackend` gives
windows, handles between processes, streams, events and launches.
"""

from .backend import RuntimeBackend
from .compile_cache import CompileCache, CompileTimeoutError, cache_key
from .compiler import Compiled, CompileError, CompilerLibrary, run_compiler
from .driver import IPC_HANDLE_BYTES, DeviceFacts, Driver, DriverError
from .kernels import KernelTable
from .library import Library, LibraryNotFoundError
from .objects import find_object, write_manifest
from .sources import SourceTree, Unit
from .torch_device import TorchDevice
from .windows import RuntimeWindow, WindowHandle, WindowImportError

__all__ = [
    "IPC_HANDLE_BYTES",
    "CompileCache",
    "CompileError",
    "CompileTimeoutError",
    "Compiled",
    "CompilerLibrary",
    "DeviceFacts",
    "Driver",
    "DriverError",
    "KernelTable",
    "Library",
    "LibraryNotFoundError",
    "RuntimeBackend",
    "RuntimeWindow",
    "SourceTree",
    "TorchDevice",
    "Unit",
    "WindowHandle",
    "WindowImportError",
    "cache_key",
    "find_object",
    "run_compiler",
    "write_manifest",
]
