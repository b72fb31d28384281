"""What torch's `grouped_mm` accepts, which its documentation does not say.

Checked before it is called, since it would raise, or wait for the GPU.
"""

import torch
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.import_utils import is_fake_tensor


def grouped_mm_exists(device: torch.device) -> bool:
    """Whether `torch.nn.functional.grouped_mm` has a kernel for a device: the CPU, and CUDA from Ampere on."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type in ("cpu", "meta")


def grouped_mm_waits(device: torch.device) -> bool:
    """Whether `grouped_mm` copies the groups' ends to the host even in bfloat16; no CUDA graph can hold that.

    `_grouped_mm_cuda` (ATen/native/cuda/GroupedBlas.cpp, torch 2.11 to 2.15) has a kernel of its own for bfloat16 on
    devices of capability 9 and 10. For everything else it loops over the groups on the host.
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] not in (9, 10)


def grouped_mm_takes_dtype(dtype: torch.dtype, given: torch.Tensor, device: torch.device) -> bool:
    """Whether `grouped_mm` multiplies rows of a dtype on a device, also where there are only shapes.

    Args:
        dtype: of the rows and, cast to it, of the matrices.
        given: rows or stack, which may have a shape only.
        device: of the product.
    """
    if not grouped_mm_exists(device) or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if device.type == "cpu" and dtype == torch.float16:
        # The CPU multiplies input-first float16 weights in a scalar loop.
        return False
    has_shapes_only = is_torchdynamo_compiling() or device.type == "meta" or is_fake_tensor(given)
    # torch does not know the result's shape for other dtypes.
    return dtype == torch.bfloat16 or not has_shapes_only


def grouped_mm_takes(weight: torch.Tensor, device: torch.device) -> bool:
    """Whether `grouped_mm` accepts a stack of matrices on a device, by its strides and address.

    From ATen/native/GroupedMMUtils.h: elements of a row, or of a column, are contiguous, and the next one begins a
    multiple of 16 bytes later. On a GPU the same holds for the next matrix (torch 2.15 reports it, earlier releases
    fail) and for the first one's address. The bfloat16 kernel (GroupMM.cu) takes fewer than 1024 matrices.
    """
    apart, rows, columns = weight.stride()
    if 1 not in (rows, columns) or max(rows, columns) * weight.itemsize % 16:
        return False
    if device.type != "cuda":
        return True
    # torch's GPU allocations begin at multiples of 512 bytes. torch 2.11's compiler cannot read the offset.
    offset = 0 if torch.compiler.is_compiling() else weight.storage_offset()
    return len(weight) < 1024 and all(start * weight.itemsize % 16 == 0 for start in (offset, apart))
