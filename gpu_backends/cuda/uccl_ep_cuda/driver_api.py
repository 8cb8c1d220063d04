"""The functions of the CUDA driver API that are used, with exact argument types, and its constants."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

from uccl_ep_core.device_runtime.common_driver import IpcHandle, Names, Uuid

LIBRARIES = ("libcuda.so.1", "libcuda.so")


ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1
ATTRIBUTE_WARP_SIZE = 10
ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
ATTRIBUTE_COOPERATIVE_LAUNCH = 95
ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
ATTRIBUTE_DMA_BUF_SUPPORTED = 124

POINTER_ATTRIBUTE_SYNC_MEMOPS = 6
FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8

_Device = c_int
_Pointer = c_void_p  # CUdeviceptr, a number of 64 bits
_Handle = c_void_p  # contexts, streams, events, modules, functions

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_Device), c_int),
    "cuDeviceGetName": (c_char_p, c_int, _Device),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), _Device),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, _Device),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, _Device),
    "cuDeviceCanAccessPeer": (POINTER(c_int), _Device, _Device),
    "cuDevicePrimaryCtxRetain": (POINTER(_Handle), _Device),
    "cuCtxGetCurrent": (POINTER(_Handle),),
    "cuCtxPushCurrent_v2": (_Handle,),
    "cuCtxPopCurrent_v2": (POINTER(_Handle),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuMemAlloc_v2": (POINTER(_Pointer), c_size_t),
    "cuMemFree_v2": (_Pointer,),
    "cuMemsetD8Async": (_Pointer, c_ubyte, c_size_t, _Handle),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _Pointer, c_size_t, _Handle),
    "cuMemcpyHtoDAsync_v2": (_Pointer, c_void_p, c_size_t, _Handle),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (POINTER(_Pointer), c_void_p, c_uint),
    "cuPointerSetAttribute": (c_void_p, c_int, _Pointer),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), _Pointer),
    "cuIpcOpenMemHandle_v2": (POINTER(_Pointer), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_Pointer,),
    "cuMemGetHandleForAddressRange": (c_void_p, _Pointer, c_size_t, c_int, c_ulonglong),
    "cuStreamCreateWithPriority": (POINTER(_Handle), c_uint, c_int),
    "cuStreamDestroy_v2": (_Handle,),
    "cuStreamQuery": (_Handle,),
    "cuStreamSynchronize": (_Handle,),
    "cuStreamIsCapturing": (_Handle, POINTER(c_int)),
    "cuStreamWaitEvent": (_Handle, _Handle, c_uint),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (POINTER(_Handle), c_uint),
    "cuEventDestroy_v2": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventQuery": (_Handle,),
    "cuModuleLoadData": (POINTER(_Handle), c_void_p),
    "cuModuleUnload": (_Handle,),
    "cuModuleGetFunction": (POINTER(_Handle), _Handle, c_char_p),
    "cuFuncGetParamInfo": (_Handle, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuFuncSetAttribute": (_Handle, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), _Handle, c_int, c_size_t),
    "cuLaunchKernel": (
        _Handle,
        *(c_uint,) * 7,
        _Handle,
        POINTER(c_void_p),
        POINTER(c_void_p),
    ),
    "cuLaunchCooperativeKernel": (_Handle, *(c_uint,) * 7, _Handle, POINTER(c_void_p)),
}

NAMES = Names(
    error_name="cuGetErrorName",
    error_text="cuGetErrorString",
    device_count="cuDeviceGetCount",
    device_attribute="cuDeviceGetAttribute",
    free="cuMemFree_v2",
    fill_async="cuMemsetD8Async",
    host_register="cuMemHostRegister_v2",
    host_unregister="cuMemHostUnregister",
    host_device_pointer="cuMemHostGetDevicePointer_v2",
    ipc_export="cuIpcGetMemHandle",
    ipc_open="cuIpcOpenMemHandle_v2",
    ipc_close="cuIpcCloseMemHandle",
    range_handle="cuMemGetHandleForAddressRange",
    stream_priorities="cuCtxGetStreamPriorityRange",
    stream_create="cuStreamCreateWithPriority",
    stream_destroy="cuStreamDestroy_v2",
    stream_query="cuStreamQuery",
    stream_synchronize="cuStreamSynchronize",
    stream_is_capturing="cuStreamIsCapturing",
    stream_wait_event="cuStreamWaitEvent",
    exchange_capture_mode="cuThreadExchangeStreamCaptureMode",
    event_create="cuEventCreate",
    event_destroy="cuEventDestroy_v2",
    event_record="cuEventRecord",
    event_query="cuEventQuery",
    module_load="cuModuleLoadData",
    module_unload="cuModuleUnload",
    module_function="cuModuleGetFunction",
    resident_blocks="cuOccupancyMaxActiveBlocksPerMultiprocessor",
    launch="cuLaunchKernel",
    launch_cooperative="cuLaunchCooperativeKernel",
)

OPTIONAL = ("cuFuncGetParamInfo", "cuMemGetHandleForAddressRange")
"""Newer than CUDA 11.4."""
