"""Write folders in Mistral AI's format, without llamoe's converters, which they test.

Sources: mistralai/mistral-inference, and transformers' former script convert_mixtral_weights_to_hf.py for the layout of
the first release of Mixtral.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.meta_reference import decoder_logits
from support.meta_releases import make_weights, split

# No two sizes are equal, so that a confused axis fails: 6 heads share 2 key/value heads, and 6 * 8 is not 24.
PARAMS = dict(
    dim=24, n_layers=2, head_dim=8, hidden_dim=40, n_heads=6, n_kv_heads=2, norm_eps=3e-5, vocab_size=53
)
MOE = {"num_experts": 3, "num_experts_per_tok": 2}
HF_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}


@dataclass(frozen=True)
class MistralCase:
    """A small model in Mistral AI's format, with random weights.

    Attributes:
        name: the model's name in the parity table that the tests print.
        params: entries of params.json that replace those of `PARAMS`; None removes a key.
        theta: the rotary base.
        windows: for each layer the number of tokens that a token attends to, itself included; None: no limit.
        layout: "safetensors", "pth", "slices" (two files), or "first release" (with Hugging Face's names in
            params.json).
    """

    name: str
    params: dict = field(default_factory=dict)
    theta: float = 1e6
    windows: tuple = (None, None)
    layout: str = "safetensors"

    @property
    def sizes(self) -> dict:
        return {**PARAMS, **self.params}

    @property
    def experts(self) -> int:
        return MOE["num_experts"] if self.is_mixture else 0

    @property
    def is_mixture(self) -> bool:
        return "moe" in self.params or "num_local_experts" in self.params

    def weights(self, dtype=torch.float32) -> dict[str, torch.Tensor]:
        """Draw weights by mistral-inference's names."""
        return make_weights(self.sizes, self.sizes["vocab_size"], dtype, seed=3)

    def write(self, folder: Path, weights: dict | None = None) -> Path:
        """Write a folder in the case's layout, with drawn weights by default; return the folder."""
        weights = self.weights() if weights is None else weights
        folder.mkdir(parents=True)
        params = {name: value for name, value in self.sizes.items() if value is not None}
        if self.layout == "first release":
            params = {HF_NAMES.get(name, name): value for name, value in params.items()}
        (folder / "params.json").write_text(json.dumps(params))
        if self.layout == "safetensors":
            save_file(weights, folder / "consolidated.safetensors")
        elif self.layout == "pth":
            torch.save(weights, folder / "consolidated.00.pth")
        elif self.layout == "slices":
            for rank, part in enumerate(split(weights, 2, embedding_axis=1)):
                torch.save(part, folder / f"consolidated.{rank:02d}.pth")
        else:
            if "layers.0.feed_forward.gate.weight" in weights:
                weights = first_release(weights, self.experts)
            for rank, part in enumerate(dealt_out(weights, 4)):
                torch.save(part, folder / f"consolidated.{rank:02d}.pt")
        return folder

    def ids(self) -> torch.Tensor:
        """Return token ids `[2, 19]`."""
        return torch.randint(0, self.sizes["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(1))

    def logits(self, weights: dict, theta: float | None = None, windows: tuple | None = None) -> torch.Tensor:
        """Compute the logits of `ids`, `[2, T, V]`, by mistral-inference's formulas in float64."""
        weights = {name: tensor.double() for name, tensor in weights.items()}
        params = self.sizes | MOE | {"rope_theta": theta or self.theta}
        return decoder_logits(weights, params, self.ids(), windows=windows or self.windows)


def first_release(weights: dict, experts: int) -> dict:
    """Return weights by the names of Mixtral's first release, all experts' rows in one matrix, w2 transposed."""
    result = {}
    for name, tensor in weights.items():
        layer, _, rest = name.partition(".feed_forward.")
        if not rest:
            result[name] = tensor
        elif rest == "gate.weight":
            result[f"{layer}.block_sparse_moe.gate.weight"] = tensor
        elif rest.startswith("experts.0."):
            part = rest.split(".")[2]
            matrices = [weights[f"{layer}.feed_forward.experts.{e}.{part}.weight"] for e in range(experts)]
            rows = [matrix.T if part == "w2" else matrix for matrix in matrices]
            result[f"{layer}.block_sparse_moe.{part}"] = torch.cat(rows)
    return result


def dealt_out(weights: dict, count: int) -> list[dict]:
    """Distribute whole tensors over `count` files in turn; the last file has a second copy of the final norm."""
    files = [dict(list(weights.items())[rank::count]) for rank in range(count)]
    files[-1]["norm.weight"] = weights["norm.weight"].clone()
    return files


DENSE = MistralCase("Mistral")
WINDOW = MistralCase("Mistral v0.1", {"sliding_window": 5}, theta=1e4, windows=(5, 5), layout="pth")
WINDOW_IN_SOME = MistralCase(
    "Ministral", {"sliding_window": [None, 5], "rope_theta": 1e5}, theta=1e5, windows=(None, 5)
)
SLICES = MistralCase(
    "Mistral in slices", {"sliding_window": 4, "vocab_size": 54}, theta=1e4, windows=(4, 4), layout="slices"
)
MIXTRAL = MistralCase("Mixtral", {"moe": MOE, "max_seq_len": 77})
MIXTRAL_PTH = MistralCase(
    "Mixtral with a window", {"moe": MOE, "sliding_window": 6, "rope_theta": 2e4}, 2e4, (6, 6), "pth"
)
FIRST_MIXTRAL = MistralCase(
    "Mixtral, first release",
    {"num_local_experts": 3, "num_experts_per_tok": 2, "_sliding_window": "6", "rope_theta": 1e6},
    windows=(6, 6),
    layout="first release",
)
CASES = [DENSE, WINDOW, WINDOW_IN_SOME, SLICES, MIXTRAL, MIXTRAL_PTH, FIRST_MIXTRAL]
