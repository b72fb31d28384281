"""The Triton kernels between a layer's products, as far as a machine without a GPU can tell: they compile for each.

Their numbers are proven by `interpreted_layer`, which `test_under_the_interpreter` starts.
"""

import pytest
import torch
from peft import get_peft_model
from support import decoding
from support.gpu_compiler import SHARED, compile_kernel
from support.models import max_abs

import llamoe
from llamoe.modeling.kernels import gpu_layer, gpu_layer_check

pytestmark = pytest.mark.slow

ROWS = ("gate", "up")
# Of a Scout: 40 and 8 heads of 128, adapters of rank 8, sums in eight splits, and experts' factors in bfloat16.
TURN = dict(
    dict.fromkeys(("query_ptr", "key_ptr", "out_ptr"), "*bf16!"),
    **dict(cos_ptr="*fp32!", sin_ptr="*fp32", positions_ptr="*i64", num_positions="i32", stride_table="i32!"),
    **dict(
        stride_angle="i32", eps="fp32", floor_scale="fp32", attn_scale="fp32", HEADS=40, HALF=64, BLOCK=64
    ),
)
THIN = dict(
    dict.fromkeys(("first_ptr", "second_ptr", "third_ptr"), "*fp32!"),
    **dict(x_ptr="*bf16!", ids_ptr="*i64!", out_ptr="*fp32!", num_experts="i32", num_in="i32!", stride_in=1),
    **dict(stride_expert="i32!", stride_rank="i32!", SECOND=8, THIRD=16, BLOCK=1024),
)
END = dict(ids_ptr="*i64!", out_ptr="*bf16!", num_experts="i32", num_out="i32!")


def products(prefix, pointer, factors, ranks, by_expert):
    """Arguments for some products: parts, thin rows, and factors in either order."""
    by_output = ("i32", 1) if not by_expert else (1, "i32!")
    names = "split", "row", "thin_ptr", "thin", "b_ptr", "expert", "out", "rank", "scale"
    kinds = "i32!", "i32!", "*fp32!", "i32", factors, "i32!", *by_output, "fp32"
    given = {prefix.lower() + name: kind for name, kind in zip(names, kinds, strict=True)}
    constants = {
        "SPLITS": 1 if pointer == "*bf16!" else 8,
        "RANK": ranks,
        "RANKS": 1 << (ranks - 1).bit_length(),
    }
    return given | {prefix.upper() + name: value for name, value in constants.items()}


def update(pointer, factors, ranks, by_expert):
    given = products("stride_", pointer, factors, ranks, by_expert)
    renamed = {"stride_thin_ptr": "thin_ptr", "stride_b_ptr": "b_ptr", "stride_scale": "scale"}
    given = {renamed.get(name, name).removeprefix("STRIDE_"): kind for name, kind in given.items()}
    block = max(16, min(256, 4096 // given["RANKS"]))
    return dict(given, parts_ptr=pointer, BY_ID=by_expert, BLOCK=block, **END)


def gate(pointer, factors, ranks, by_expert):
    given = {f"{name}_ptr": pointer for name in ROWS}
    for name in ROWS:
        given |= products(f"{name}_", pointer, factors, ranks, by_expert)
    return dict(given, BY_ID=by_expert, BLOCK=256, **END)


CASES = {
    "norm": (
        "rms_norm_kernel",
        dict(x_ptr="*bf16!", weight_ptr="*bf16!", out_ptr="*bf16!", size="i32!", eps="fp32", BLOCK=4096),
    ),
    "rotation of pairs, norm": ("rotate_kernel", dict(TURN, ROTATES=1, INTERLEAVED=1, NORMALIZES=1, TUNES=0)),
    "rotation of halves": ("rotate_kernel", dict(TURN, ROTATES=1, INTERLEAVED=0, NORMALIZES=0, TUNES=0)),
    "temperature": ("rotate_kernel", dict(TURN, ROTATES=0, INTERLEAVED=0, NORMALIZES=0, TUNES=1)),
    "first factors of layers": ("thin_kernel", dict(THIN, BY_ID=0)),
    "first factors of experts": (
        "thin_kernel",
        dict(THIN, BY_ID=1, first_ptr="*bf16!", second_ptr="*bf16!", third_ptr="*bf16!"),
    ),
    "update of layers": ("update_kernel", update("*bf16!", "*fp32!", 8, False)),
    "update of experts, splits": ("update_kernel", update("*fp32!", "*bf16!", 8, True)),
    "update of a high rank": ("update_kernel", update("*bf16!", "*fp32!", 200, False)),
    "gate of layers": ("gate_kernel", gate("*bf16!", "*fp32!", 8, False)),
    "gate of experts, splits": ("gate_kernel", gate("*fp32!", "*bf16!", 8, True)),
    "gate without adapters": (
        "gate_kernel",
        gate("*fp32!", "*fp32!", 0, True) | {"GATE_RANKS": 1, "UP_RANKS": 1},
    ),
}


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile(monkeypatch, tmp_path, capability):
    """No register is kept in memory; what is read once is read 16 bytes at a time."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from llamoe.modeling.kernels import layer_triton

    for name, (kernel, arguments) in CASES.items():
        warps = 1 if kernel == "rotate_kernel" else 4
        compiled, usage = compile_kernel(
            monkeypatch, tmp_path, capability, getattr(layer_triton, kernel), arguments, warps
        )
        assert usage["STACK"] == 0 and compiled.metadata.shared <= 4096, (name, usage)
        if kernel in ("rms_norm_kernel", "thin_kernel"):
            assert "ld.global.v4.b32" in compiled.asm["ptx"]
        if name == "temperature":
            # Steps begin where a quotient is whole.
            assert "div.full.f32" not in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make", [decoding.dense, decoding.mixtral, decoding.text], ids=lambda make: make.__name__
)
@torch.no_grad()
def test_tokens_with_adapters_on_a_gpu(make, dtype, monkeypatch):
    """As near to float32 as modules are; the host waits for nothing, and a captured graph gives the same."""
    model = make()
    model = get_peft_model(model, llamoe.lora_config(model, r=8)).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.05)
    tokens = torch.randint(3, 101, (2, 1), device="cuda")
    truth = model.cuda()(tokens).logits
    model = model.to(dtype)
    with monkeypatch.context() as patched:
        patched.setattr(gpu_layer, "is_on_gpu", lambda x: False)
        plain = model(tokens).logits
    launched = []
    monkeypatch.setattr(
        gpu_layer,
        "launch",
        lambda name, *args, launch=gpu_layer.launch, **kwargs: (
            launched.append(name),
            launch(name, *args, **kwargs),
        ),
    )
    found = model(tokens).logits
    assert {"thin_kernel", "update_kernel", "gate_kernel", "rotate_kernel"} <= set(launched)
    assert gpu_layer_check.failures() == []
    assert max_abs(found, truth) <= 1.5 * max_abs(plain, truth) + 1e-4
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert torch.equal(model(tokens).logits, found)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(tokens).logits
    graph.replay()
    assert torch.equal(captured, found)
