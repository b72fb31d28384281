"""What torch's `grouped_mm` accepts, which its documentation does not say.

Checked before it is called, since it would raise, or wait for the GPU.
"""

from collections.abc import Sequence

import torch
from transformers.utils import is_torchdynamo_compiling
from transformers.utils.import_utils import is_fake_tensor


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
    # There is a kernel for the CPU, and for CUDA from Ampere on.
    exists = device.type in ("cpu", "meta") or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    if not exists or dtype not in (torch.float32, torch.bfloat16, torch.float16):
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


def grouped_mm_fits(stacks: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped_mm` exists on a device and takes weights of these sizes and dtype.

    Args:
        stacks: `gate_up_proj` and `down_proj` of experts.
        device: of the product.
        dtype: of the product.
    """
    weight = stacks[1]
    if not grouped_mm_takes_dtype(dtype, weight, device):
        return False
    if is_torchdynamo_compiling() and grouped_mm_waits(device):
        # A compiler may put the product into a CUDA graph, which cannot wait for the host.
        return False
    # Rows and their strides must be multiples of 16 bytes; a cast makes new, contiguous rows.
    if any(size * dtype.itemsize % 16 for size in weight.shape[1:]):
        return False
    return dtype != weight.dtype or all(grouped_mm_takes(stack, device) for stack in stacks)
