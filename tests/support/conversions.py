"""Helpers of the converters' tests: small models in Meta's format, and hashes of folders."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from support import meta_releases as releases
from support.meta_reference import decoder_logits


@dataclass(frozen=True, eq=False)
class MetaCase:
    """A small model in Meta's format, with random weights.

    Attributes:
        name: the model's name in the parity table that the tests print.
        params: the content of params.json.
        vocabulary: number of rows of the embedding, with special tokens; a multiple of every number in `counts`.
        counts: numbers of files into which the weights can be split.
    """

    name: str
    params: dict
    vocabulary: int
    counts: tuple[int, ...]

    @property
    def is_llama4(self) -> bool:
        return "moe_args" in self.params

    @property
    def has_images(self) -> bool:
        return bool(self.params.get("vision_args"))

    @property
    def embedding_axis(self) -> int:
        return 0 if self.special_tokens else 1

    @property
    def special_tokens(self) -> int:
        """Number of special tokens, which follow the tokens of a tiktoken file; 0 for SentencePiece."""
        return releases.SPECIAL_TOKENS.get(" ".join(self.name.split()[:2]), 0)

    @property
    def patch_id(self) -> int:
        return self.vocabulary - self.special_tokens + releases.PATCH_OFFSET

    def weights(self, dtype=torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
        """Draw tensors that are not split over files, by the names of Meta's modules."""
        return releases.make_weights(self.params, self.vocabulary, dtype, seed)

    def tokenizer(self) -> bytes:
        """Return the bytes of a tokenizer.model for the embedding's rows, without the special tokens."""
        if self.special_tokens:
            return releases.tiktoken_model(self.vocabulary - self.special_tokens)
        return releases.small_sentencepiece_model(self.vocabulary)

    def write(
        self, folder: Path, weights: dict, files: int, *, release=True, extras=True, one_storage=False
    ) -> Path:
        """Write whole weights as a folder in Meta's format.

        Args:
            files: number of files.
            release: fuse tensors and name them as Llama 4's releases do.
            extras: add the entries of Meta's files that are not weights.
            one_storage: make the tensors of each file slices of one storage.
        """
        ranks = releases.split(weights, files, self.embedding_axis)
        if self.is_llama4 and release:
            ranks = [releases.fuse(rank, self.params) for rank in ranks]
        if one_storage:
            ranks = [releases.in_one_storage(rank) for rank in ranks]
        if extras:
            more = releases.make_extras(self.params)
            ranks = [rank | more for rank in ranks]
        folder.mkdir(parents=True)
        for rank, entries in enumerate(ranks):
            torch.save(entries, folder / f"consolidated.{rank:02d}.pth")
        (folder / "params.json").write_text(json.dumps(self.params))
        (folder / "tokenizer.model").write_bytes(self.tokenizer())
        return folder

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read a folder in Meta's format by `torch.load` alone; return joined tensors by Meta's module names."""
        ranks = releases.read_ranks(folder)
        return releases.join(
            [releases.unfuse(rank, self.params, len(ranks)) for rank in ranks], self.embedding_axis
        )

    def inputs(self, length: int = 50) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ids `[2, length]`, and tiles `[3, 3, H, W]` for their image tokens, or None without a tower."""
        generator = torch.Generator().manual_seed(1)
        plain = self.vocabulary - self.special_tokens
        ids = torch.randint(3, plain, (2, length), generator=generator)
        if not self.has_images:
            return ids, None
        args = self.params["vision_args"]
        size, patch = args["image_size"], args["patch_size"]
        patches = (size["height"] // patch["height"]) * (size["width"] // patch["width"])
        tokens = round(patches * args["pixel_shuffle_ratio"] ** 2)
        ids[0, 3 : 3 + 2 * tokens] = self.patch_id
        ids[1, 5 : 5 + tokens] = self.patch_id
        return ids, torch.randn(3, 3, size["height"], size["width"], generator=generator)

    @torch.no_grad()
    def logits(self, weights: dict, ids: torch.Tensor, tiles: torch.Tensor | None = None, **params):
        """Compute logits `[2, T, V]` by Meta's formulas in float64; `params` replace entries of params.json."""
        weights = {name: value.double() for name, value in weights.items()}
        params = {**self.params, **params}
        tiles = None if tiles is None else tiles.double()
        return decoder_logits(weights, params, ids, tiles, self.patch_id)


META_LLAMA_1 = MetaCase("LLaMA 1", releases.LLAMA_1, 306, (1, 2, 3, 6))
META_LLAMA_2 = MetaCase("Llama 2", releases.LLAMA_2, 310, (1, 2))
META_LLAMA_3 = MetaCase("Llama 3", releases.LLAMA_3, 520, (1, 2))
META_SCOUT = MetaCase("Llama 4 Scout", releases.SCOUT, 2312, (1, 2))
META_MAVERICK = MetaCase("Llama 4 Maverick", releases.MAVERICK, 2313, (1, 3))


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def looks_finished(folder: Path) -> bool:
    """Return True if a folder has a file by which loaders recognise a whole checkpoint of Hugging Face or Meta."""
    names = ("model.safetensors", "model.safetensors.index.json", "params.json")
    return any((folder / name).exists() for name in names)
