"""The tokenizer of LLaMA 1 and 2: a SentencePiece model to tokenizer.json, and back.

SentencePiece always puts a space before a text. transformers' own `LlamaTokenizer` adds it only where the text does not
begin with one, and so loses a piece. Here the normalizer adds it. Nothing splits the text into words, as in
SentencePiece, whose high-ranked pieces may span words.

SentencePiece (Kudo and Richardson, 2018, arXiv:1808.06226) ranks pieces by their scores. Each conversion is compared
with SentencePiece itself before it is used.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from ...configuration.errors import CheckpointError
from .merges import merges_of

# SentencePiece writes this for a space.
SPACE = "\u2581"
# Piece types of sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_MODEL_TYPES = {1: "unigram", 2: "byte-pair encoding", 3: "words", 4: "characters"}
_BPE = 2
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# Where the dummy prefix goes if a model has symbols of its own, see _normalizer.
_PREFIX_BUT_FOR = r"\A(?!(?:{})\z)(?=[\s\S])"
_PROBES = (
    "", " ", "   ", " leading", "trailing ", "two  spaces", "a b", "\n", "\n\n x", "\t tab", "line\r\nline", "<s>",
    "</s>", "<unk>", "<0x0A>", SPACE, f"a{SPACE}b", "Grüße, 世界! 🙂", "e\u0301", "\u00a0", "\u200b", "1234567890",
    "aaaaaaaaaaaaaaaaa", "def f(x):\n        return x", "[INST] hi [/INST] ", "x" * 70, " " * 33,
)  # fmt: skip


def read(content: bytes, origin: str) -> Any:
    """The `ModelProto` of a SentencePiece model, checked.

    Raises:
        CheckpointError: it is damaged, of a kind that LLaMA does not use, or a library is missing.
    """
    library, messages = _libraries(origin)
    proto = messages.ModelProto()
    advice = "Take the file from the release again."
    try:
        proto.ParseFromString(content)
        parts = [name for name in ("trainer_spec", "normalizer_spec") if not proto.HasField(name)]
        if parts or not proto.pieces:
            missing = " and ".join(parts) or "pieces"
            raise CheckpointError(
                f"{origin}: a SentencePiece model of {len(proto.pieces)} pieces without {missing}, as if cut short. "
                + advice
            )
        # Pieces that are not UTF-8 are bytes.
        if not all(isinstance(piece.piece, str) for piece in proto.pieces):
            raise CheckpointError(f"{origin}: a SentencePiece model with a piece that is no text. {advice}")
        library.SentencePieceProcessor(model_proto=content)
    except CheckpointError:
        raise
    # protobuf and sentencepiece raise errors of their own.
    except Exception as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{origin}: a damaged SentencePiece model ({problem}). {advice}") from error
    trainer = proto.trainer_spec
    if trainer.model_type != _BPE:
        raise CheckpointError(
            f"{origin}: a SentencePiece model of the type {_MODEL_TYPES.get(trainer.model_type, trainer.model_type)}; "
            f"{_MODEL_TYPES[_BPE]}, as LLaMA's, was expected."
        )
    if trainer.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise CheckpointError(
            f"{origin}: a SentencePiece model that writes spaces as no LLaMA tokenizer does "
            "(treat_whitespace_as_suffix, escape_whitespaces); tokenizer.json cannot say that."
        )
    unused = [piece.piece for piece in proto.pieces if piece.type == UNUSED]
    if unused:
        raise CheckpointError(
            f"{origin}: {len(unused)} pieces are marked as unused (the first is {unused[0]!r}), which tokenizer.json "
            "cannot say."
        )
    for name in ("bos", "eos", "unk"):
        number = getattr(trainer, f"{name}_id")
        if not 0 <= number < len(proto.pieces):
            raise CheckpointError(
                f"{origin}: its {name}_id is {number}, and it has {len(proto.pieces)} pieces; a LLaMA tokenizer has "
                "all of unk, bos and eos."
            )
        piece = proto.pieces[number]
        if piece.type != (UNKNOWN if name == "unk" else CONTROL):
            raise CheckpointError(
                f"{origin}: its {name}_id is {number}, but that piece, {piece.piece!r}, is an ordinary one. {advice}"
            )
    return proto


def special_tokens(proto: Any) -> dict[str, str]:
    """Tokens by transformers' roles: bos_token, eos_token, unk_token and pad_token.

    Meta's files have no padding token; `<unk>` stands in. A model with byte fallback never produces it from text, so
    batches can be padded without a new row in the embedding, and a loss that ignores padding does not ignore the end
    of text.
    """
    trainer = proto.trainer_spec
    names = {
        f"{name}_token": proto.pieces[getattr(trainer, f"{name}_id")].piece for name in ("bos", "eos", "unk")
    }
    padding = trainer.pad_id if 0 <= trainer.pad_id < len(proto.pieces) else trainer.unk_id
    return {**names, "pad_token": proto.pieces[padding].piece}


def to_json(proto: Any, origin: str) -> bytes:
    """Build tokenizer.json; ids equal SentencePiece's for every text, with `<s>` in front.

    Raises:
        CheckpointError: SentencePiece itself gives other ids for one of a list of texts.
    """
    trainer = proto.trainer_spec
    pieces = [piece.piece for piece in proto.pieces]
    if len(set(pieces)) != len(pieces):
        twice = next(piece for index, piece in enumerate(pieces) if piece in pieces[:index])
        raise CheckpointError(
            f"{origin}: the piece {twice!r} is there twice. Take the file from the release again."
        )
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    tokenizer = Tokenizer(
        BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges_of(sorted(scores, key=scores.__getitem__, reverse=True)),
            unk_token=pieces[trainer.unk_id],
            fuse_unk=True,
            byte_fallback=trainer.byte_fallback,
        )
    )
    tokenizer.normalizer = _normalizer(proto)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    # Tokens that a text may spell, in the order of their ids within a kind.
    for kind in (CONTROL, UNKNOWN, USER_DEFINED):
        tokenizer.add_tokens(
            [
                AddedToken(piece.piece, normalized=kind == USER_DEFINED, special=kind != USER_DEFINED)
                for piece in proto.pieces
                if piece.type == kind
            ]
        )
    bos = pieces[trainer.bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, trainer.bos_id)],
    )
    _try(tokenizer, proto, origin)
    return tokenizer.to_str(pretty=True).encode()


def from_json(content: Mapping[str, Any], roles: Mapping[str, str | None], origin: str) -> bytes:
    """Build a SentencePiece model that gives the ids of a tokenizer.json.

    The file has byte-pair encoding of characters, with a space put in front of a text. `roles` are bos_token,
    eos_token, unk_token and pad_token of tokenizer_config.json.

    Raises:
        CheckpointError: SentencePiece cannot express the file; the message says why.
    """
    library, messages = _libraries(origin)
    model = content["model"]
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    names = {**{name: token["id"] for name, token in added.items()}, **model["vocab"]}
    pieces = {index: name for name, index in names.items()}
    if sorted(pieces) != list(range(len(names))):
        raise CheckpointError(
            f"{origin}: its {len(names)} tokens do not have the ids 0 to {len(names) - 1}, one each, which a "
            "SentencePiece model needs."
        )
    proto = messages.ModelProto()
    scores = _scores(model, added, origin)
    unknown = model.get("unk_token") or roles.get("unk_token") or "<unk>"
    for index in range(len(pieces)):
        name = pieces[index]
        piece = proto.pieces.add(piece=name, score=scores.get(name, 0.0), type=NORMAL)
        if name == unknown:
            piece.type = UNKNOWN
        elif name in added:
            piece.type = CONTROL if added[name]["special"] else USER_DEFINED
        elif model.get("byte_fallback") and _BYTE_PIECE.fullmatch(name):
            piece.type = BYTE
        elif len(name) == 1:
            # Lower than all merged pieces, since this one is never merged from others.
            piece.score = -float(len(pieces))
    trainer = proto.trainer_spec
    trainer.model_type = _BPE
    trainer.vocab_size = len(pieces)
    trainer.byte_fallback = bool(model.get("byte_fallback"))
    trainer.pad_id = -1
    for role, usual in {"unk": unknown, "bos": "<s>", "eos": "</s>"}.items():
        name = roles.get(f"{role}_token") or usual
        if name not in names:
            raise CheckpointError(
                f"{origin}: has no {role} token ({name!r}), which SentencePiece models of LLaMA have. Say in "
                f"tokenizer_config.json which of its tokens is the {role}_token."
            )
        setattr(trainer, f"{role}_id", names[name])
        setattr(trainer, f"{role}_piece", name)
        if role != "unk":
            proto.pieces[names[name]].type = CONTROL
    padding = roles.get("pad_token")
    if padding in names and names[padding] not in (trainer.unk_id, trainer.bos_id, trainer.eos_id):
        trainer.pad_id, trainer.pad_piece = names[padding], padding
        proto.pieces[names[padding]].type = CONTROL
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = _has_dummy_prefix(content, origin)
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    result = proto.SerializeToString()
    try:
        library.SentencePieceProcessor(model_proto=result)
    except Exception as error:
        raise CheckpointError(f"{origin}: SentencePiece refuses a model of its tokens ({error}).") from error
    # Unlike Meta's code, Metaspace adds no space to a text that begins with one; such texts are not compared.
    _try(
        Tokenizer.from_str(json.dumps(dict(content))), proto, origin, leading=bool(content.get("normalizer"))
    )
    return result


def extended(content: bytes, tokens: Mapping[str, int], origin: str) -> bytes:
    """A SentencePiece model with special tokens, name to id, appended as control pieces."""
    proto = read(content, origin)
    for name, index in sorted(tokens.items(), key=lambda item: item[1]):
        if index != len(proto.pieces):
            raise CheckpointError(
                f"{origin}: has {len(proto.pieces)} pieces, and the tokenizer.json beside it gives {name!r} the id "
                f"{index}: the two do not belong together."
            )
        proto.pieces.add(piece=name, score=0.0, type=CONTROL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString()


def _libraries(origin: str) -> tuple[Any, Any]:
    try:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise CheckpointError(
            f"{origin}: SentencePiece models need the libraries sentencepiece and protobuf ({error}). Install them "
            "with: pip install 'llamoe[tokenizers]'"
        ) from error
    return sentencepiece, sentencepiece_model_pb2


def _normalizer(proto: Any) -> Any:
    settings = proto.normalizer_spec
    steps: list[Any] = []
    if settings.precompiled_charsmap:
        steps.append(normalizers.Precompiled(settings.precompiled_charsmap))
    if settings.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if settings.add_dummy_prefix:
        symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
        if symbols:
            # tokenizers normalizes each symbol before searching for it; the prefix must not become a part of it.
            names = "|".join(re.escape(symbol) for symbol in symbols)
            steps.append(normalizers.Replace(Regex(_PREFIX_BUT_FOR.format(names)), SPACE))
        else:
            steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _scores(model: Mapping[str, Any], special: Collection[str], origin: str) -> dict[str, float]:
    """A score for each merged piece by the place of its pairs; other orders than SentencePiece's are refused."""
    vocab = model["vocab"]
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    places: dict[str, int] = {}
    last = ""
    for left, right in pairs:
        piece = left + right
        if piece != last and piece in places:
            raise CheckpointError(
                f"{origin}: the pairs that give {piece!r} do not stand together in its merges. SentencePiece ranks "
                "pieces, not pairs, and cannot follow that."
            )
        places.setdefault(piece, len(places))
        last = piece
    known = set(pairs)
    normal = vocab.keys() - set(special)
    for piece in normal:
        if _BYTE_PIECE.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if (left, right) in known or left not in normal or right not in normal:
                continue
            raise CheckpointError(
                f"{origin}: its merges leave out {left!r} + {right!r}, which gives the token {piece!r}. "
                "SentencePiece joins any two pieces whose sum is one, and cannot follow that."
            )
    return {piece: -float(place) for piece, place in places.items()}


