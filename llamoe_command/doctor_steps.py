"""Which devices there are, and which implementation serves each step on them.

The library's own guards are asked, on small models; nothing here knows their rules. torch and llamoe are imported,
which takes seconds.

Shapes: R rows of experts, which are tokens times experts a token.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers.utils import (
    is_bitsandbytes_available,
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_flash_attn_4_available,
)

import llamoe
from llamoe.modeling.checkpoints import devices_here
from llamoe.modeling.formats import Int4, has_gpu_kernel, torchs_block, why_no_kernel
from llamoe.modeling.kernels import (
    SHORTCUTS_ARE_ON,
    cpp_instructions,
    few_rows_limit,
    kernel_failures,
    max_rows_of_matrix,
    plain_max_rows,
    rows_of_torch,
    why_no_cpp_kernels,
    why_no_gpu_kernel,
)
from llamoe.modeling.moe import IMPLEMENTATION, STACKS, Experts

# Rows of a step of decoding, and of a long prompt or a training step.
_FEW, _MANY = 1, 4096
_LOOP = "a loop over the hit experts"
_KERNEL = "llamoe's Triton kernel for few rows"
_GROUPED = "torch's grouped product, or a loop over the hit experts where it does not take them"
_FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
_TORCH_PRODUCTS = "torch's products"
_CPP = "llamoe's C++ kernels"
_WITHOUT_CPP = (
    "without them a token in few bits takes two to three times as long, in int4 without AVX-512 six times"
)
"""Of models of 114 and 197 million parameters on one thread: 2.2 to 3.3 times with AVX-512; 2.6 and 3.1 times in int8,
5.6 and 6.2 times in int4 held to AVX2. In 16 bits 1.7 and 2.2 times with AVX-512."""
# Experts on which `--try` checks the kernel: of the sizes of a small mixture, 100 MB.
_CHECKED = {"hidden_size": 1024, "intermediate_size": 2048, "num_local_experts": 8}


@dataclass
class Step:
    """What serves a step.

    Attributes:
        device: as torch names it.
        step: of a model's computation.
        served_by: the implementation.
        why: why it is not a faster one; "" where there is none.
        advice: what would help; "" where nothing does.
    """

    device: str
    step: str
    served_by: str
    why: str = ""
    advice: str = ""


def describe_devices() -> dict[str, dict[str, Any]]:
    """Name and sizes of each device; memory in bytes."""
    found: dict[str, dict[str, Any]] = {}
    for device in devices_here():
        try:
            found[device] = _describe(torch.device(device))
        except RuntimeError as error:
            found[device] = {"name": f"cannot be used: {' '.join(str(error).split())}"}
    return found


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        capabilities, memory = torch.cpu.get_capabilities(), psutil.virtual_memory()
        return {
            "name": capabilities.get("cpu_name") or platform.machine(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "bfloat16_instructions": bool(capabilities.get("avx512_bf16"))
            and rows_of_torch(torch.bfloat16) is None,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory": memory.total,
            "free_memory": memory.available,
        }
    if device.type == "cuda":
        properties, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": total,
            "free_memory": free,
        }
    return {"name": device.type}


def advice_on_devices() -> list[str]:
    """What hinders torch from using a GPU that the machine has."""
    if torch.accelerator.is_available() or not Path("/proc/driver/nvidia/version").exists():
        return []
    if not torch.backends.cuda.is_built():
        return ["the machine has an NVIDIA driver, but this torch is built without CUDA: install one with it"]
    return [
        f"the machine has an NVIDIA driver, but torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device: "
        "run nvidia-smi, and look at CUDA_VISIBLE_DEVICES and the driver's version"
    ]


def find_steps(try_kernel: bool = False) -> list[Step]:
    """What serves each step on each device.

    The CPU's kernels are compiled if they were not before, which takes some seconds once.

    Args:
        try_kernel: whether the kernel for few rows is checked on each GPU now, in tens of seconds (estimated).
    """
    found: list[Step] = []
    for name in devices_here():
        device, is_cpu = torch.device(name), name == "cpu"
        found += [*([_few_rows_on_cpu(), *_many_rows_on_cpu()] if is_cpu else []), *_few_bits(device)]
        try:
            found += _steps_of_models(device, try_kernel)
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            advice = (
                "unset LLAMOE_EXPERTS"
                if "LLAMOE_EXPERTS" in reason
                else "try an operation of torch on this device without llamoe"
            )
            found.append(Step(name, "models", "none can be made", reason, advice))
    return found


def _steps_of_models(device: torch.device, try_kernel: bool) -> Iterator[Step]:
    name = str(device)
    models = {
        family: {dtype: _tiny(family, device, dtype) for dtype in (torch.bfloat16, torch.float32)}
        for family in ("Llama 4", "Mixtral")
    }
    one = models["Mixtral"][torch.bfloat16]
    yield from _attention(device, one.config._attn_implementation)
    implementation = one.config._experts_implementation
    if implementation != IMPLEMENTATION:
        yield Step(
            name, "experts", implementation, "LLAMOE_EXPERTS names it",
            "unset LLAMOE_EXPERTS, and llamoe chooses by sizes, dtype and device",
        )  # fmt: skip
    else:
        for step, rows, needs_gradient in (
            ("experts, one token", _FEW, False),
            ("experts, many tokens", _MANY, False),
            ("experts, training", _MANY, True),
        ):
            yield Step(name, step, _ways(models, rows, needs_gradient))
    if device.type != "cpu":
        yield _kernel_for_few_rows(device, one, try_kernel)


def _tiny(family: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> Any:
    """A mixture of one layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4} | sizes
    shared = {"vocab_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "Mixtral":
        made = llamoe.LlamoeMixtralForCausalLM, llamoe.LlamoeMixtralConfig(**sizes, **shared)
    else:
        made = llamoe.LlamoeForCausalLM, llamoe.LlamoeTextConfig(**sizes, **shared, intermediate_size_mlp=128)
    model_class, config = made
    with device:
        return model_class(config).to(dtype).eval()


def _experts(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, Experts))


