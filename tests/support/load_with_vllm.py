"""Loads a tiny model with vLLM's transformers backend on the CPU, and compares all weights with ours.

Run as a program, once a model: vLLM changes our classes and the process that imports it. It needs vLLM's
Python files and what they import, no compiled part and no GPU: `VLLM_TARGET_DEVICE=cpu` is set. Exit status 77: vLLM
cannot be imported, and standard error says why.
"""

import os
import sys
import tempfile

import torch
from support.models import MODELS, make_asymmetric
from support.pictures import make_processor

from llamoe import LlamoeProcessor

CANNOT_IMPORT = 77
# Experts on the CPU are taken in multiples of 32.
SIZES = dict(hidden_size=96, intermediate_size=64)


def nonzero_values(tensors) -> torch.Tensor:
    """All values in order of size. Zeros are left out: vLLM pads vocabularies with them."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return values[values != 0].sort().values


def compare(case) -> None:
    """Save a model, build and fill it by vLLM, and end the program where a value is missing or at another place."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    ours = make_asymmetric(case.model_class(case.make_config(**SIZES)))
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        if case.has_images:
            make_processor(LlamoeProcessor).save_pretrained(folder)
        config = EngineArgs(
            model=folder,
            model_impl="transformers",
            dtype="float32",
            skip_tokenizer_init=not case.has_images,
            enforce_eager=True,
            max_model_len=64,
        ).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
            served = initialize_model(config)
            for parameter in served.parameters():
                parameter.data.fill_(torch.nan)
            loader = get_model_loader(config.load_config)
            served.load_weights(loader.get_all_weights(config.model_config, served))
    theirs = dict(served.named_parameters())
    unfilled = [name for name, parameter in theirs.items() if parameter.isnan().any()]
    assert not unfilled, unfilled
    expected = ours.state_dict()
    assert torch.equal(nonzero_values(theirs.values()), nonzero_values(expected.values()))
    # Several keys in one place are projections that vLLM stacks, in the order of ours.
    compared: dict[str, list[torch.Tensor]] = {}
    for key, tensor in expected.items():
        place = served.hf_to_vllm_mapper.map_name(key)
        if place in theirs:
            compared.setdefault(place, []).append(tensor)
    assert compared
    for place, parts in compared.items():
        whole = torch.cat(parts)
        assert torch.equal(theirs[place][: len(whole)], whole), place
    print(
        f"{case.name}: {config.model_config.architecture}, {len(expected)} weights, {len(compared)} places by name"
    )


if __name__ == "__main__":
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")
    try:
        import vllm.model_executor.models.transformers  # noqa: F401
    except ImportError as error:
        print(f"vLLM cannot be imported: {error}", file=sys.stderr)
        sys.exit(CANNOT_IMPORT)
    compare(next(case for case in MODELS if case.name == sys.argv[1]))