def _has_dummy_prefix(content: Mapping[str, Any], origin: str) -> bool:
    """Whether a text gets a space in front; other changes of a text are refused."""
    steps = _steps(content.get("normalizer"), "normalizers")
    cutting = _steps(content.get("pre_tokenizer"), "pretokenizers")
    kinds = []
    for step in [*steps, *cutting]:
        kind, pattern = step["type"], step.get("pattern", {})
        if kind == "Replace" and pattern.get("Regex", "").startswith(_PREFIX_BUT_FOR.partition("{}")[0]):
            kind = "Prepend"
        if kind == "Replace" and (pattern.get("String"), step.get("content")) == (" ", SPACE):
            kind = "spaces"
        kinds.append(kind)
    if sorted(kinds) in (["spaces"], ["Prepend", "spaces"]):
        return "Prepend" in kinds
    if kinds == ["Metaspace"] and not cutting[0].get("split", True):
        return cutting[0].get("prepend_scheme", "always") != "never"
    raise CheckpointError(
        f"{origin}: prepares a text by {', '.join(kinds) or 'nothing'}. A SentencePiece model as LLaMA's can be made "
        f"of one that writes spaces as {SPACE} and changes nothing else (Prepend with Replace, or unsplit Metaspace)."
    )


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Any]:
    if not part:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def _try(tokenizer: Tokenizer, proto: Any, origin: str, *, leading: bool = True) -> None:
    """Compare with SentencePiece itself on fixed texts and on texts made of the model's own pieces.

    `leading` says whether to include texts that begin with a space.

    Raises:
        CheckpointError: the ids of a text differ.
    """
    library, _ = _libraries(origin)
    reference = library.SentencePieceProcessor(model_proto=proto.SerializeToString())
    normal = [piece.piece for piece in proto.pieces if piece.type == NORMAL]
    stride = max(1, len(normal) // 2000)
    own = [
        "".join(normal[start :: stride * 31][:24]).replace(SPACE, " ")
        for start in range(0, stride * 31, stride)
    ]
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    for text in [*_PROBES, *own]:
        if not leading and text[:1] in (" ", SPACE):
            continue
        expected = reference.encode(text)
        given = tokenizer.encode(text, add_special_tokens=False).ids
        if given != expected and text not in symbols:
            raise CheckpointError(
                f"{origin}: tokenizer.json and the SentencePiece model give different ids for {text!r}: {given} and "
                f"{expected}. This tokenizer cannot be converted without changing what the model reads."
            )
    tokenizer.encode_special_tokens = before
