"""The kernels' parameter structs, field for field those of core/kernels/parameters.hpp.

A launch checks the size; tests/core/test_kernel_parameters.py checks every field's offset against the
compiler's.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p
from enum import IntEnum


class PayloadType(IntEnum):
    """Types of elements. Kernels compute with the first ones; the others are moved, and compared between ranks."""

    BYTES = 0  # of any type
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    FLOAT64 = 4
    FLOAT8 = 5  # e4m3fn
    FLOAT8_E5M2 = 6
    FLOAT8_E4M3FNUZ = 7
    FLOAT8_E5M2FNUZ = 8
    UINT8 = 9
    INT8 = 10
    INT16 = 11
    INT32 = 12
    INT64 = 13


class Quantization(IntEnum):
    NONE = 0
    FLOAT8 = 1
    FLOAT8_POWER_OF_TWO = 2
    FLOAT8_EXPONENT = 3


_PARTS_OF_THE_DATA_WINDOW = (
    "rail_rings",
    "forward_rings",
    "direct_outboxes",
    "rail_outboxes",
    "ll_dispatch_inboxes",
    "ll_combine_inboxes",
    "ll_combine_outboxes",
    "local_signals",
    "direct_flags",
    "direct_word_table",
    "data_end",
)


class LayoutStruct(ctypes.Structure):
    _fields_ = [
        ("num_ranks", c_uint32),
        ("ranks_per_domain", c_uint32),
        ("num_channels", c_uint32),
        ("num_slots", c_uint32),
        ("slot_bytes", c_uint64),
        ("ll_dispatch_bytes", c_uint64),
        ("ll_combine_bytes", c_uint64),
        ("ll_outbox_bytes", c_uint64),
        ("has_remote", c_uint32),
        ("ll_parts", c_uint32),
        *((name, c_uint64) for name in _PARTS_OF_THE_DATA_WINDOW),
    ]


class VerdictStruct(ctypes.Structure):
    _fields_ = [
        ("state", c_uint64),
        ("culprit", c_uint32),
        ("reason", c_uint32),
        ("phase", c_uint32),
        ("reporter", c_uint32),
        ("signal", c_uint64),
        ("expected", c_uint64),
        ("seen", c_uint64),
        ("operation", c_uint64),
        ("elapsed_ns", c_uint64),
    ]


class KernelStatus(ctypes.Structure):
    _fields_ = [("failed", c_uint64), ("ready", c_uint64), ("verdict", VerdictStruct), ("detail", c_uint64 * 4)]


class SpanRecord(ctypes.Structure):
    _fields_ = [
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("activity", c_uint32),
        ("detail", c_uint32),
        ("warps", c_uint32),
        ("reserved", c_uint32),
    ]


class SpanTable(ctypes.Structure):
    _fields_ = [
        ("counts", c_void_p),
        ("records", c_void_p),
        ("warps", c_uint32),
        ("tracks", c_uint32),
        ("capacity", c_uint32),
        ("reserved", c_uint32),
    ]


class Group(ctypes.Structure):
    _fields_ = [
        ("layout", LayoutStruct),
        ("rank", c_uint32),
        ("num_rings", c_uint32),
        ("timeout_ns", c_uint64),
        ("data", c_void_p),
        ("control", c_void_p),
        ("peer_data", c_void_p),
        ("peer_control", c_void_p),
        ("rings", c_void_p),
        ("counters", c_void_p),
        ("status", c_void_p),
        ("operation", c_uint64),
        ("own_messages", c_void_p),
        ("spans", SpanTable),
    ]


class RoutingParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("topk_idx", c_void_p),
        ("index_bytes", c_uint32),
        ("num_tokens", c_uint32),
        ("num_topk", c_uint32),
        ("num_experts", c_uint32),
        ("num_ranks", c_uint32),
        ("reserved", c_uint32),
        ("num_tokens_per_rank", c_void_p),
        ("num_tokens_per_expert", c_void_p),
        ("is_token_in_rank", c_void_p),
    ]


class DispatchShape(ctypes.Structure):
    _fields_ = [
        ("row_bytes", c_uint32),
        ("scale_bytes", c_uint32),
        ("num_topk", c_uint32),
        ("num_experts", c_uint32),
        ("dtype", c_uint32),
        ("most_tokens", c_uint32),
    ]


class NotifyParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("shape", DispatchShape),
        ("is_token_in_rank", c_void_p),
        ("num_tokens_per_expert", c_void_p),
        ("num_tokens", c_uint32),
        ("reserved", c_uint32),
        ("send_rows", c_void_p),
        ("rail_send_rows", c_void_p),
        ("receive_rows", c_void_p),
        ("receive_offset", c_void_p),
        ("rail_rows", c_void_p),
        ("expert_rows", c_void_p),
    ]


class DispatchParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("shape", DispatchShape),
        ("x", c_void_p),
        ("scales", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("is_token_in_rank", c_void_p),
        ("send_rows", c_void_p),
        ("rail_send_rows", c_void_p),
        ("receive_rows", c_void_p),
        ("receive_offset", c_void_p),
        ("rail_rows", c_void_p),
        ("num_tokens", c_uint32),
        ("index_bytes", c_uint32),
        ("receive_x", c_void_p),
        ("receive_scales", c_void_p),
        ("receive_topk_idx", c_void_p),
        ("receive_topk_weights", c_void_p),
        ("receive_source", c_void_p),
        ("team_ends", c_uint64),
    ]


class CombineParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("payload_type", c_uint32),
        ("hidden", c_uint32),
        ("row_bytes", c_uint32),
        ("num_topk", c_uint32),
        ("x", c_void_p),
        ("topk_weights", c_void_p),
        ("bias", c_void_p * 2),
        ("is_token_in_rank", c_void_p),
        ("send_rows", c_void_p),
        ("receive_rows", c_void_p),
        ("receive_offset", c_void_p),
        ("term_ranks", c_void_p),
        ("max_terms", c_uint32),
        ("domains_first", c_uint32),
        ("num_tokens", c_uint32),
        ("reserved", c_uint32),
        ("team_ends", c_uint64),
        ("out", c_void_p),
        ("out_topk_weights", c_void_p),
    ]


class TermOrderParameters(ctypes.Structure):
    _fields_ = [
        ("topk_idx", c_void_p),
        ("term_ranks", c_void_p),
        ("index_bytes", c_uint32),
        ("num_tokens", c_uint32),
        ("num_topk", c_uint32),
        ("num_experts", c_uint32),
        ("num_ranks", c_uint32),
        ("ranks_per_domain", c_uint32),
        ("domains_first", c_uint32),
        ("reserved", c_uint32),
    ]


class GatherParameters(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("source_rows", c_void_p),
        ("num_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("zero_padding", c_uint32),
        ("reserved", c_uint32),
    ]


class FoldParameters(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("bias", c_void_p * 2),
        ("num_rows", c_uint32),
        ("num_terms", c_uint32),
        ("payload_type", c_uint32),
        ("hidden", c_uint32),
        ("row_bytes", c_uint32),
        ("reserved", c_uint32),
    ]


class LowLatencyShape(ctypes.Structure):
    _fields_ = [
        ("max_tokens", c_uint32),
        ("hidden", c_uint32),
        ("num_topk", c_uint32),
        ("num_experts", c_uint32),
        ("row_bytes", c_uint32),
        ("scale_bytes", c_uint32),
        ("quantization", c_uint32),
        ("payload_type", c_uint32),
    ]


class LowLatencyDispatchParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("shape", LowLatencyShape),
        ("x", c_void_p),
        ("topk_idx", c_void_p),
        ("num_tokens", c_uint32),
        ("index_bytes", c_uint32),
        ("combine_row", c_void_p),
        ("own_row", c_void_p),
        ("masked", c_void_p),
        ("own_in_place", c_uint32),
        ("num_chunks", c_uint32),
        ("receive_x", c_void_p),
        ("receive_scales", c_void_p),
        ("source_index", c_void_p),
        ("begin", c_void_p),
        ("count", c_void_p),
        ("receive_count", c_void_p),
        ("combine_base", c_void_p),
        ("rows_before", c_void_p),
        ("rows_home", c_void_p),
        ("layout_range", c_void_p),
        ("statistics", c_void_p),
        ("wait_cost", c_void_p),
        ("picks", c_void_p),
    ]


class LowLatencyCombineParameters(ctypes.Structure):
    _fields_ = [
        ("group", Group),
        ("shape", LowLatencyShape),
        ("x", c_void_p),
        ("begin", c_void_p),
        ("count", c_void_p),
        ("combine_base", c_void_p),
        ("rows_before", c_void_p),
        ("rows_home", c_void_p),
        ("topk_idx", c_void_p),
        ("topk_weights", c_void_p),
        ("combine_row", c_void_p),
        ("own_row", c_void_p),
        ("num_tokens", c_uint32),
        ("index_bytes", c_uint32),
        ("masked", c_void_p),
        ("own_in_place", c_uint32),
        ("reserved", c_uint32),
        ("out", c_void_p),
        ("wait_cost", c_void_p),
        ("picks", c_void_p),
    ]


class BarrierParameters(ctypes.Structure):
    _fields_ = [("group", Group)]


class ClockSample(ctypes.Structure):
    _fields_ = [("before_ns", c_uint64), ("host_ns", c_uint64), ("after_ns", c_uint64)]


class ClockParameters(ctypes.Structure):
    _fields_ = [
        ("question", c_void_p),
        ("answer", c_void_p),
        ("samples", c_void_p),
        ("timeout_ns", c_uint64),
        ("rounds", c_uint32),
        ("reserved", c_uint32),
    ]
