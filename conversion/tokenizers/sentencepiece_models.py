"""Convert the tokenizer of LLaMA 1 and 2 and older Mistral models, a SentencePiece model (arXiv:1808.06226).

transformers' converter makes tokenizer.json. The converter ignores some of SentencePiece's settings, so the ids of many
texts are compared with SentencePiece's before the result is used.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import SpmConverter

from ...configuration.errors import CheckpointError
from .source_tokenizer import SourceTokenizer, begin_with, refuse

# SentencePiece's character for a space.
_SPACE = "\u2581"
# Piece types of sentencepiece_model.proto.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
# The model type of byte-pair encoding in sentencepiece_model.proto.
_BPE = 2
# Texts whose ids are compared with SentencePiece's.
_PROBES = (
    "", " ", "   ", " leading", "trailing ", "two  spaces", "a b", "\n", "\n\n x", "\t tab", "line\r\nline", "<s>",
    "</s>", "<unk>", "<0x0A>", _SPACE, f"a{_SPACE}b", "Grüße, 世界! 🙂", "e\u0301", "\u00a0", "\u200b", "1234567890",
    "aaaaaaaaaaaaaaaaa", "def f(x):\n        return x", "[INST] hi [/INST] ", "x" * 70, " " * 33,
)  # fmt: skip


def read(content: bytes, origin: str, family: str) -> SourceTokenizer:
    """Read a SentencePiece model.

    Raises:
        CheckpointError: it is damaged, or lacks one of the tokens unk, bos and eos.
    """
    proto = _parse(content, origin)
    ids = {name: getattr(proto.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk")}
    for name, index in ids.items():
        kind = _UNKNOWN if name == "unk" else _CONTROL
        if not 0 <= index < len(proto.pieces) or proto.pieces[index].type != kind:
            raise CheckpointError(
                f"{origin}: its {name}_id is {index}, which is not the id of such a token among its "
                f"{len(proto.pieces)} pieces; a LLaMA tokenizer has all of unk, bos and eos."
            )
    # Meta's files have no padding token, so `<unk>` is used, which byte fallback never makes from text. With it batches
    # are padded without a new row in the embedding, and a loss that ignores padding does not ignore the end of text.
    padding = proto.trainer_spec.pad_id
    ids["pad"] = padding if 0 <= padding < len(proto.pieces) else ids["unk"]
    special = {
        piece.piece: index for index, piece in enumerate(proto.pieces) if piece.type in (_CONTROL, _UNKNOWN)
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
    # Installed by llamoe's extra `tokenizers`.
    from sentencepiece import SentencePieceProcessor

    proto = _empty_model()
    try:
        proto.ParseFromString(content)
        SentencePieceProcessor(model_proto=content)
    # protobuf and sentencepiece raise errors of their own.
    except Exception as error:
        refuse(origin, f"a damaged SentencePiece model ({error})")
    # A file that is cut short behind its pieces can be parsed, but lacks the settings that follow them.
    if not (proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        refuse(
            origin, f"a SentencePiece model of {len(proto.pieces)} pieces without settings, as if cut short"
        )
    return proto


def _empty_model() -> Any:
    from sentencepiece import sentencepiece_model_pb2

    # pyright does not find the class, since it is made when the module is imported.
    return sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]


def model_of_pieces(pieces: Iterable[tuple[str, float, int]], ids: Mapping[str, int], prefix: bool) -> bytes:
    """Make a SentencePiece model of byte-pair encoding from its pieces.

    Args:
        pieces: text, score and type of each piece, in the order of their ids.
        ids: ids of "bos", "eos", "unk" and "pad"; a missing one has SentencePiece's default.
        prefix: whether the tokenizer puts a space before a text.
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
    """Make tokenizer.json, which gives SentencePiece's ids with `<s>` in front.

    Raises:
        CheckpointError: SentencePiece gives other ids for one of the compared texts.
    """
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    tokenizer = SpmConverter.build_tokenizer_from_spm_proto(proto, ids)
    special = [piece.piece for piece in proto.pieces if piece.type in (_CONTROL, _UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    bos = proto.trainer_spec.bos_id
    tokenizer.post_processor = begin_with(proto.pieces[bos].piece, bos)
    _compare(tokenizer, proto, origin)
    return tokenizer.to_str(pretty=True).encode()


def _compare(tokenizer: Tokenizer, proto: Any, origin: str) -> None:
    """Compare a tokenizer with SentencePiece, on `_PROBES` and on texts that are made of the model's pieces.

    Raises:
        CheckpointError: the ids of a text differ.
    """
    from sentencepiece import SentencePieceProcessor

    reference = SentencePieceProcessor(model_proto=proto.SerializeToString())
    normal = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    stride = max(1, len(normal) // 2000)
    texts_of_pieces = [
        "".join(normal[start :: stride * 31][:24]).replace(_SPACE, " ")
        for start in range(0, stride * 31, stride)
    ]
    tokenizer.encode_special_tokens = True
    for text in [*_PROBES, *texts_of_pieces]:
        expected = reference.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != expected:
            raise CheckpointError(
                f"{origin}: tokenizer.json and the SentencePiece model give different ids for {text!r}: {ids} and "
                f"{expected}. This tokenizer cannot be converted without changing what the model reads."
            )
    tokenizer.encode_special_tokens = False