def _attention(device: torch.device, implementation: str) -> Iterator[Step]:
    served_by, name = implementation, str(device)
    if implementation == "sdpa":
        served_by += ", torch's scaled_dot_product_attention"
        if device.type == "cuda":
            query = torch.zeros(1, 4, 128, 64, device=device, dtype=torch.bfloat16)
            fits = can_use_flash_attention(SDPAParams(query, query, query, None, 0.0, True, False))
            served_by += f", {'with' if fits else 'without'} torch's own FlashAttention in bfloat16"
    yield Step(name, "attention", served_by)
    if device.type == "cuda":
        found = ", ".join(flash for flash, is_available in _FLASH.items() if is_available())
        told = (
            f"{found}, where attn_implementation names it"
            if found
            else "not installed; attention is served by sdpa"
        )
        yield Step(name, "FlashAttention", told)


def _few_rows_on_cpu() -> Step:
    """Linear layers and feed-forwards of a step of decoding, and the experts among them."""
    step = "products of few rows"
    if not SHORTCUTS_ARE_ON:
        why = "LLAMOE_CPU_SHORTCUTS=0 turns llamoe's off"
        return Step("cpu", step, _TORCH_PRODUCTS, why, "unset LLAMOE_CPU_SHORTCUTS")
    if (absence := _why_no_cpp()) is not None:
        return Step("cpu", step, _TORCH_PRODUCTS, *absence)
    most = " and ".join(
        f"{plain_max_rows(dtype)} in {_name(dtype)}" for dtype in (torch.float32, torch.bfloat16)
    )
    return Step("cpu", step, f"{_CPP} for {cpp_instructions()}, compiled and tested here; up to {most}")


def _why_no_cpp() -> tuple[str, str] | None:
    """Why there are no compiled kernels, with what that costs, and what would help."""
    absence = why_no_cpp_kernels()
    return absence and (f"{absence[0]}; {_WITHOUT_CPP}", absence[1])


