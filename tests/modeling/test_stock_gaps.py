"""What transformers' own Llama 4 (5.23) does not do, or does wrong, and llamoe does: one short test for each.

The files named beside them test the same at length; gap 7, about the processor, is in test_processor.py. Stock's
behaviour is not asserted: it may be repaired any day.
"""

import accelerate
import pytest
import torch
from support.models import (
    IMAGE_TOKEN,
    MODELS,
    MULTIMODAL,
    PADDING,
    TOKENS_PER_TILE,
    make_asymmetric,
    max_abs,
    run,
    stock_text_config,
    text_config,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, CompileConfig, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from llamoe.modeling.moe.layer import MixtureOfExperts

TEXT = next(case for case in MODELS if case.name == "LlamoeForCausalLM")


@torch.no_grad()
def generate(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1, **options)


def test_gap_01_only_chosen_experts_are_computed():
    """Multiplications of a mixture, counted: 13 experts in stock, one and the shared one here."""
    sizes = dict(num_local_experts=13, num_experts_per_tok=1)
    stock, ours = Llama4TextMoe(stock_text_config(**sizes)), MixtureOfExperts(text_config(**sizes))
    ours.load_state_dict(make_asymmetric(stock).state_dict())
    x, counts, outputs = torch.randn(1, 57, ours.router.weight.shape[1]), [], []
    for block in (stock, ours.eval()):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            output = block(x)
        counts.append(counter.get_total_flops() - 2 * 57 * ours.router.weight.numel())
        outputs.append((output[0] if isinstance(output, tuple) else output).view(x.shape))
    assert counts[0] == pytest.approx(counts[1] * 14 / 2, rel=1e-6)
    assert max_abs(*outputs) < 1e-5 * outputs[0].std()


def test_gap_02_the_load_balancing_loss_is_there_and_trains_the_router():
    """See test_losses.py."""
    model, inputs = TEXT.make().train(), TEXT.inputs()
    model.config.router_aux_loss_coef = 0.5
    plain = model(**inputs, labels=inputs["input_ids"]).loss
    output = model(**inputs, labels=inputs["input_ids"], output_router_logits=True)
    assert output.loss.item() == pytest.approx(plain.item() + 0.5 * output.aux_loss.item(), rel=1e-5)
    output.aux_loss.backward()
    assert all(
        block.router.weight.grad.abs().max() > 0
        for block in model.modules()
        if isinstance(block, MixtureOfExperts)
    )


def test_gap_03_temperature_and_chunks_follow_position_ids():
    """Left padding and packing change no logits; see test_positions.py."""
    model, inputs = TEXT.make(floor_scale=4), TEXT.inputs()
    padded = run(model, **inputs)
    rows = [TEXT.row(inputs, row)["input_ids"] for row in range(len(PADDING))]
    alone = [run(model, input_ids=ids)[0] for ids in rows]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in rows])[None]
    packed = run(model, input_ids=torch.cat(rows, 1), position_ids=positions)[0]
    for row, logits in enumerate(alone):
        assert max_abs(padded[row, PADDING[row] :], logits) < 1e-5 * logits.std()
    assert max_abs(packed, torch.cat(alone)) < 1e-5 * packed.std()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_gap_04_beams_and_return_sequences_with_images(options):
    """The text model given the merged embeddings, which knows nothing of images, is the reference.

    See test_generation.py.
    """
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs(length=29)
    given = generate(model, inputs, **options)[:, 29:]
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    features = model.get_image_features(inputs["pixel_values"]).pooler_output
    embeds[inputs["input_ids"] == IMAGE_TOKEN] = torch.cat(list(features))
    merged = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    assert torch.equal(given, generate(model.language_model, merged, **options))


def test_gap_05_embeddings_with_pixels_and_the_towers_attentions():
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs()
    expected = run(model, **inputs)
    ids = inputs.pop("input_ids")
    assert torch.equal(run(model, inputs_embeds=model.get_input_embeddings()(ids), **inputs), expected)
    model.set_attn_implementation("eager")
    features = model.get_image_features(inputs["pixel_values"], output_attentions=True)
    assert len(features.attentions) == model.config.vision_config.num_hidden_layers


def test_gap_06_image_features_are_projected():
    """One entry `[tokens, hidden_size]` for each tile, as vLLM and `generate` read them."""
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs()
    features = model.get_image_features(inputs["pixel_values"])
    hidden_size = model.config.text_config.hidden_size
    assert [tuple(tile.shape) for tile in features.pooler_output] == [(TOKENS_PER_TILE, hidden_size)] * 3
    expected = model.multi_modal_projector(features.last_hidden_state)
    assert torch.equal(torch.stack(list(features.pooler_output)), expected)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "device_map"])
