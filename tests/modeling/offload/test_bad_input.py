"""Offloaded experts raise clear errors for what they cannot do, and then leave no thread and no open file."""

import copy
import json
import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.offload import check_equal, expert_bytes, load_both, mixtral, text_model

import llamoe
from llamoe.modeling.offload import OffloadedExperts

pytestmark = pytest.mark.usefixtures("without_gradients")
ON_DISK = {"experts": "disk"}


def load(folder, **kwargs):
    return llamoe.LlamoeForCausalLM.from_pretrained(folder, dtype="auto", **kwargs).eval()


def refused(message: str, folder, **kwargs) -> str:
    with pytest.raises(ValueError, match=message) as error:
        load(folder, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("memory", ["8 bananas", 0, True, []])
def test_memory_that_is_no_size_is_refused(memory, text_folder):
    refused("experts_memory=.*give bytes", text_folder, experts_memory=memory)


def test_a_memory_below_one_expert_is_refused_with_numbers(text_folder, nothing_left):
    needed = expert_bytes(load(text_folder))
    refused(f"experts_memory={needed - 1:,} .*{needed:,}", text_folder, experts_memory=needed - 1)


def test_weights_that_are_in_no_safetensors_file_are_refused(tmp_path, text_folder):
    (tmp_path / "config.json").write_bytes((text_folder / "config.json").read_bytes())
    state = load_file(text_folder / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    refused("pytorch_model.bin", tmp_path, experts_memory="1MB")
    config = llamoe.LlamoeTextConfig.from_pretrained(text_folder)
    with pytest.raises(ValueError, match="state dict"):
        llamoe.LlamoeForCausalLM.from_pretrained(None, config=config, state_dict=state, device_map=ON_DISK)


def test_quantizing_while_loading_is_refused(tmp_path):
    text_model(hidden_size=128, intermediate_size=96).to(torch.bfloat16).save_pretrained(tmp_path)
    config = llamoe.QuantizationConfig("int4")
    refused("quantization_config asks", tmp_path, device_map=ON_DISK, quantization_config=config)


def test_several_processes_are_refused(text_folder):
    from transformers.distributed import DistributedConfig

    refused("for one process", text_folder, experts_memory="1MB", tp_plan="auto")
    parallel = DistributedConfig(enable_expert_parallel=True)
    refused("for one process", text_folder, experts_memory="1MB", distributed_config=parallel)


EXPERT_3 = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
DAMAGES = {
    "missing": (EXPERT_3, lambda name, tensor: {}, r"layers\.1\..*experts?\D*3"),
    "of another shape": (
        EXPERT_3,
        lambda name, tensor: {name: tensor[:, :-1]},
        r"layers\.1\..*experts\.3.*79",
    ),
    # The experts of a layer have the numbers 0 to 4.
    "beyond the last": (
        EXPERT_3,
        lambda name, tensor: {name: tensor, name.replace(".3.", ".5."): tensor.clone()},
        r"one too many beside .*num_local_experts in config\.json is 5",
    ),
    "without scales": (
        "model.layers.1.mlp.experts.3.w3.weight.absmax",
        lambda name, tensor: {},
        r"w3\.weight\.absmax is missing",
    ),
    "of fewer codes": (
        "model.layers.1.mlp.experts.3.w3.weight",
        lambda name, tensor: {name: tensor[:-1]},
        r"expert 3 of .*layers\.1\S* cannot be unpacked: codes and scales have the shapes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_expert_is_named(damage, folders, tmp_path, nothing_left):
    """While the model loads; for an expert packed by bitsandbytes, when a token chooses it."""
    name, change, message = DAMAGES[damage]
    if name == EXPERT_3:
        mixtral().save_pretrained(tmp_path, layout="stock")
    else:
        shutil.copytree(folders["mixtral in nf4"], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors |= {key: tensor.contiguous() for key, tensor in change(name, tensors.pop(name)).items()}
    save_file(tensors, path, {"format": "pt"})
    load = llamoe.LlamoeMixtralForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=message), closing(load(tmp_path, experts_memory="1MB")) as model:
        model(torch.arange(3, 73)[None])


def test_a_stack_with_another_number_of_experts_is_refused(tmp_path, text_folder, nothing_left):
    text_model(num_local_experts=6).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 7}))
    refused(r"\[6, .*\[7, ", tmp_path, experts_memory="1MB")


def test_a_closed_model_raises_an_error(text_folder, ids, nothing_left):
    """Also if all experts are in slots."""
    model = load(text_folder, device_map=ON_DISK)
    model(ids)
    model.close()
    model.close()
    with pytest.raises(llamoe.CheckpointError, match=r"model\.close"):
        model(ids)
    del model


def test_models_are_not_cast(text_folder, ids):
    resident, model = load_both(text_folder)
    for cast in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.double()):
        with pytest.raises(ValueError, match="layers.1.feed_forward.experts .*torch.float32.*dtype="):
            cast()
    resident, model = load_both(text_folder)
    assert torch.equal(resident(ids).logits, model.to("cpu").float()(ids).logits)


def test_loading_other_weights_into_it_is_refused(text_folder):
    resident, model = load_both(text_folder, 2)
    for parameter in resident.parameters():
        parameter.mul_(2)
    with pytest.raises(RuntimeError, match=r"layers\.\d\..*experts.*disk"):
        model.load_state_dict(resident.state_dict())


def test_copies_share_the_store_keep_hooks_and_survive_the_first(text_folder, ids):
    resident, model = load_both(text_folder)
    calls = []
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            module.register_forward_hook(lambda *_: calls.append(1))
    twin = copy.deepcopy(model)
    assert twin._stores() == model._stores()
    del model
    assert torch.equal(resident(ids).logits, twin(ids).logits)
    assert len(calls) == 2
    assert twin.lm_head.weight.data_ptr() != resident.lm_head.weight.data_ptr()


def test_a_model_can_be_saved_into_its_own_folder(tmp_path, ids):
    text_model().save_pretrained(tmp_path)
    resident, model = load_both(tmp_path, 2)
    before = resident(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(ids).logits, before)
    # The model still reads from the file that was replaced.
    with pytest.raises(llamoe.CheckpointError, match="model.safetensors: has changed"):
        model(ids)
    assert torch.equal(load(tmp_path, experts_memory="60KB")(ids).logits, before)


def test_refused_saving_leaves_the_own_folder_as_it_was(tmp_path, ids):
    mixtral().save_pretrained(tmp_path, layout="stock")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    resident, model = load_both(tmp_path, 2, llamoe.LlamoeMixtralForCausalLM)
    with pytest.raises(ValueError, match="layers.0.mlp.experts is on 'disk'"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    check_equal(resident, model, ids)
