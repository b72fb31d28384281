"""Talk with a language model; its answers are streamed. An empty line ends the conversation.

python examples/chat.py FOLDER
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import llamoe

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("llamoe-tiny"))
MAX_NEW_TOKENS = 256

# Folders of transformers' own LLaMA, Mistral, Mixtral and Llama 4 are read as llamoe's models.
llamoe.adopt()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto", device_map="auto")
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

messages = []
with suppress(EOFError):
    while line := input("> ").strip():
        messages.append({"role": "user", "content": line})
        # A model without a chat template continues each line.
        inputs = (
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            if tokenizer.chat_template
            else tokenizer(line, return_tensors="pt")
        )
        output = model.generate(**inputs.to(model.device), streamer=streamer, max_new_tokens=MAX_NEW_TOKENS)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})
