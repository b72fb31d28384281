"""The tokenizer of LLaMA 1 and 2: a SentencePiece model to tokenizer.json.

SentencePiece always puts a space before a text. transformers' own `LlamaTokenizer` adds it only where the text does not
begin with one, and so loses a piece, and its `LlamaConverter` fails for byte-pair models. Here the normalizer adds the
space. Nothing splits the text into words, as in SentencePiece, whose high-ranked pieces may span words.

SentencePiece (Kudo and Richardson, 2018, arXiv:1808.06226) ranks pieces by their scores. Each conversion is compared
with SentencePiece itself before it is used.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from ...configuration.errors import CheckpointError
from .source_tokenizer import SourceTokenizer, begin_with, refuse

# SentencePiece writes this for a space.
SPACE = "\u2581"
# Piece types of sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_BYTE = 6
_BPE = 2
_PROBES = (
    "", " ", "   ", " leading", "trailing ", "two  spaces", "a b", "\n", "\n\n x", "\t tab", "line\r\nline", "<s>",
    "</s>", "<unk>", "<0x0A>", SPACE, f"a{SPACE}b", "Grüße, 世界! 🙂", "e\u0301", "\u00a0", "\u200b", "1234567890",
    "aaaaaaaaaaaaaaaaa", "def f(x):\n        return x", "[INST] hi [/INST] ", "x" * 70, " " * 33,
)  # fmt: skip


def read(content: bytes, origin: str, family: str) -> SourceTokenizer:
    """Read a SentencePiece model.

    Raises:
        CheckpointError: it is damaged, or of a kind that LLaMA does not use.
    """
    proto = _parse(content, origin)
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk")}
    for name, index in ids.items():
        kind = UNKNOWN if name == "unk" else CONTROL
        if not 0 <= index < len(proto.pieces) or proto.pieces[index].type != kind:
            raise CheckpointError(
                f"{origin}: its {name}_id is {index}, and none of its {len(proto.pieces)} pieces is that token; a "
                "LLaMA tokenizer has all of unk, bos and eos."
            )
    # Meta's files have no padding token, and `<unk>` stands in. A model with byte fallback never produces it from text,
    # so batches can be padded without a new row in the embedding, and a loss that ignores padding does not ignore the
    # end of text.
    padding = proto.trainer_spec.pad_id
    ids["pad"] = padding if 0 <= padding < len(proto.pieces) else ids["unk"]
    special = {
        piece.piece: index for index, piece in enumerate(proto.pieces) if piece.type in (CONTROL, UNKNOWN)
    }
    return SourceTokenizer(
        "sentencepiece",
        family,
        content,
        len(proto.pieces),
        special,
        {f"{name}_token": proto.pieces[index].piece for name, index in ids.items()},
        lambda: to_json(proto, origin),
        version=7 if "[SYSTEM_PROMPT]" in special else 3 if "[INST]" in special else 1,
    )


def _parse(content: bytes, origin: str) -> Any:
    # The extra `tokenizers` brings it.
    from sentencepiece import SentencePieceProcessor

    proto = _empty_model()
    try:
        proto.ParseFromString(content)
        SentencePieceProcessor(model_proto=content)
    # protobuf and sentencepiece raise errors of their own.
    except Exception as error:
        refuse(origin, f"a damaged SentencePiece model ({error})")
    # The pieces come first. A file that is cut short behind them is valid, and lacks the settings.
    if not (proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        refuse(
            origin, f"a SentencePiece model of {len(proto.pieces)} pieces without settings, as if cut short"
        )
    kind = proto.trainer_spec.model_type
    if kind != _BPE:
        raise CheckpointError(
            f"{origin}: a SentencePiece model of model_type {kind}; {_BPE}, byte-pair encoding, was expected."
        )
    return proto


def _empty_model() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    # The class is made when the module is imported.
    return sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]


def model_of_pieces(pieces: Iterable[tuple[str, float, int]], ids: Mapping[str, int], prefix: bool) -> bytes:
    """Make a SentencePiece model of pairs again, of its pieces with their scores and types.

    Args:
        pieces: in the order of their ids.
        ids: of "bos", "eos", "unk" and "pad", as far as they are known; else those of LLaMA.
        prefix: whether a space is put before a text.
    """
    proto = _empty_model()
    for piece, score, kind in pieces:
        proto.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.vocab_size = _BPE, len(proto.pieces)
    trainer.byte_fallback = any(piece.type == _BYTE for piece in proto.pieces)
    for name, index in ids.items():
        setattr(trainer, f"{name}_id", index)
        setattr(trainer, f"{name}_piece", proto.pieces[index].piece)
    normalizer.name, normalizer.add_dummy_prefix = "identity", prefix
    normalizer.remove_extra_whitespaces = False
    return proto.SerializeToString()


def to_json(proto: Any, origin: str) -> bytes:
    """Build tokenizer.json; ids equal SentencePiece's for every text, with `<s>` in front.

    Raises:
        CheckpointError: SentencePiece itself gives other ids for one of a list of texts.
    """
    trainer = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_merges_of(sorted(scores, key=scores.__getitem__, reverse=True)),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if proto.normalizer_spec.add_dummy_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # Tokens that a text may spell, in the order of their ids within a kind.
    for kind in (CONTROL, UNKNOWN, USER_DEFINED):
        own = kind == USER_DEFINED
        tokens = [piece.piece for piece in proto.pieces if piece.type == kind]
        tokenizer.add_tokens([AddedToken(token, normalized=own, special=not own) for token in tokens])
    tokenizer.post_processor = begin_with(pieces[trainer.bos_id], trainer.bos_id)
    _compare(tokenizer, proto, origin)
    return tokenizer.to_str(pretty=True).encode()


def _merges_of(pieces: list[str]) -> list[tuple[str, str]]:
    """Every way to split a piece in two; `pieces` are given the best score first.

    SentencePiece merges the two neighbours whose concatenation has the best score, the leftmost first; the library
    `tokenizers` merges the pair that stands first in this list.
    """
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]


def _compare(tokenizer: Tokenizer, proto: Any, origin: str) -> None:
    """Compare with SentencePiece itself on fixed texts and on texts made of the model's own pieces.

    Raises:
        CheckpointError: the ids of a text differ.
    """
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_proto=proto.SerializeToString())
    normal = [piece.piece for piece in proto.pieces if piece.type == NORMAL]
    stride = max(1, len(normal) // 2000)
    own = [
        "".join(normal[start :: stride * 31][:24]).replace(SPACE, " ")
        for start in range(0, stride * 31, stride)
    ]
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    tokenizer.encode_special_tokens = True
    for text in [*_PROBES, *own]:
        expected = reference.encode(text)
        given = tokenizer.encode(text, add_special_tokens=False).ids
        if given != expected and text not in symbols:
            raise CheckpointError(
                f"{origin}: tokenizer.json and the SentencePiece model give different ids for {text!r}: {given} and "
                f"{expected}. This tokenizer cannot be converted without changing what the model reads."
            )
    tokenizer.encode_special_tokens = False
