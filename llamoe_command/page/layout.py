"""Build the page of `llamoe chat`: a conversation, and the experts of its last answer."""

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gradio as gr

import llamoe

from .chat_model import ChatModel, Outcome
from .expert_record import layer_names
from .expert_view import answer_table, coloured_answer, colours, heat_map, overlay

_NO_ANSWER = "The experts of the last answer are shown here. Ask a question first."
_MAX_NEW_TOKENS = 4096
# A mixture with more experts has no legend.
_MOST_IN_LEGEND = 16
# Every hour, pictures are deleted that were uploaded more than a day ago; in seconds.
_DELETE_CACHE = (3600, 86400)
# Beginning of an answer that is an error message.
_FAILED = "**No answer.**"

logger = logging.getLogger("llamoe")


def make_page(chat: ChatModel) -> gr.Blocks:
    """Build the page of a model; its method `launch` starts it."""
    with gr.Blocks(
        title=f"llamoe: {chat.name}", analytics_enabled=False, fill_height=True, delete_cache=_DELETE_CACHE
    ) as page:
        gr.Markdown(f"## {chat.name}")
        outcome = gr.State(None)
        with gr.Tabs():
            with gr.Tab("Chat"):
                _chat(chat, outcome)
                speed = gr.Markdown(elem_id="speed")
                hidden: Any = {"show_progress": "hidden", "api_visibility": "private"}
                outcome.change(lambda last: str(last or ""), outcome, speed, **hidden)
            if chat.has_experts:
                with gr.Tab("Experts"):
                    _experts(chat, outcome)
    return page


def _chat(chat: ChatModel, outcome: gr.State) -> None:
    def check(message: Any, *_: Any) -> dict[str, Any]:
        try:
            _read(message)
        except ValueError as error:
            return gr.validate(False, str(error))
        return gr.validate(True, "")

    def answer(
        message: Any,
        history: list[dict[str, Any]],
        max_new_tokens: int,
        temperature: float,
        is_adapted: bool = True,
    ) -> Iterator[tuple[str, Outcome | None]]:
        try:
            earlier = _answered([_as_chat_message(message) for message in history])
            messages = _plain_text([*earlier, {"role": "user", "content": _read(message)}], chat)
            yield from chat.answer(messages, max_new_tokens, temperature, is_adapted=is_adapted)
        # The error becomes an answer, since an exception in an event would leave gradio's input box locked.
        except Exception as error:
            if not isinstance(error, (OSError, ValueError)):
                logger.exception("a question was not answered")
            sentence = " ".join(str(error).split()) or type(error).__name__
            yield f"{_FAILED} {sentence}", None

    gr.ChatInterface(
        answer,
        multimodal=chat.sees_pictures,
        chatbot=gr.Chatbot(show_label=False, height="60vh", buttons=["copy"], elem_id="conversation"),
        textbox=_question_box(chat),
        validator=check,
        additional_inputs=_settings(chat),
        additional_inputs_accordion=gr.Accordion("Settings", open=False, render=False),
        additional_outputs=[outcome],
        # The model answers one question at a time; other questions wait.
        concurrency_limit=1,
        api_name="chat",
    )


def _question_box(chat: ChatModel) -> gr.Textbox | gr.MultimodalTextbox:
    shared = {"stop_btn": True, "autofocus": True, "elem_id": "question", "render": False}
    if chat.sees_pictures:
        return gr.MultimodalTextbox(
            placeholder="Drop a picture here, and ask about it.",
            file_types=["image"],
            file_count="multiple",
            sources=["upload"],
            **shared,
        )
    return gr.Textbox(placeholder="Ask something.", submit_btn=True, **shared)


def _settings(chat: ChatModel) -> list[Any]:
    longest = min(_MAX_NEW_TOKENS, chat.max_tokens)
    length = gr.Slider(
        1, longest, value=min(256, longest), step=1, label="Longest answer, in tokens", elem_id="length",
        render=False,
    )  # fmt: skip
    temperature = gr.Slider(
        0, 2, value=0, step=0.05, label="Temperature (0: always the most probable token)",
        elem_id="temperature", render=False,
    )  # fmt: skip
    settings: list[Any] = [length, temperature]
    if chat.adapter:
        settings.append(gr.Checkbox(True, label=f"Adapter {chat.adapter}", elem_id="adapter", render=False))
    return settings


