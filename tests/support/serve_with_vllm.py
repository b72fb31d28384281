"""Serve tiny models with vLLM's engine and native classes on a CPU, and compare their logits with ours.

This is a program, as importing vLLM changes the process. Its arguments are keys of `SERVED`, by default all. For each
it prints a line of JSON: the key, vLLM's class, and the largest difference of logits. It needs a build of vLLM for
CPUs. If vLLM or its compiled part cannot be imported, the exit status is 77, and standard error says why.
"""

import json
import os
import sys
import tempfile

import torch
from support.models import IMAGE_TOKEN, LENGTH, MODELS, ROPES, max_abs
from support.pictures import drawn, make_processor

from llamoe import LlamoeProcessor

CANNOT_IMPORT = 77
# On a CPU vLLM's attention takes heads of 32 channels, and its experts take multiples of 32.
SIZES = dict(hidden_size=96, intermediate_size=64, head_dim=32)
# On a CPU a block of vLLM's cache holds a multiple of 32 tokens, and an attention chunk must be whole blocks.
BLOCK = 32
WINDOW = dict(sliding_window=16)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
TEXT = dict(num_experts_per_tok=1, attention_chunk_size=BLOCK, num_hidden_layers=4)
ROPE = dict(rope_type="linear", rope_theta=10000.0, factor=4)
CLASSES = {
    "dense": "LlamoeDenseForCausalLM",
    "mixtral": "LlamoeMixtralForCausalLM",
    "text": "LlamoeForCausalLM",
    "multimodal": "LlamoeForConditionalGeneration",
}
FIELDS = {
    "dense": {},
    "dense, biases": dict(attention_bias=True, mlp_bias=True),
    "dense, tied, swish": dict(tie_word_embeddings=True, hidden_act="swish"),
    "dense, window": WINDOW,
    "dense, some windows": {**WINDOW, "layer_types": MIXED},
    **{
        f"dense, {name}": dict(rope_parameters={"rope_type": name, "rope_theta": 10000.0, **ROPES[name]})
        for name in ("llama3", "yarn", "yarn-mscale")
    },
    "dense, linear by an integer": dict(rope_parameters=ROPE),
    "mixtral": {},
    "mixtral, no window": dict(sliding_window=None),
    "text": TEXT,
    "text, every layer a mixture, no chunks, no tuning": dict(
        TEXT, interleave_moe_layer_step=1, attention_chunk_size=None, attn_temperature_tuning=False
    ),
    "text, no mixtures": dict(TEXT, moe_layers=[], num_local_experts=0, num_experts_per_tok=0),
    "multimodal": TEXT,
    "multimodal, tied": dict(TEXT, tie_word_embeddings=True),
}
# Our class and the fields of its decoder, by name.
SERVED = {name: (CLASSES[name.partition(",")[0]], fields) for name, fields in FIELDS.items()}


def logits_of(entries, count: int) -> torch.Tensor:
    """Return the logits in vLLM's records of tokens, `[positions, vocabulary]`."""
    return torch.tensor([[entry[token].logprob for token in range(count)] for entry in entries])


def compare(name: str) -> tuple[str, float]:
    """Serve a model of `SERVED`; return the name of vLLM's class, and the largest difference of its logits."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    class_name, fields = SERVED[name]
    case = next(case for case in MODELS if case.name == class_name)
    ours = case.make(**{**SIZES, **fields})
    if ours.config.get_text_config().tie_word_embeddings:
        ours.get_input_embeddings().weight.data.mul_(SIZES["hidden_size"] ** -0.5)
    prompt = {"prompt_token_ids": case.inputs(padding=(0,), length=LENGTH)["input_ids"][0].tolist()}
    pictures = {}
    with tempfile.TemporaryDirectory() as folder:
        if case.has_images:
            processor = make_processor(LlamoeProcessor)
            processor.save_pretrained(folder)
            # The processor has fewer words than the model has tokens.
            ids = [token % 11 + 1 for token in prompt["prompt_token_ids"]]
            marker = processor.image_token_id
            image = drawn("RGB")
            prompt = {"prompt_token_ids": ids[:3] + [marker] + ids[3:], "multi_modal_data": {"image": image}}
            inputs = processor(images=image, text=f"what {processor.image_token}", return_tensors="pt")
            pictures["pixel_values"] = inputs["pixel_values"]
            ours.config.image_token_index = processor.tokenizer.convert_tokens_to_ids("<|patch|>")
            assert ours.config.image_token_index != IMAGE_TOKEN
        ours.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype="float32",
            block_size=BLOCK,
            enforce_eager=True,
            logprobs_mode="raw_logits",
            max_logprobs=-1,
            max_model_len=128,
            max_num_seqs=1,
            skip_tokenizer_init=not case.has_images,
        )
        # Generate four tokens, to compare logits that are computed from the cache.
        sampling = SamplingParams(
            max_tokens=4, temperature=0, logprobs=-1, prompt_logprobs=-1, detokenize=False, ignore_eos=True
        )
        (result,) = llm.generate([prompt], sampling, use_tqdm=False)
        served = llm.apply_model(lambda model: type(model).__name__)[0]
        (output,) = result.outputs
        # The first token of the prompt has no logits.
        entries = result.prompt_logprobs[1:] + output.logprobs
        theirs = logits_of(entries, ours.config.get_text_config().vocab_size)
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    ids = torch.tensor([result.prompt_token_ids + output.token_ids[:-1]])
    with torch.no_grad():
        expected = ours(input_ids=ids, **pictures).logits[0]
    assert 0.3 < expected.std() < 3, expected.std()
    return served, max_abs(theirs, expected)


if __name__ == "__main__":
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    try:
        import vllm._C  # noqa: F401
    except ImportError as error:
        print(f"vLLM or its compiled part cannot be imported: {error}", file=sys.stderr)
        sys.exit(CANNOT_IMPORT)
    for name in sys.argv[1:] or SERVED:
        print(json.dumps([name, *compare(name)]), flush=True)