def _many_rows_on_cpu() -> Iterator[Step]:
    """The same with more rows: a prompt, and training, which keeps the same products."""
    yield Step("cpu", "prompts and training, float32", _TORCH_PRODUCTS)
    for dtype in (torch.bfloat16, torch.float16):
        served_by, why = _TORCH_PRODUCTS, ""
        if rows_of_torch(dtype) is not None and SHORTCUTS_ARE_ON:
            served_by = f"weights cast to float32 by blocks, then {_TORCH_PRODUCTS}"
            why = f"this processor has no instructions for {_name(dtype)}"
        yield Step("cpu", f"prompts and training, {_name(dtype)}", served_by, why)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ways(models: dict[str, dict[torch.dtype, Any]], rows: int, needs_gradient: bool) -> str:
    """Say how experts of both families are computed in both dtypes."""
    found: dict[str, dict[str, list[str]]] = {}
    for family, by_dtype in models.items():
        for dtype, model in by_dtype.items():
            experts = _experts(model)
            words = _LOOP if model.device.type == "cpu" else _GROUPED
            if experts.way(rows, needs_gradient) == "kernels":
                words = _KERNEL
            named = found.setdefault(words, {})
            named.setdefault(family, []).append(_name(dtype))
    if len(found) == 1:
        return next(iter(found))
    told = {
        words: ", ".join(
            family if len(dtypes) == len(models[family]) else f"{family} in {' and '.join(dtypes)}"
            for family, dtypes in families.items()
        )
        for words, families in found.items()
    }
    return "; ".join(f"{words} ({where})" for words, where in told.items())


def _why_no_kernel(model: Any) -> str | None:
    experts = _experts(model)
    return why_no_kernel(experts.format, experts.dtype, model.device)


def _kernel_for_few_rows(device: torch.device, model: Any, try_kernel: bool) -> Step:
    name, step = str(device), "kernel for few rows of experts"
    if reason := _why_no_kernel(model):
        return Step(name, step, "cannot be used", reason)
    served_by = f"up to {few_rows_limit(device)} rows"
    if not try_kernel:
        return Step(
            name, step, f"{served_by}; each process checks it before its first use, `--try` checks it now"
        )
    experts = _experts(_tiny("Mixtral", device, torch.bfloat16, **_CHECKED))
    for stack in map(experts.stack, STACKS):
        if not has_gpu_kernel(stack.form, stack.parts, stack.sizes, num_experts=stack.num_experts):
            failure = ". ".join(kernel_failures())
            advice = "torch's grouped product takes its place; report the failure with what doctor prints"
            return Step(name, step, "wrong, not used", failure, advice)
    return Step(name, step, f"{served_by}; checked, and right here")


def _few_bits(device: torch.device) -> Iterator[Step]:
    unpacked = f"unpacked for each product, then {_TORCH_PRODUCTS}"
    name = str(device)
    if device.type != "cpu":
        yield _few_bits_on_gpu(device, unpacked)
    elif (absence := _why_no_cpp()) is None:
        for step, form in (
            ("int4 and int8", Int4(32, in_bytes=True)),
            ('int4 and int8, activations="float"', Int4(32)),
        ):
            most = form.kernel_max_rows
            rows = "any number of rows" if most >= _MANY else f"up to {most} rows; more: {unpacked}"
            yield Step(name, step, f"{_CPP}, {'rows in 8 bits, ' * form.in_bytes}{rows}")
        yield Step(name, "training beside int4 and int8", unpacked)
    else:
        yield Step(name, "int4", "torch's kernel" if torchs_block() else unpacked, *absence)
        yield Step(name, "int8", "torch's kernel", *absence)
    served_by = "bitsandbytes" if is_bitsandbytes_available() else "nothing: it is not installed"
    yield Step(name, "bitsandbytes' 4 and 8 bits", served_by)


def _few_bits_on_gpu(device: torch.device, unpacked: str) -> Step:
    if reason := why_no_gpu_kernel(device):
        return Step(str(device), "int4 and int8", unpacked, reason)
    most = max_rows_of_matrix(device)
    return Step(
        str(device),
        "int4 and int8",
        f"llamoe's Triton kernels, up to {most} rows of a matrix; more: {unpacked}",
    )


def advice_on_steps(steps: list[Step]) -> list[str]:
    """One line for each thing that would help, with the steps that it would help."""
    helped: dict[tuple[str, str, str], list[str]] = {}
    for step in steps:
        if step.advice:
            helped.setdefault((step.device, step.why, step.advice), []).append(step.step)
    return [
        f"{', '.join(named)} on {device}: {why.rstrip('.')}; {advice}"
        for (device, why, advice), named in helped.items()
    ]
