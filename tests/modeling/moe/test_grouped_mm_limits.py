"""What torch's grouped product accepts, and where it waits for the host."""

import pytest
import torch
from support.models import stock_text_config

import llamoe
from llamoe.modeling.moe import grouped_mm_limits
from llamoe.modeling.moe.experts import Experts

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "hip", "waits"),
    [
        ((8, 0), None, True), ((8, 9), None, True), ((9, 0), None, False), ((10, 3), None, False),
        ((12, 0), None, True), ((9, 4), "6.4", True),
    ],
)  # fmt: skip
def test_grouped_mm_waits_for_the_host_on_most_gpus(capability, hip, waits, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_mm_limits.grouped_mm_waits(torch.device("cuda", 0)) is waits
    assert not grouped_mm_limits.grouped_mm_waits(CPU)


@pytest.mark.parametrize(
    ("make", "on_the_host", "on_a_gpu"),
    {
        "whole": (lambda: torch.empty(3, 16, 24), True, True),
        "output first": (lambda: torch.empty(3, 24, 16).transpose(1, 2), True, True),
        "rows apart": (lambda: torch.empty(3, 16, 32)[..., :24], True, True),
        "rows 25 numbers apart": (lambda: torch.empty(3, 16, 25)[..., :24], False, False),
        "columns apart": (lambda: torch.empty(3, 16, 48)[..., ::2], False, False),
        "all rows one": (lambda: torch.empty(3, 1, 24).expand(3, 16, 24), False, False),
        "matrices 386 apart": (lambda: torch.empty(1158).as_strided((3, 16, 24), (386, 24, 1)), True, False),
        "behind one number": (lambda: torch.empty(1 + 3 * 16 * 24)[1:].view(3, 16, 24), True, False),
        "1024 of them": (lambda: torch.empty(1024, 4, 4), True, False),
    }.values(),
)
def test_strides_that_grouped_mm_takes(make, on_the_host, on_a_gpu):
    """On the CPU torch itself says so; what it asks on a GPU stands in its sources."""
    weight = make().zero_() if make().stride(1) else make()
    assert grouped_mm_limits.grouped_mm_takes(weight, CPU) is on_the_host
    assert grouped_mm_limits.grouped_mm_takes(weight, torch.device("cuda", 0)) is on_a_gpu
    rows = torch.ones(5, weight.shape[1])
    ends = torch.full((len(weight),), 5, dtype=torch.int32)
    if on_the_host:
        torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    else:
        with pytest.raises(RuntimeError, match="multiple of 16 bytes|Invalid strides"):
            torch.nn.functional.grouped_mm(rows, weight, offs=ends)


def test_compilers_get_no_product_that_waits_for_the_host(monkeypatch):
    """`reduce-overhead` would put it into a CUDA graph."""
    experts = Experts(llamoe.from_stock(stock_text_config(hidden_size=64, intermediate_size=48))).bfloat16()
    gpu = torch.device("cuda", 0)
    fits = []
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        fits.append(experts.fits_grouped_mm(gpu))
        monkeypatch.setattr(grouped_mm_limits, "is_torchdynamo_compiling", lambda: True)
        fits.append(experts.fits_grouped_mm(gpu))
        monkeypatch.setattr(grouped_mm_limits, "is_torchdynamo_compiling", lambda: False)
    assert fits == [True, False, True, True]
