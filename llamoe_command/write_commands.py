"""The commands that write a folder: each calls one function of `llamoe.conversion` with the same options."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .app import writes
from .options import Instruct, ModelOfFile, Seed, Source, Target


@writes("convert")
def convert(
    source: Source,
    target: Target,
    to: Annotated[
        Literal["hf", "meta"], typer.Option(help="Format of TARGET: Hugging Face's (hf) or Meta's (meta).")
    ] = "hf",
    shards: Annotated[
        int | None,
        typer.Option(
            help="With --to meta: number of files that each tensor is split over. It must divide the number of "
            "key/value heads. The default is the number of files in Meta's release of this size."
        ),
    ] = None,
    experts: Annotated[
        Literal["fused", "split"],
        typer.Option(
            help="With --to hf: write one tensor for all experts of a layer (fused), as transformers does, or separate "
            "tensors for each expert (split)."
        ),
    ] = "fused",
    instruct: Instruct = None,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            metavar="<scaling>",
            help="Scaling of rotary embeddings in TARGET as JSON: a whole scaling with its rope_type, or the entries "
            "of SOURCE's that change.",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of Meta, Mistral AI or Hugging Face to Hugging Face's or Meta's format.

    Tokenizer, chat template, generation settings and processor settings are converted, too. The result works with
    transformers' AutoTokenizer, AutoProcessor and generate.

        llamoe convert llama-2-7b-chat chat                     # from Meta's files

        llamoe convert chat meta --to meta --shards 2           # back, in two files

        llamoe convert Llama-4-Scout scout --experts split      # unfused experts

        llamoe convert Llama-3.2-mine mine --rope-scaling '{"factor": 32}'
    """


@writes("convert_vision", without=("shard_size", "layout"))
def vision(
    source: Source,
    target: Target,
    image_size: Annotated[
        int | None,
        typer.Option(
            help="Side of TARGET's square pictures in pixels, for which position embeddings are interpolated. The "
            "default is SOURCE's."
        ),
    ] = None,
    model: ModelOfFile = None,
) -> None:
    """Convert a vision tower: open_clip's MetaCLIP, Hugging Face's CLIP and MetaCLIP 2, or llamoe's.

    An open_clip file does not store which activation function the tower was trained with. MetaCLIP's first releases use
    QuickGELU: for them, give --model a name that ends with -quickgelu.

        llamoe vision l14_400m.pt tower --model ViT-L-14-quickgelu --image-size 336
    """


@writes("upcycle")
def upcycle(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A dense LLaMA or Mistral of any format.")],
    target: Target,
    experts: Annotated[int, typer.Option(help="Number of routed experts in each mixture layer.")],
    family: Annotated[
        Literal["llama4", "mixtral"] | None,
        typer.Option(
            help="Kind of mixture: llama4, which has a shared expert, or mixtral. The default is mixtral if SOURCE has "
            "a sliding window, else llama4."
        ),
    ] = None,
    interleave: Annotated[
        int,
        typer.Option(
            help="Distance between mixture layers: 1 makes all layers mixtures, 2 every second one. Mixtral needs 1."
        ),
    ] = 1,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Number of experts that compute each token. The default is 1 for llama4 and 2 for mixtral."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Make a mixture of experts from a dense LLaMA or Mistral. Before training it computes what SOURCE computes.

    With --family mixtral every expert is a copy of the dense feed-forward (sparse upcycling, Komatsuzaki et al. 2022).
    With --family llama4 the dense feed-forward becomes the shared expert. The routed experts are copies of it whose
    last matrix is zero.

        llamoe upcycle llama-2-7b moe --experts 8 --interleave 2

        llamoe upcycle mistral-7b moe --family mixtral --experts 8
    """


@writes("merge_kv_heads")
def gqa(
    source: Source,
    target: Target,
    kv_heads: Annotated[
        int, typer.Option(help="Number of key/value heads of TARGET. It must divide SOURCE's number.")
    ],
) -> None:
    """Merge groups of key/value heads, to turn multi-head attention into grouped-query attention.

    The mean of each group of heads replaces the group (Ainslie et al. 2023). TARGET needs further training to regain
    quality.

        llamoe gqa llama-2-7b llama-2-7b-gqa --kv-heads 8
    """


@writes("assemble")
def assemble(
    text: Annotated[
        Path,
        typer.Argument(
            metavar="TEXT", help="Folder of the decoder and its tokenizer: a LLaMA, a mixture, or a Llama 4."
        ),
    ],
    vision: Annotated[
        Path, typer.Argument(metavar="VISION", help="The vision tower: a folder, or an open_clip file.")
    ],
    target: Target,
    image_size: Annotated[
        int | None,
        typer.Option(
            help="Side in pixels of the square tiles of a picture. The default is the tower's size."
        ),
    ] = None,
    max_tiles: Annotated[
        int, typer.Option(help="Largest number of tiles into which a picture is split.")
    ] = 16,
    model: ModelOfFile = None,
    seed: Seed = 0,
) -> None:
    """Join a decoder and a vision tower into one multimodal checkpoint, ready for training.

    The projector is initialised at random, and so is the adapter if the tower has none. Tokens for pictures, a
    processor and a chat template are added.

        llamoe assemble moe tower multimodal
    """


@writes("quantize", without=("dtype", "layout"))
def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A model of any format, in 16 or 32 bits.")
    ],
    target: Target,
    to: Annotated[
        Literal["int4", "int8"],
        typer.Option(
            help="int4: 4 bits, with a scale for each group of inputs. int8: 8 bits, with a scale for each output."
        ),
    ],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="With --to int4: number of inputs that share a scale: 32, 64, 128 or 256. The default is 32."
        ),
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Whether to quantize routed experts.")
    ] = True,
    linears: Annotated[
        bool, typer.Option("--linears/--no-linears", help="Whether to quantize the decoder's linear layers.")
    ] = True,
    search: Annotated[
        bool,
        typer.Option(
            "--search/--no-search",
            help="Search the scales with the least rounding error, or take them from the largest weights, which is "
            "faster.",
        ),
    ] = True,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<name>",
            help="Name of a module that stays in 16 bits, or the end of the names of several. May be given repeatedly.",
        ),
    ] = None,
    instruct: Instruct = None,
) -> None:
    """Store a model's experts and linear layers in 4 or 8 bits.

    Embeddings, output head, norms, routers, vision tower and projector stay in 16 bits. from_pretrained loads TARGET
    without further arguments; `llamoe convert` turns it back into 16 bits.

        llamoe quantize mixtral-8x7b mixtral-int4 --to int4

        llamoe quantize mixtral-8x7b mixtral-int8 --to int8 --keep o_proj
    """
