"""What kernels did and when, recorded by themselves (core/kernels/spans.hpp): read back, summed up, and put into the
trace beside what the proxies did."""

from .profile import Profile, Row
from .recorder import KernelTracing

__all__ = ["KernelTracing", "Profile", "Row"]
