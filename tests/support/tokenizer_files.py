"""Small tokenizers of Meta's and Mistral AI's kinds, and what a folder has of them."""

import base64
import io
import random


def some_lines(words, lines, seed=0):
    """Lines of 12 words at random, the same ones every time."""
    dice = random.Random(seed)
    made = ["".join(dice.choices("abcdehilnorstuw", k=dice.randint(1, 9))) for _ in range(words)]
    return [" ".join(dice.choices(made, k=12)) for _ in range(lines)]


def sentencepiece_model(lines, vocab_size, **options):
    """A model as LLaMA's: pairs, bytes to fall back on, texts unchanged."""
    import sentencepiece

    written = io.BytesIO()
    settings = dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=vocab_size, **{**settings, **options}
    )
    return written.getvalue()


def rank_table(tokens=tuple(bytes([byte]) for byte in range(256))):
    """A table of tiktoken's, by default of one that knows the 256 bytes only."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def write_files(folder, files, config=None, layout=None):
    """Write files by name, and a configuration."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if config is not None:
        config.save_pretrained(folder, **({"layout": layout} if layout else {}))
    return folder
