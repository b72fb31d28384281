"""The few-row kernels under Triton's interpreter, in another process, since Triton chooses it at import."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from llamoe.modeling.kernels.limits import TRITON_MAX_ROWS
from llamoe.modeling.moe import experts as moe_experts

from ..batch import check, draw_batch, forward
from ..judge import Wrong
from ..subject import draw_subject


def case(rng: random.Random, seed: int, notes: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fuzz.kinds.kernels", str(seed)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "RESULT passed" not in done.stdout:
        raise Wrong(" ".join((done.stdout + done.stderr).split())[-500:])


@torch.no_grad()
def interpreted(seed: int) -> str:
    """Run a few rows through forced kernels, as the kernels' tests do."""
    import numpy as np
    import triton.runtime.interpreter

    # Triton 3.6 keeps scalars as arrays of one element and calls `int` on loop bounds, which numpy 2.4 refuses.
    patch_tensor = triton.runtime.interpreter._patch_lang_tensor

    def patch_tensor_too(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.squeeze(self.handle.data)))

    vars(triton.runtime.interpreter)["_patch_lang_tensor"] = patch_tensor_too
    # The CPU as a device whose kernels are right.
    vars(moe_experts).update(
        may_have_gpu_kernel=lambda device: True,
        few_rows_limit=lambda device: TRITON_MAX_ROWS,
        has_gpu_kernel=lambda *_: True,
    )
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = ["float32", "float32", "bfloat16", "float16"]
    subject = draw_subject(
        rng,
        seed,
        rng.choice(["llama4_text", "mixtral"]),
        dtypes=dtypes,
        experts=["llamoe"],
    )
    batch = draw_batch(rng, generator, subject.fields["vocab_size"], ["plain", "left", "packed"], 16)
    _, fed = forward(subject.model, batch)
    check(fed, subject.judge, "logits by kernels")
    return "passed"


if __name__ == "__main__":
    print("RESULT", interpreted(int(sys.argv[1])))