def _experts(chat: ChatModel, outcome: gr.State) -> None:
    config = chat.model.config.get_text_config()
    layers = [(name, index) for index, name in enumerate(layer_names(config))]
    color_map = colours(config.num_local_experts)
    note = gr.Markdown(_NO_ANSWER)
    with gr.Column(visible=False) as column:
        layer = gr.Dropdown(layers, value=0, label="Mixture layer", interactive=True, elem_id="layer")
        with gr.Row():
            picture = gr.AnnotatedImage(
                label="Expert of each part of the picture", color_map=color_map, elem_id="overlay",
                visible=chat.sees_pictures,
            )  # fmt: skip
            answered = gr.HighlightedText(
                label="Expert of each token of the answer", color_map=color_map,
                show_legend=config.num_local_experts <= _MOST_IN_LEGEND, elem_id="answered",
            )  # fmt: skip
        gr.Markdown("Share of the tokens that each expert computed")
        load = gr.Plot(show_label=False, elem_id="load")
        table = gr.Dataframe(
            label="Experts of each token, with the router's weights in brackets",
            interactive=False,
            wrap=True,
            elem_id="table",
        )

    def show_layer(last: Outcome | None, index: int) -> dict[Any, Any]:
        record = last and last.record
        if record is None:
            return {}
        image = overlay(record, index)
        return {
            picture: gr.AnnotatedImage(image, visible=image is not None),
            answered: coloured_answer(record, index),
        }

    def show(last: Outcome | None, index: int) -> dict[Any, Any]:
        record = last and last.record
        updates = {note: gr.Markdown(visible=record is None), column: gr.Column(visible=record is not None)}
        if record is None:
            return updates
        return updates | {load: heat_map(record), table: answer_table(record)} | show_layer(last, index)

    inputs, of_layer = [outcome, layer], [picture, answered]
    outputs = [note, column, *of_layer, load, table]
    outcome.change(show, inputs, outputs, show_progress="hidden", api_visibility="private")
    layer.change(show_layer, inputs, of_layer, show_progress="hidden", api_visibility="private")


def _read(message: Any) -> list[dict[str, Any]]:
    """Return the question and its pictures as content parts of a message, in transformers' form.

    Raises:
        ValueError: a picture cannot be read, or there is no question.
    """
    text, files = (message, []) if isinstance(message, str) else (message["text"], message["files"])
    if not text.strip():
        raise ValueError("The question is empty. Type one.")
    return [*map(_picture, files), {"type": "text", "text": text}]


def _picture(path: str) -> dict[str, Any]:
    try:
        return {"type": "image", "image": llamoe.read_picture(path)}
    except ValueError as error:
        # Name the file without the temporary folder into which gradio has put it.
        raise ValueError(str(error).replace(str(Path(path)), Path(path).name)) from error


def _answered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without failed answers and their questions: chat templates require alternating roles."""
    messages = [message for message in messages if not _is_failure(message)]
    pairs = pairwise([*messages, {"role": "user"}])
    return [message for message, after in pairs if (message["role"], after["role"]) != ("user", "user")]


def _is_failure(message: dict[str, Any]) -> bool:
    """Return True for an answer that is an error message, or that was stopped before its first text."""
    text = "".join(part["text"] for part in message["content"] if part["type"] == "text")
    return message["role"] == "assistant" and (not text or text.startswith(_FAILED))


def _as_chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message of gradio's history to transformers' form, a list of content parts."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    content = [_picture(part["file"]["path"]) if part["type"] == "file" else part for part in parts]
    return {"role": message["role"], "content": content}


def _plain_text(messages: list[dict[str, Any]], chat: ChatModel) -> list[dict[str, Any]]:
    """Replace lists of content parts by plain text if the model reads no pictures."""
    if chat.sees_pictures:
        return messages
    return [
        message | {"content": "".join(part["text"] for part in message["content"])} for message in messages
    ]
