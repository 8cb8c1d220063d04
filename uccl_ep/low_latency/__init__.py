"""Low-latency operations of a communicator: dispatch and combine, each in a send and a receive half.

`mode.LowLatency` is the whole of it. Nothing is imported here: the set-up of a group needs `capacity`, and the mode
needs a group that is set up.
"""
