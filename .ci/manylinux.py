"""Prints the platform tag that a wheel built on this machine can carry: manylinux of this C library."""

import os
import platform

_, version = os.confstr("CS_GNU_LIBC_VERSION").split()
print(f"manylinux_{version.replace('.', '_')}_{platform.machine()}")
