"""Matrices of a megabyte and more, which are read in whole disk blocks directly into their slots."""

import pytest
import torch
from support.offload import check_equal, counts, expert_bytes, load_both, mixtral, text_model

import llamoe
from llamoe.modeling.offload.memory import BLOCK, slots_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gradients")]

# In float32 an expert's gate and up have 1.3 MB, down half of that: the first is read in blocks, the second is not.
SIZES = {"hidden_size": 256, "intermediate_size": 656, "num_local_experts": 5, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each way in which large experts are stored."""
    paths = {name: tmp_path_factory.mktemp("large") for name in ("float32", "bfloat16", "mixtral", "int8")}
    text = {**SIZES, "moe_layers": [1]}
    text_model(**text).save_pretrained(paths["float32"])
    larger = {**text, "intermediate_size": 1312}
    text_model(**larger).to(torch.bfloat16).save_pretrained(paths["bfloat16"], max_shard_size="9MB")
    mixtral(**SIZES).save_pretrained(paths["mixtral"], layout="stock")
    plain = tmp_path_factory.mktemp("plain")
    text_model(**{**text, "intermediate_size": 2624}).to(torch.bfloat16).save_pretrained(plain)
    config = llamoe.QuantizationConfig("int8")
    packed = llamoe.LlamoeForCausalLM.from_pretrained(plain, dtype="auto", quantization_config=config)
    packed.save_pretrained(paths["int8"])
    return paths


@pytest.mark.parametrize(
    ("kind", "experts"), [("float32", 1), ("bfloat16", 4), ("mixtral", 1), ("mixtral", 99), ("int8", 4)]
)
def test_large_matrices_are_bit_equal(kind, experts, folders, ids):
    resident, offloaded = load_both(folders[kind], experts)
    check_equal(resident, offloaded, ids)
    statistics = counts(offloaded)
    needed = statistics.misses * expert_bytes(resident)
    assert 0 < needed <= statistics.bytes_read <= 1.02 * needed


def test_models_load_and_run_in_inference_mode(folders, ids):
    resident, _ = load_both(folders["float32"])
    with torch.inference_mode():
        model = llamoe.LlamoeForCausalLM.from_pretrained(folders["float32"], experts_memory="9MB").eval()
        assert torch.equal(resident(ids).logits, model(ids).logits)
    assert torch.equal(resident(ids[:1]).logits, model(ids[:1]).logits)


@pytest.mark.parametrize("shape", [(3, 5), (700, 500)])
def test_slots_have_room_for_the_rest_of_their_blocks(shape):
    size = shape[0] * shape[1] * 4
    slots = slots_of(3, size, torch.device("cpu"), False)
    unit = BLOCK if size >= 1 << 20 else 64
    assert len(slots) == 3
    assert slots.stride(0) % unit == 0
    # A matrix may begin at any byte of the first unit, and the unit that it ends in must be whole.
    assert slots.stride(0) >= -(-(unit - 1 + size) // unit) * unit
    assert slots.data_ptr() % unit == 0
