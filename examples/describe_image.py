"""Ask a multimodal model about a picture; its answer is streamed.

python examples/describe_image.py
python examples/describe_image.py FOLDER PICTURE QUESTION
"""

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor, TextStreamer

# The import registers llamoe's model types with the Auto classes.
import llamoe

HERE = Path(__file__).parent
MODEL = str(HERE / "llamoe-tiny")
PICTURE = str(HERE / "pictures/two_shapes.png")
QUESTION = "What is in the picture?"
MAX_NEW_TOKENS = 256

if len(sys.argv) > 1:
    MODEL, PICTURE, QUESTION = sys.argv[1:]

processor = AutoProcessor.from_pretrained(MODEL)
# A message may have several pictures, each as a part of its own.
content = [{"type": "image", "image": llamoe.read_picture(PICTURE)}, {"type": "text", "text": QUESTION}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
)
model: Any = AutoModelForImageTextToText.from_pretrained(MODEL, dtype="auto", device_map="auto")
streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
# This casts the pixels; token ids stay integers.
inputs = inputs.to(model.device, dtype=model.dtype)
model.generate(**inputs, streamer=streamer, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
