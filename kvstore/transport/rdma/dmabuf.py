"""Memory of a GPU as a dma-buf, by which a NIC can be given it."""

import ctypes
import mmap
from typing import Any, NamedTuple

from kvstore.errors import ConfigError, InvalidRequest

DRIVER = "libcuda.so.1"
DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


class DmaBuf(NamedTuple):
    """`fd` is the caller's to close, once it is registered; the memory is freed only after it is no more registered.

    The first byte that was asked for is at `offset`: dma-bufs begin at a page.
    """

    fd: int
    offset: int


def export(address: int, size: int, driver: str = DRIVER) -> DmaBuf:
    """`size` bytes at `address`, which CUDA allocated in this process, in the GPU's memory.

    ConfigError when driver or GPU cannot do it, and InvalidRequest when this is not memory of a GPU.
    """
    if address <= 0 or size <= 0:
        raise InvalidRequest(f"no memory of a GPU: {size} bytes at {address}")
    cuda = _load(driver)
    _check(cuda, cuda.cuInit(0), "the CUDA driver does not start")
    ordinal, device, can = ctypes.c_int(-1), ctypes.c_int(), ctypes.c_int()
    pointer = ctypes.c_uint64(address)
    if cuda.cuPointerGetAttribute(ctypes.byref(ordinal), DEVICE_ORDINAL, pointer) or ordinal.value < 0:
        raise InvalidRequest(f"{address:#x} is no memory of a GPU")
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), ordinal), f"there is no GPU {ordinal.value}")
    result = cuda.cuDeviceGetAttribute(ctypes.byref(can), DMA_BUF_SUPPORTED, device)
    if result or not can.value:
        raise ConfigError(
            f"GPU {ordinal.value} has no dma-bufs with this driver: it takes NVIDIA's open kernel modules, 515 or newer"
        )
    offset = address % mmap.PAGESIZE
    start, length = ctypes.c_uint64(address - offset), -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = ctypes.c_int(-1)
    result = cuda.cuMemGetHandleForAddressRange(
        ctypes.byref(fd), start, ctypes.c_size_t(length), DMA_BUF_FD, ctypes.c_ulonglong(0)
    )
    if result == INVALID_VALUE:
        raise InvalidRequest(f"{size} bytes at {address:#x} are not within what CUDA allocated there, in whole pages")
    _check(cuda, result, f"GPU {ordinal.value} gave no dma-buf")
    if fd.value < 0:
        raise ConfigError(f"GPU {ordinal.value} gave no dma-buf, and no reason")
    return DmaBuf(fd.value, offset)


def _load(driver: str) -> Any:
    try:
        cuda = ctypes.CDLL(driver)
        cuda.cuMemGetHandleForAddressRange.restype = ctypes.c_int
    except OSError as error:
        raise ConfigError(f"memory of a GPU cannot be shared: there is no CUDA driver ({error})") from error
    except AttributeError as error:
        raise ConfigError("memory of a GPU cannot be shared: the CUDA driver is older than 11.7") from error
    return cuda


def _check(cuda: Any, result: int, what: str) -> None:
    if result:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(result, ctypes.byref(name))
        raise ConfigError(f"{what}: {name.value.decode() if name.value else 'CUDA error'} ({result})")
