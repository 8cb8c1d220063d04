"""A GPU backend made of a vendor's driver, found at run time, and kernels compiled for its devices.

A vendor's plugin gives a `driver.Driver` (its calls, one method each), a run-time compiler and an
`offline.OfflineCompiler`; `backend.RuntimeBackend` gives windows, handles between processes, streams,
events and launches. Only `backend`, `events`, `windows` and `torch_device` need torch, so that kernels
can be compiled where it is not installed, such as during a build.
"""
