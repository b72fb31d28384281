"""Test plans for one machine: bytes are those of real models, device maps load, and speeds follow from bytes."""

import json

import pytest
import torch
from support.models import MODELS, for_models, run, stock_mixtral_config, stock_text_config
from transformers import BitsAndBytesConfig

import llamoe
from llamoe import plan_placement
from llamoe.configuration import cache_bytes
from llamoe.conversion import quantize
from llamoe.modeling.checkpoints import device_of
from llamoe.planning.table import summarize

GB = 10**9
SCOUT = "llama-4-scout"
CASES = {case.name: case for case in MODELS}
TEXT, DENSE = CASES["LlamoeForCausalLM"], CASES["LlamoeDenseForCausalLM"]


def is_expert(name):
    return ".experts." in name


def split_bytes(model):
    """Return the bytes of all weights but routed experts, and the bytes of routed experts."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    return sum(sizes.values()) - experts, experts


def place_of(plan, name):
    """Return the planned device of a parameter."""
    if is_expert(name) and "experts" in plan.device_map:
        return plan.device_map["experts"]
    return device_of(name, plan.device_map)


@pytest.mark.parametrize(("gpus", "bits"), [(0, 32), (1, 16), (3, 32)])
@for_models("is_head")
def test_bytes_of_each_device_are_those_of_a_real_model(case, gpus, bits):
    """Bytes are compared with tensors and caches for many sizes of memory; no device holds more than its room."""
    config = case.make_config()
    dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
    model = case.make().to(dtype)
    total = sum(parameter.nbytes for parameter in model.parameters())
    per_layer = cache_bytes(config, 40, batch_size=2, element_size=dtype.itemsize, piece=20)
    stem = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    seen = set()
    devices = list(range(gpus)) or ["cpu"]
    for step in range(6, 26, 3):
        room = total * step // 20
        plan = plan_placement(
            config, gpus=[room] * gpus, ram=total // 3 if gpus else room, bits=bits, context=40, batch=2, prefill=20,
            headroom=0,
        )  # fmt: skip
        weights, experts = dict.fromkeys(plan.weights, 0), {}
        for name, parameter in model.named_parameters():
            place = place_of(plan, name)
            weights[place] += parameter.nbytes
            if is_expert(name):
                experts[place] = experts.get(place, 0) + parameter.nbytes
        assert plan.weights == weights and plan.experts == experts
        assert sum(size for _, size in plan.parts.values()) == total
        assert sum(count for count, _ in plan.parts.values()) == model.num_parameters()
        cache: dict = {}
        for layer, size in enumerate(per_layer):
            place = place_of(plan, f"{stem}.{layer}.self_attn.q_proj.weight")
            place = devices[0] if place in ("cpu", "disk") else place
            cache[place] = cache.get(place, 0) + size
        assert plan.cache == cache
        assert all(size >= 0 for size in plan.remaining.values()), plan.remaining
        for device in plan.room:
            used = plan.weights.get(device, 0) + plan.cache.get(device, 0)
            assert used + plan.remaining[device] <= plan.room[device]
        seen |= set(plan.device_map.values())
    assert {*devices, "disk"} <= seen


def test_bits_name_a_format_and_the_disk_may_be_left_out():
    machine = dict(gpus=1, gpu_memory="24GB", ram="64GB", context=40)
    for bits, form in ((8, "int8"), (4, "int4:64")):
        plan = plan_placement("mixtral-8x7b", bits=bits, **machine)
        assert plan == plan_placement("mixtral-8x7b", quantization=form, **machine)
    machine |= dict(bits=4, gpu_memory="12GB", ram="16GB")
    assert "disk" in plan_placement("mixtral-8x7b", **machine).weights
    with pytest.raises(ValueError, match="does not fit"):
        plan_placement("mixtral-8x7b", disk=False, **machine)
    with pytest.raises(ValueError, match="only one"):
        plan_placement("mixtral-8x7b", quantization="int4", **machine)


def test_experts_are_offloaded_before_layers():
    """With less and less memory the experts of one layer leave the accelerator, then all experts, then layers."""
    rest, experts = split_bytes(TEXT.make())
    one = experts // (2 * 5)
    cache = sum(cache_bytes(TEXT.make_config(), 40, element_size=4, piece=40))

    def planned(gpu, ram):
        return plan_placement(TEXT.make_config(), gpus=[gpu], ram=ram, bits=32, context=40, headroom=0)

    whole = planned(rest + experts + cache, 0)
    assert whole.device_map == {"": 0} and whole.experts_memory is None and whole.hit_share == 0
    # With one byte less the experts of the second mixture go to RAM, and the space that they leave caches experts.
    partly = planned(rest + experts + cache - 1, experts)
    assert partly.device_map == {"": 0, "model.layers.3.feed_forward.experts": "cpu"}
    assert partly.experts == {0: experts // 2, "cpu": experts // 2}
    assert partly.experts_memory == experts // 2 - 1 and partly.remaining[0] == 0
    every = planned(rest + cache + one, experts)
    assert every.device_map == {"": 0, "experts": "cpu"} and every.experts_memory == one
    on_disk = planned(rest + cache + one, experts - 1)
    assert on_disk.device_map == {"": 0, "experts": "disk"} and on_disk.experts_memory == experts - 1
    assert on_disk.hit_share == (experts - 1) / experts and on_disk.weights["disk"] == experts
    layers = planned(rest + cache + one - 1, experts + rest)
    assert layers.device_map["experts"] == "cpu" and set(layers.device_map.values()) == {0, "cpu"}
    assert layers.weights["cpu"] > experts == layers.experts["cpu"]


def test_each_accelerator_caches_experts_of_its_own_layers():
    rest, experts = split_bytes(TEXT.make())
    cache = sum(cache_bytes(TEXT.make_config(), 40, element_size=4, piece=40))
    room = int((rest + cache) * 0.63) + experts // 10
    plan = plan_placement(TEXT.make_config(), gpus=[room, room], ram=experts, bits=32, context=40, headroom=0)
    assert plan.device_map["experts"] == "cpu" and set(plan.weights) == {0, 1, "cpu"}
    assert plan.hit_share == 2 * plan.experts_memory / experts
    for device in (0, 1):
        used = plan.weights[device] + plan.cache[device]
        assert used + plan.experts_memory + plan.remaining[device] == room
    assert min(plan.remaining[0], plan.remaining[1]) == 0


def test_without_accelerators_experts_stay_on_disk_if_they_exceed_ram():
    rest, experts = split_bytes(TEXT.make())
    cache = sum(cache_bytes(TEXT.make_config(), 40, element_size=4, piece=40))
    arguments = {"gpus": 0, "bits": 32, "context": 40, "headroom": 1000}
    whole = plan_placement(TEXT.make_config(), ram=rest + experts + cache + 1000, **arguments)
    assert whole.device_map == {"": "cpu"} and whole.remaining == {"cpu": 0}
    part = plan_placement(TEXT.make_config(), ram=rest + experts + cache + 999, **arguments)
    assert part.device_map == {"": "cpu", "experts": "disk"} and part.experts_memory == experts - 1
    expected = {"device_map": part.device_map, "experts_memory": experts - 1, "dtype": "float32"}
    assert part.arguments() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlamoeForCausalLM", "LlamoeMixtralForCausalLM", "LlamoeForConditionalGeneration"]
)
def test_a_plan_with_experts_on_disk_loads_and_changes_no_bit(name, tmp_path):
    """First half of the experts fit into RAM; then RAM is so small that layers are on disk, too."""
    case = CASES[name]
    model, inputs = case.make(), case.inputs()
    model.save_pretrained(tmp_path, layout="stock")
    expected = run(model, **inputs)
    rest, experts = split_bytes(model)
    cache = plan_placement(tmp_path, gpus=0, ram="1GB", context=40, headroom=0).cache["cpu"]
    plan = plan_placement(tmp_path, gpus=0, ram=rest + cache + experts // 2, context=40, headroom=0)
    assert plan.form == "float32" and plan.experts == {"disk": experts}
    assert plan.device_map == {"": "cpu", "experts": "disk"}
    placed = case.model_class.from_pretrained(tmp_path, **plan.arguments())
    assert torch.equal(run(placed, **inputs), expected)
    assert sum(counts["misses"] for counts in placed.experts_statistics().values()) > 0
    placed.close()
    little = plan_placement(tmp_path, gpus=0, ram=int(rest * 0.9) + cache, context=40, headroom=0)
    assert little.device_map["experts"] == "disk" and little.weights["disk"] > experts
    placed = case.model_class.from_pretrained(tmp_path, **json.loads(json.dumps(little.arguments())))
    assert torch.equal(run(placed, **inputs), expected)
    placed.close()


@for_models("is_head")
def test_plans_of_a_folder_and_of_its_configuration_are_equal(case, tmp_path):
    """Also if each expert is stored separately, under the names of transformers' classes."""
    model = case.make()
    arguments = {"gpus": 0, "ram": "1GB", "headroom": 0}
    computed = plan_placement(case.make_config(), bits=32, **arguments)
    for layout in ("llamoe", "stock"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        plan = plan_placement(tmp_path / layout, **arguments)
        assert plan.weights == computed.weights and plan.experts == computed.experts
        assert plan.parts == computed.parts and plan.cache == computed.cache
    # The dtype is that of the files, unless `bits` is given.
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = plan_placement(tmp_path / "half", **arguments)
    assert half.form == "bfloat16" and half.weights["cpu"] * 2 == computed.weights["cpu"]
    for bits in (None, 32):
        plan = plan_placement(tmp_path / "half", bits=bits, **arguments)
        loaded = case.model_class.from_pretrained(tmp_path / "half", **plan.arguments())
        assert plan.weights == {"cpu": sum(tensor.nbytes for tensor in loaded.parameters())}


@pytest.mark.parametrize("form", ["int4:64", "int8"])
def test_llamoes_formats_are_planned_before_the_weights_are_quantized(form, tmp_path):
    """The bytes are those of the files that `quantize` then writes, and of the model that is loaded from them."""
    sizes = {"hidden_size": 192, "head_dim": 32, "intermediate_size": 64, "intermediate_size_mlp": 128}
    model = llamoe.LlamoeForCausalLM(TEXT.make_config(**sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    weights, _, group = form.partition(":")
    quantize(tmp_path / "plain", tmp_path / "packed", to=weights, group_size=int(group) if group else None)
    arguments = {"gpus": 0, "ram": "1GB", "headroom": 0}
    planned = plan_placement(tmp_path / "plain", quantization=form, **arguments)
    written = plan_placement(tmp_path / "packed", **arguments)
    assert (planned.parts, planned.weights) == (written.parts, written.weights)
    assert f"--to {weights}" in str(planned) and f'QuantizationConfig("{weights}"' in str(planned)
    loaded = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "packed")
    tensors = [*loaded.named_parameters(), *loaded.named_buffers()]
    sizes_loaded = {name: tensor.nbytes for name, tensor in tensors if "rotary" not in name}
    assert written.form == f"llamoe {weights}" and written.weights == {"cpu": sum(sizes_loaded.values())}
    assert written.experts == {"cpu": sum(size for name, size in sizes_loaded.items() if is_expert(name))}
    for more in ({"bits": 16}, {"quantization": "int8"}):
        with pytest.raises(ValueError, match="is quantized already: leave bits and quantization out"):
            plan_placement(tmp_path / "packed", **more)
    with pytest.raises(ValueError, match="give the folder with the weights"):
        plan_placement(loaded.config)
    away = plan_placement(
        tmp_path / "plain",
        quantization=form,
        gpus=0,
        ram=planned.weights["cpu"] - 100,
        context=40,
        headroom=0,
    )
    assert away.device_map["experts"] == "disk" and "QuantizationConfig" not in str(away)


def test_experts_stay_in_their_layers_if_they_cannot_be_read_alone(tmp_path):
    """Files of torch.save have whole layers on disk; layers in bitsandbytes' formats cannot be on disk."""
    model = TEXT.make()
    model.save_pretrained(tmp_path / "plain")
    torch.save(model.state_dict(), tmp_path / "plain" / "pytorch_model.bin")
    (tmp_path / "plain" / "model.safetensors").unlink()
    total = sum(split_bytes(model))
    plan = plan_placement(tmp_path / "plain", gpus=0, ram=total, context=20, headroom=0)
    assert plan.experts_memory is None and set(plan.device_map.values()) == {"cpu", "disk"}
    assert sum(plan.weights.values()) == total
    pytest.importorskip("bitsandbytes", reason="install llamoe[bitsandbytes]")
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    packed = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path / "half", quantization_config=quantization)
    packed.save_pretrained(tmp_path / "packed")
    half = sum(plan_placement(tmp_path / "half", gpus=0, ram="1GB", headroom=0).weights.values())
    plan = plan_placement(tmp_path / "packed", gpus=0, ram="1GB", headroom=0)
    assert plan.form == "bitsandbytes 4" and 0.25 * half < plan.weights["cpu"] < 0.7 * half
    with pytest.raises(ValueError, match="does not fit"):
        plan_placement(tmp_path / "packed", gpus=0, ram=plan.weights["cpu"], context=20, headroom=0)
    beside = plan_placement(tmp_path / "packed", gpus=[2e5], ram="1GB", context=20, headroom=0)
    assert "and bitsandbytes refuses that" in str(beside)


def test_transformers_configurations_are_planned_like_llamoes():
    for stock, name in (
        (stock_mixtral_config(), "LlamoeMixtralForCausalLM"),
        (stock_text_config(), "LlamoeForCausalLM"),
    ):
        plan = plan_placement(stock, gpus=0, ram="5GB")
        assert plan.parts == plan_placement(CASES[name].make_config(), gpus=0, ram="5GB").parts


def test_time_of_reading_experts_follows_from_bandwidths():
    """A token of Scout in int4 reads 3.40 GB of experts, from RAM at 80 GB/s or from a drive at 6 GB/s."""
    plan = plan_placement(SCOUT, gpus=["16GB"], ram="64GB", quantization="int4:64", context=1024)
    assert plan.device_map["experts"] == "cpu" and plan.expert_bytes_per_step == pytest.approx(
        3.40e9, rel=2e-3
    )
    missed = 1 - plan.hit_share

    def rate(plan, what):
        return missed / plan.seconds[what]

    assert rate(plan, "experts from RAM") == pytest.approx(80 / 3.397, rel=1e-3)
    disk = plan_placement(SCOUT, gpus=["16GB"], ram="5GB", quantization="int4:64", context=1024)
    assert disk.experts_memory == GB
    assert (1 - disk.hit_share) / disk.seconds["experts from the drive"] == pytest.approx(6 / 3.397, rel=1e-3)
    assert disk.tokens_per_second == pytest.approx(1 / sum(disk.seconds.values()))
    maverick = plan_placement("llama-4-maverick", gpus=["20GB"], ram="256GB", quantization="int4:64")
    assert maverick.expert_bytes_per_step == pytest.approx(1.70e9, rel=2e-3)
    # Two rows choose 31/16 experts on average. The CPU computes them, so the link's bandwidth does not matter.
    two = plan_placement(
        SCOUT, gpus=["16GB"], ram="64GB", quantization="int4:64", context=1024, batch=2,
        bandwidths=llamoe.Bandwidths(ram="20GB", link="25GB"),
    )  # fmt: skip
    times = 2 - 1 / 16
    assert two.expert_bytes_per_step == pytest.approx(times * plan.expert_bytes_per_step, rel=1e-6)
    missed = 1 - two.hit_share
    assert rate(two, "experts from RAM") == pytest.approx(20 / 3.397 / times, rel=1e-3)


def test_a_step_reads_weights_and_cache_once():
    """A dense model reads the cache and all weights except the embedding, but a tied embedding as the head."""
    for tied in (False, True):
        config = DENSE.make_config(tie_word_embeddings=tied)
        model = llamoe.LlamoeDenseForCausalLM(config)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        weights -= 0 if tied else model.get_input_embeddings().weight.nbytes
        cache = sum(cache_bytes(config, 40, element_size=4, piece=40))
        plan = plan_placement(
            config, gpus=0, ram=10**8, bits=32, context=40, headroom=0, bandwidths=llamoe.Bandwidths(ram=1000)
        )
        assert sum(plan.seconds.values()) == pytest.approx((weights + cache) / 1000)


def test_a_tied_head_stays_with_its_embedding():
    config = DENSE.make_config(tie_word_embeddings=True)
    total = sum(parameter.nbytes for parameter in llamoe.LlamoeDenseForCausalLM(config).parameters())
    plan = plan_placement(config, gpus=[total * 3 // 4, total], ram=0, bits=32, context=20, headroom=0)
    assert set(plan.weights) == {0, 1} and sum(plan.weights.values()) == total
    assert place_of(plan, "lm_head.weight") == place_of(plan, "model.embed_tokens.weight") == 0


def test_this_machine_is_the_default():
    # The machine's free memory may be less than the default headroom.
    plan = plan_placement(DENSE.make_config(), context=20, headroom=0)
    assert plan.room["cpu"] > 0 and "the whole model" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(gpus=-1), "gpus=-1"), (dict(gpus=["24 potatoes"]), "gpus='24 potatoes'"),
        (dict(gpu_memory="-3GB"), "gpu_memory='-3GB'"), (dict(gpus=0, ram=True), "ram=True"),
        (dict(ram="nan"), "ram='nan'"), (dict(gpus=0, ram="4GB"), "headroom=4 GB"),
        (dict(bits=5), "bits=5"), (dict(batch=0), "batch=0"),
        (dict(context=0), "context=0"), (dict(prefill=0), "prefill=0"),
        (dict(quantization="int3"), "quantization='int3'"), (dict(quantization="int4:big"), "quantization='int4:big'"),
        (dict(quantization="int4", bits=16), "bits=16 and quantization='int4': give only one"),
        (dict(quantization="int8:32"), "group_size=32: choose 32, 64, 128, 256 for int4"),
        (dict(batch=10**6), r"weights 3.2, routed experts 90.2, .* in 1000000 rows 1073741.8 GB\) does not fit"),
        # Layers in llamoe's formats never stay on disk.
        (dict(model="llama-2-70b", quantization="int4", gpu_memory="12GB", ram="16GB"), "does not fit"),
        (dict(model="llama-4-scut"), "no preset"), (dict(model="no/such/folder"), "No such file"),
        (dict(model=""), "config.json: cannot be read"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_arguments_and_small_machines_are_refused_with_the_numbers(arguments, named):
    with pytest.raises(ValueError, match=named):
        plan_placement(**{"model": "mixtral-8x7b", "ram": "256GB", "gpus": 1, **arguments})


def test_consecutive_numbers_in_names_are_joined():
    names = ["a.layers.1", "a.layers.2", "a.layers.3", "norm", "a.layers.5.x.experts", "a.layers.7.x.experts"]
    assert summarize(names) == "a.layers.1-3, norm, a.layers.5,7.x.experts"
    assert summarize(["embed", "l.1", "l.2", "l.4"]) == "embed, l.1-2,4" and summarize([]) == ""


def test_published_sizes():
    machine = dict(ram="256GB", bits=16)
    scout = plan_placement(SCOUT, gpus=4, **machine)
    assert sum(scout.weights.values()) / GB == pytest.approx(2 * 108.641793536, abs=0.05)
    assert sum(scout.cache.values()) == 48 * 8192 * 4096 and set(scout.device_map.values()) == {0, 1, 2}
    one = plan_placement(SCOUT, gpus=1, context=131072, prefill=4096, **machine)
    assert 100 < one.weights["cpu"] / GB < 200
    # Twelve layers cache all tokens. The others cache a chunk less one token, and the tokens of one forward pass.
    assert one.cache[0] == (12 * 131072 + 36 * (8191 + 4096)) * 2 * 8 * 128 * 2
    maverick = {
        count: plan_placement("llama-4-maverick", gpus=count, **machine).weights for count in (8, 11, 12)
    }
    assert sum(maverick[8].values()) / GB == pytest.approx(803.17, abs=0.1)
    # Twelve accelerators hold the whole model.
    assert maverick[8].get("disk") and maverick[11].get("cpu") and not {"cpu", "disk"} & {
        device for device, size in maverick[12].items() if size
    }  # fmt: skip
    assert plan_placement("llama-2-7b", gpus=1, **machine).context == 4096


@pytest.mark.parametrize(
    ("kind", "group_size"),
    [("symmetric", 32), ("asymmetric", 64), ("awq", None), ("fp8", None), ("int8", None)],
)
def test_folders_packed_by_other_programs_are_planned_as_they_are_loaded(kind, group_size, tmp_path):
    """Bytes are those of the loaded model. A plan with experts on disk loads, and computes the same logits."""
    published = pytest.importorskip("support.published")
    sizes = {"hidden_size": 256, "intermediate_size": 128, "intermediate_size_mlp": 384}
    published.publish(tmp_path, "llama4", kind, group_size, config=sizes)
    arguments = {"gpus": 0, "headroom": 0, "context": 40}
    plan = plan_placement(tmp_path, ram="1GB", **arguments)
    loaded = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, **plan.arguments())
    tensors = [*loaded.named_parameters(), *loaded.named_buffers()]
    sizes_loaded = {name: tensor.nbytes for name, tensor in tensors if "rotary" not in name}
    assert plan.weights == {"cpu": sum(sizes_loaded.values())}
    assert plan.experts == {"cpu": sum(size for name, size in sizes_loaded.items() if is_expert(name))}
    away = plan_placement(tmp_path, ram=plan.weights["cpu"] + plan.cache["cpu"] - 100, **arguments)
    assert away.device_map == {"": "cpu", "experts": "disk"} and away.experts == {"disk": plan.experts["cpu"]}
    offloaded = llamoe.LlamoeForCausalLM.from_pretrained(tmp_path, **away.arguments())
    ids = torch.arange(30)[None]
    assert torch.equal(offloaded(ids).logits, loaded(ids).logits)
    offloaded.close()
