"""Context parallelism as accelerate sets it up; its ring needs kernels of GPUs, the model's part none."""

import pytest
import torch
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from support.models import MODELS, max_abs, run

import llamoe

CASES = {case.name: case for case in MODELS}
DENSE, TEXT = CASES["LlamoeDenseForCausalLM"], CASES["LlamoeForCausalLM"]
# What the first of two processes gets of a row: its first and its last quarter, so that both have as much to do.
POSITIONS = torch.cat([torch.arange(7), torch.arange(21, 28)])[None]


@pytest.mark.parametrize("options", [{}, {"attention_chunk_size": None}], ids=["dense", "mixture"])
def test_a_part_of_a_row_is_attended_as_by_stock(options, record_parity):
    """Positions count in the whole row, and no mask is made for the gap between them: the ring attends across it."""
    case = TEXT if options else DENSE
    model = case.make(**options)
    stock_class = getattr(transformers, case.stock_name)
    stock = stock_class(stock_class.config_class(**llamoe.to_stock(model.config))).eval()
    stock.load_state_dict(model.state_dict())
    ids = torch.randint(3, 90, (3, POSITIONS.shape[1]), generator=torch.Generator().manual_seed(4))
    inputs = {"input_ids": ids, "position_ids": POSITIONS.expand(3, -1), "use_cache": False}
    apart = run(model, **inputs)
    for each in (model, stock):
        each.set_attn_implementation("sdpa")
        _attach_context_parallel_hooks(each)
    ours, expected = run(model, **inputs), run(stock, **inputs)
    assert max_abs(ours, apart) > 0.01
    record_parity("context parallel, one part", "transformers", "float32", max_abs(ours, expected))
    assert max_abs(ours, expected) < 1e-5


def test_chunked_layers_are_refused():
    with pytest.raises(ValueError, match="chunked_attention"):
        _attach_context_parallel_hooks(TEXT.make())