def test_gap_08_offloaded_weights(how, tmp_path):
    """See test_placement.py."""
    model, inputs = MULTIMODAL.make(), MULTIMODAL.inputs(length=29)
    expected = generate(model, inputs)
    if how == "device_map":
        model.save_pretrained(tmp_path / "model")
        folder = tmp_path / "offload"
        model = MULTIMODAL.model_class.from_pretrained(
            tmp_path / "model", device_map={"": "disk"}, offload_folder=folder
        )
    elif how == "cpu_offload":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(generate(model, inputs), expected)


def adapted(case, model=None, **options):
    """A model with LoRA whose B matrices are not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(case.make() if model is None else model, LoraConfig(r=3, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("case", [TEXT, MULTIMODAL], ids=lambda case: case.name)
def test_gap_09_lora_on_all_linear_layers(case):
    """Trains, and leaves router, head and tower alone; see test_peft.py."""
    model, inputs = adapted(case, target_modules="all-linear"), case.inputs()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not [n for n in trained if "router" in n or "lm_head" in n or "vision_model" in n]
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in trained)


@pytest.mark.parametrize("case", [case for case in MODELS if case.is_text], ids=lambda case: case.name)
def test_gap_10_lora_knows_what_to_adapt_in_every_model_type(case):
    names = {name.split(".")[-1] for name in adapted(case).targeted_module_names}
    assert {"q_proj", "v_proj"} <= names


def test_gap_11_lora_on_stacked_experts_is_the_right_way_round():
    """A reads the input, B writes the output, and the adapted weight is W + scale * A^T B^T; see test_peft.py."""
    model = adapted(TEXT, target_parameters=["feed_forward.experts.down_proj"])
    config = model.config
    experts, rank = config.num_local_experts, 3
    pairs = [
        (module.lora_A["default"].weight, module.lora_B["default"].weight)
        for module in model.modules()
        if getattr(module, "parameter_name", None) == "down_proj"
    ]
    assert pairs
    for a, b in pairs:
        assert a.shape == (experts * rank, config.intermediate_size)
        assert b.shape == (config.hidden_size, experts * rank)


def test_gap_12_continuous_batching_within_one_chunk():
    """See test_generation.py."""
    model = TEXT.make(attention_chunk_size=64)
    rows = [TEXT.row(inputs := TEXT.inputs(length=20), row)["input_ids"][0].tolist() for row in (0, 2)]
    assert len(inputs["input_ids"]) == 3
    options = dict(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(
        rows,
        GenerationConfig(**options),
        # Left to transformers, the cache fills the memory.
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
        progress_bar=False,
        warmup=False,
    )
    given = [
        results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.split("_")[-1]))
    ]
    for row, tokens in zip(rows, given, strict=True):
        alone = model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist()
        assert tokens == alone


def test_gap_13_a_static_cache_is_compiled():
    """See test_compile.py."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    model, inputs = TEXT.make_small(), TEXT.row(TEXT.inputs(length=20), 0)
    expected = generate(model, inputs)
    torch._dynamo.reset()
    options = CompileConfig(backend=count, mode=None, fullgraph=True)
    options._compile_all_devices = True
    assert torch.equal(
        generate(model, inputs, cache_implementation="static", compile_config=options), expected
    )
    assert graphs
    torch._dynamo.reset()


def test_gap_14_plans_for_tensor_expert_and_pipeline_parallelism():
    """They exist and name what is there; tests/distributed runs them, backward included."""
    for case in MODELS:
        model = case.make()
        assert model.tp_plan, case.name
        if case.is_text:
            assert model.pp_plan, case.name
        if case.has_experts:
            assert model.ep_plan, case.name


def test_gap_15_flash_attention_is_supported():
    """See test_attention.py for the numbers and the chunks."""
    for case in MODELS:
        assert case.model_class._supports_flash_attn, case.name


def test_gap_16_heads_have_their_base_model(tmp_path):
    for case in MODELS:
        if case.is_head:
            model = case.make()
            assert model.base_model is not model and model.base_model is getattr(
                model, model.base_model_prefix
            )
            model.save_pretrained(tmp_path / case.name)
            assert type(AutoModel.from_pretrained(tmp_path / case.name)) is type(model.base_model)
