"""A transport that needs no NIC and imitates the worst of them: seeded, reproducible misbehaviour.

It wraps any other transport and, within the promises of the chosen profile, reorders, delays, cuts,
doubles, loses and stalls what passes through.
"""

from .profiles import PROFILES, Profile
from .transport import SimTransport

__all__ = ["PROFILES", "Profile", "SimTransport"]
