"""The functions of the HIP runtime that are used, with exact argument types, and its constants (ROCm 6 and later)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

from uccl_ep_core.device_runtime.common_driver import IpcHandle, Names, Uuid

LIBRARIES = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so")


class DeviceProperties(ctypes.Structure):
    """hipDeviceProp_tR0600: only the name at its start and the architecture in it are read.

    The rest is opaque room, more than any release has needed, since the call writes all of it.
    """

    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("opaque", c_ubyte * 904),
        ("architecture", ctypes.c_char * 256),
        ("rest", c_ubyte * 2680),
    ]


ATTRIBUTE_COOPERATIVE_LAUNCH = 10
ATTRIBUTE_MAX_THREADS_PER_BLOCK = 56
ATTRIBUTE_MULTIPROCESSOR_COUNT = 63
ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 74
ATTRIBUTE_WARP_SIZE = 87

MALLOC_FINE_GRAINED = 1
MALLOC_UNCACHED = 3
COPY_HOST_TO_DEVICE = 1
COPY_DEVICE_TO_HOST = 2

_Handle = c_void_p  # streams, events, modules, functions

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "hipInit": (c_uint,),
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipDrvGetErrorName": (c_int, POINTER(c_char_p)),
    "hipDrvGetErrorString": (c_int, POINTER(c_char_p)),
    "hipGetDeviceCount": (POINTER(c_int),),
    "hipGetDevice": (POINTER(c_int),),
    "hipSetDevice": (c_int,),
    "hipGetDevicePropertiesR0600": (POINTER(DeviceProperties), c_int),
    "hipDeviceGetUuid": (POINTER(Uuid), c_int),
    "hipDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "hipDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "hipDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "hipDeviceGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "hipMalloc": (POINTER(c_void_p), c_size_t),
    "hipExtMallocWithFlags": (POINTER(c_void_p), c_size_t, c_uint),
    "hipFree": (c_void_p,),
    "hipMemsetAsync": (c_void_p, c_int, c_size_t, _Handle),
    "hipMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, _Handle),
    "hipHostRegister": (c_void_p, c_size_t, c_uint),
    "hipHostUnregister": (c_void_p,),
    "hipHostGetDevicePointer": (POINTER(c_void_p), c_void_p, c_uint),
    "hipIpcGetMemHandle": (POINTER(IpcHandle), c_void_p),
    "hipIpcOpenMemHandle": (POINTER(c_void_p), IpcHandle, c_uint),
    "hipIpcCloseMemHandle": (c_void_p,),
    "hipMemGetHandleForAddressRange": (c_void_p, c_void_p, c_size_t, c_int, c_ulonglong),
    "hipStreamCreateWithPriority": (POINTER(_Handle), c_uint, c_int),
    "hipStreamDestroy": (_Handle,),
    "hipStreamQuery": (_Handle,),
    "hipStreamSynchronize": (_Handle,),
    "hipStreamIsCapturing": (_Handle, POINTER(c_int)),
    "hipStreamWaitEvent": (_Handle, _Handle, c_uint),
    "hipThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "hipEventCreateWithFlags": (POINTER(_Handle), c_uint),
    "hipEventDestroy": (_Handle,),
    "hipEventRecord": (_Handle, _Handle),
    "hipEventQuery": (_Handle,),
    "hipModuleLoadData": (POINTER(_Handle), c_void_p),
    "hipModuleUnload": (_Handle,),
    "hipModuleGetFunction": (POINTER(_Handle), _Handle, c_char_p),
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), _Handle, c_int, c_size_t),
    "hipModuleLaunchKernel": (_Handle, *(c_uint,) * 7, _Handle, POINTER(c_void_p), POINTER(c_void_p)),
    "hipModuleLaunchCooperativeKernel": (_Handle, *(c_uint,) * 7, _Handle, POINTER(c_void_p)),
}

NAMES = Names(
    error_name="hipDrvGetErrorName",
    error_text="hipDrvGetErrorString",
    device_count="hipGetDeviceCount",
    device_attribute="hipDeviceGetAttribute",
    free="hipFree",
    fill_async="hipMemsetAsync",
    host_register="hipHostRegister",
    host_unregister="hipHostUnregister",
    host_device_pointer="hipHostGetDevicePointer",
    ipc_export="hipIpcGetMemHandle",
    ipc_open="hipIpcOpenMemHandle",
    ipc_close="hipIpcCloseMemHandle",
    range_handle="hipMemGetHandleForAddressRange",
    stream_priorities="hipDeviceGetStreamPriorityRange",
    stream_create="hipStreamCreateWithPriority",
    stream_destroy="hipStreamDestroy",
    stream_query="hipStreamQuery",
    stream_synchronize="hipStreamSynchronize",
    stream_is_capturing="hipStreamIsCapturing",
    stream_wait_event="hipStreamWaitEvent",
    exchange_capture_mode="hipThreadExchangeStreamCaptureMode",
    event_create="hipEventCreateWithFlags",
    event_destroy="hipEventDestroy",
    event_record="hipEventRecord",
    event_query="hipEventQuery",
    module_load="hipModuleLoadData",
    module_unload="hipModuleUnload",
    module_function="hipModuleGetFunction",
    resident_blocks="hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    launch="hipModuleLaunchKernel",
    launch_cooperative="hipModuleLaunchCooperativeKernel",
)

OPTIONAL = ("hipMemGetHandleForAddressRange", "hipModuleLaunchCooperativeKernel")
"""Not in every release of ROCm 6."""
